"""Record the work of each rank in some training steps. Each rank writes a file. The files are then merged into one trace."""

from .recording import TraceRecording
from .settings import TraceSettings, settings_from

__all__ = ["TraceRecording", "TraceSettings", "settings_from"]
