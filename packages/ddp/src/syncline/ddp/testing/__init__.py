"""Check that data-parallel training gives the same result as training in one process. For authors of a backend or a hook."""

from .models import MODELS
from .training import check_training

__all__ = ["MODELS", "check_training"]
