"""Record the work of each rank in some training steps, and merge the ranks' files into one trace."""

from .recording import TraceRecording
from .settings import TraceSettings, fixed_folder, settings_from

__all__ = ["TraceRecording", "TraceSettings", "fixed_folder", "settings_from"]
