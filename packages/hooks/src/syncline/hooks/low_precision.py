"""In which dtype gradients are computed with."""

from __future__ import annotations

import torch


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for halves, any other dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
