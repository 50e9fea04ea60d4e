"""What each rank does in some training steps, written to a file of its own, and merged into one trace."""

from .recording import TraceRecording, is_first_to_trace
from .settings import TraceSettings, settings_from

__all__ = ["TraceRecording", "TraceSettings", "is_first_to_trace", "settings_from"]
