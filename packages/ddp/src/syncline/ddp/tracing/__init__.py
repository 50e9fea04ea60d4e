"""Records what each rank does in some training steps: one file for each rank, merged into one trace."""

from .recording import TraceRecording
from .settings import TraceSettings, settings_from

__all__ = ["TraceRecording", "TraceSettings", "settings_from"]
