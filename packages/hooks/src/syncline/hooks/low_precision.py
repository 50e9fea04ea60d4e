"""The dtype in which hooks compute with gradients."""

from __future__ import annotations

import torch


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for a 16-bit dtype. For any other dtype, the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
