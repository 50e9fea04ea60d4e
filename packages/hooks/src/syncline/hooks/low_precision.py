"""The dtype in which hooks compute with gradients."""

from __future__ import annotations

import torch


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for a 16-bit dtype. For any other dtype, return the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
