"""What is kept of tensors that come again and again at the same place in memory."""

from __future__ import annotations

import ctypes
from typing import TypeVar

import torch

T = TypeVar("T")

_MOST = 64


class Kept(dict[int, T]):
    """What was made for places in memory, by a number that tells them apart; forgets all when there are too many.

    Nothing of this may keep the memory alive, or touch it. It means something only while a tensor lies there: ask with the
    number of such a one.
    """

    def keep(self, place: int, made: T) -> T:
        """Remember, and return what was made."""
        if len(self) >= _MOST:
            self.clear()
        self[place] = made
        return made


def view_at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host as a flat tensor of an element or more, which does not keep it alive."""
    with torch.inference_mode(False):  # it serves calls outside that mode, too
        return torch.frombuffer((ctypes.c_byte * (numel * dtype.itemsize)).from_address(address), dtype=dtype, count=numel)
