"""For those who write a backend or a hook: does data-parallel training with it equal training on one process?"""

from .models import MODELS
from .training import check_training

__all__ = ["MODELS", "check_training"]
