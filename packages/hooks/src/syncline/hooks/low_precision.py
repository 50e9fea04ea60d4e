"""The precision in which hooks compute with gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch


def math_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for a 16-bit dtype. For any other dtype, return the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def saturated(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor in a floating-point dtype.

    A finite number outside the dtype's range becomes the nearest end of the range. NaN and infinity stay as they are.
    """
    most = torch.finfo(dtype).max
    if most >= torch.finfo(tensor.dtype).max:
        return tensor.to(dtype)
    # bfloat16 cannot hold the range's end of float16, so clamp in float32.
    whole = tensor.to(math_dtype(tensor.dtype))
    return torch.where(whole.isinf(), whole, whole.clamp(-most, most)).to(dtype)


@contextmanager
def plain_math(device: torch.device) -> Iterator[None]:
    """A context in which torch records no gradients, and operations keep the dtypes of their arguments.

    A script may call `backward()` inside `torch.autocast`. Then a matrix product in a hook would return 16-bit numbers.
    """
    autocast = torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()
    with torch.no_grad(), autocast:
        yield
