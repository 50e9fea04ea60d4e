"""For authors of a backend: check that data-parallel training gives the result of training in one process."""

from .models import MODELS
from .training import check_training

__all__ = ["MODELS", "check_training"]
