"""Record what each rank does in some training steps. Each rank writes a file, and the files are merged into one trace."""

from .recording import TraceRecording
from .settings import TraceSettings, settings_from

__all__ = ["TraceRecording", "TraceSettings", "settings_from"]
