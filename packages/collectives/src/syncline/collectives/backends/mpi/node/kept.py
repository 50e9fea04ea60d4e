"""What is kept of tensors that come again and again at the same place in memory."""

from __future__ import annotations

import ctypes
from typing import TypeVar

import torch

T = TypeVar("T")

_MOST_WEIGHT = 4096


class Kept(dict[int, T]):
    """What was made for places in memory, by a number that tells them apart; forgets the oldest when there is too much.

    Nothing of this may keep the memory alive, or touch it. It means something only while a tensor lies there: ask with the
    number of such a one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._weights: dict[int, int] = {}
        self._weight = 0

    def keep(self, place: int, made: T, weight: int = 1) -> None:
        """Remember what was made; nothing is known of that place. `weight` says how much it is, at 2 KiB each."""
        self[place] = made
        self._weights[place] = weight
        self._weight += weight
        while self._weight > _MOST_WEIGHT and len(self) > 1:
            oldest = next(iter(self))
            del self[oldest]
            self._weight -= self._weights.pop(oldest)


def view_at(address: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory of the host as a flat tensor of an element or more, which does not keep it alive."""
    with torch.inference_mode(False):  # it serves calls outside that mode, too
        return torch.frombuffer((ctypes.c_byte * (numel * dtype.itemsize)).from_address(address), dtype=dtype, count=numel)
