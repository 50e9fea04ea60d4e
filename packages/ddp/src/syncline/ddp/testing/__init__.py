"""Check that data-parallel training equals training in one process. This is for authors of a backend or a hook."""

from .models import MODELS
from .training import check_training

__all__ = ["MODELS", "check_training"]
