"""Collective: one call, as error messages and the comparison of calls between ranks see it."""

from __future__ import annotations

import functools
from typing import NamedTuple
from zlib import crc32

import torch


class Collective(NamedTuple):
    """One call of a collective. A tuple, because one is made for each call and a frozen dataclass costs three times as much.

    Attributes:
        name: the method's name, such as "all_reduce".
        tensor: the tensor whose shape and dtype must be the same on every rank, if there is one.
        detail: what else all ranks must agree on, such as "op=SUM" or "root=0"; empty if nothing.
    """

    name: str
    tensor: torch.Tensor | None = None
    detail: str = ""

    def signature(self) -> str:
        """What must be the same on every rank, in words: "all_reduce(float32[10, 3], op=SUM)"."""
        words = [] if self.tensor is None else [in_words(self.tensor)]
        if self.detail:
            words.append(self.detail)
        return f"{self.name}({', '.join(words)})"

    def digest(self) -> int:
        """32 bits of the signature, for a quick comparison."""
        shape = None if self.tensor is None else self.tensor.shape
        return _digest(self.name, self.detail, None if self.tensor is None else self.tensor.dtype, shape)


@functools.lru_cache(maxsize=4096)
def _digest(name: str, detail: str, dtype: torch.dtype | None, shape: torch.Size | None) -> int:
    return crc32(repr((name, detail, dtype, shape)).encode())


def in_words(tensor: torch.Tensor) -> str:
    """A tensor's dtype and shape: "float32[10, 3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
