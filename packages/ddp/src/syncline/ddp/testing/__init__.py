"""For authors of a backend or a hook: check that data-parallel training equals training in one process."""

from .models import MODELS
from .training import check_training

__all__ = ["MODELS", "check_training"]
