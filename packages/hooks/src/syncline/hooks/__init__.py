"""Communication hooks: how a bucket of gradients travels, under our DDP and under torch's."""

from .allreduce import allreduce_hook, noop_hook
from .cast import bf16_compress_hook, bf16_compress_wrapper, fp16_compress_hook, fp16_compress_wrapper

__all__ = [
    "allreduce_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "noop_hook",
]
