"""The precision in which hooks compute with gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for a 16-bit dtype. For any other dtype, return the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context in which operations keep the dtypes of their arguments.

    A script may call `backward()` inside `torch.autocast`. Then a matrix product in a hook would return 16 bits.
    """
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
