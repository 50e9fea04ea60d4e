"""What each rank does in some training steps, written to a file of its own, and merged into one trace."""

from .recording import TraceRecording
from .settings import TraceSettings, settings_from

__all__ = ["TraceRecording", "TraceSettings", "settings_from"]
