"""How a tensor lies in memory, and how to get it into the plain order in which it travels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import increment_version


def untracked() -> torch.inference_mode:
    """A context in which any tensor may be written: one that requires a gradient, and one made in inference mode.

    (`torch.no_grad()` is not enough for the latter, which a collective may meet on a thread that is not in that mode.)
    """
    return torch.inference_mode()


def mark_written(tensor: torch.Tensor) -> None:
    """Let autograd know that a tensor's memory was written by other means than torch's."""
    if not tensor.is_inference():
        increment_version(tensor)


def is_tracked(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether one of them needs `untracked`; to enter that costs more than to see that most need nothing."""
    for tensor in tensors:  # noqa: SIM110 - a generator for `any` would cost as much again
        if tensor.requires_grad or tensor.is_inference():
            return True
    return False


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two indices lead to the same place. A pure function.

    Cost: sorts the dimensions, unless these interleave in a way that only `as_strided` makes; then it looks at every
    element.
    """
    if 0 in shape:
        return False
    reach = 0  # how far apart the elements lie that the dimensions so far span
    for stride, length in sorted((stride, length) for length, stride in zip(shape, strides, strict=True) if length > 1):
        if stride == 0:
            return True
        if stride <= reach:
            return _has_duplicates(shape, strides)
        reach += stride * (length - 1)
    return False


def in_plain_order(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if its memory holds its values in order, else a copy that does.

    It does not where there are strides, and where torch conjugates or negates lazily (`conj()`, `conj().imag`).
    """
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.resolve_conj().resolve_neg().contiguous()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor with one dimension; itself if it has one already."""
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor in plain order, flat, as uint8.

    A single element is contiguous to torch whatever its stride, but a view as another dtype wants stride 1.
    """
    return tensor.view(-1).as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def contents(tensor: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor of bytes on the CPU. They share its memory, so use them as long as the tensor lives."""
    # An array of ctypes counts in 64 bits. `ctypes.string_at` takes a C int: beyond 4 GiB it returns the rest of a division.
    return memoryview((ctypes.c_ubyte * tensor.numel()).from_address(tensor.data_ptr()))


def _has_duplicates(shape: Sequence[int], strides: Sequence[int]) -> bool:
    places = torch.zeros(1, dtype=torch.int64)
    for length, stride in zip(shape, strides, strict=True):
        places = (places[:, None] + torch.arange(length) * stride).flatten()
    return len(set(places.tolist())) < places.numel()
