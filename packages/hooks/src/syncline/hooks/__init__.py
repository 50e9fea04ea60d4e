"""Communication hooks: how a bucket of gradients travels, under our DDP and under torch's."""

from .allreduce import allreduce_hook, noop_hook
from .cast import fp16_compress_hook

__all__ = ["allreduce_hook", "fp16_compress_hook", "noop_hook"]
