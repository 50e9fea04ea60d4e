"""What is kept of tensors that come again and again at the same place in memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

T = TypeVar("T")

_MOST = 64


class ByAddress(Generic[T]):
    """Remembers what was made for a place in memory; forgets all when there are too many.

    Nothing of this keeps memory alive, or touches it. What is remembered of a place means something only while a tensor lies
    there: ask with the address of such a one.

    Args:
        make: from an address.
    """

    def __init__(self, make: Callable[[int], T]) -> None:
        self._make = make
        self._made: dict[int, T] = {}

    def __getitem__(self, address: int) -> T:
        made = self._made.get(address)
        if made is None:
            if len(self._made) >= _MOST:
                self._made.clear()
            made = self._made[address] = self._make(address)
        return made


def view_at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host as a flat tensor of an element or more, which does not keep it alive."""
    with torch.inference_mode(False):  # it serves calls outside that mode, too
        return torch.frombuffer((ctypes.c_byte * (numel * dtype.itemsize)).from_address(address), dtype=dtype, count=numel)
