"""Collective: one call, as error messages and the comparison of calls between ranks see it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple
from zlib import crc32

import torch

from ..errors import DisagreementError
from .reduce_op import Reduction
from .statements import Statements


class Collective(NamedTuple):
    """One call of a collective. A tuple, because one is made for each call and a frozen dataclass costs three times as much.

    All of it shall be the same on every rank, of the tensor its shape and dtype. It is put into words only when somebody asks.

    Attributes:
        name: the method's name, such as "all_reduce".
        tensor: the tensor that stands for all of the call, if one does.
        op: the reduction, if there is one.
        root: the root, if there is one.
        detail: what else there is to agree on, such as "dtype=torch.int8"; empty if nothing.
    """

    name: str
    tensor: torch.Tensor | None = None
    op: Reduction | None = None
    root: int | None = None
    detail: str = ""

    def signature(self) -> str:
        """What must be the same on every rank, in words: "all_reduce(float32[10, 3], op=SUM)"."""
        words = (
            "" if self.tensor is None else in_words(self.tensor),
            "" if self.op is None else f"op={self.op.name}",
            "" if self.root is None else f"root={self.root}",
            self.detail,
        )
        return f"{self.name}({', '.join(filter(None, words))})"

    def digest(self) -> int:
        """32 bits of what must be the same for the ranks not to harm one another: of a tensor its dtype and number of elements.

        Shapes may differ, as torch.distributed lets them, unless `check_calls` compares signatures.
        """
        tensor = self.tensor
        if tensor is None:
            return digest(self.name, None, self.op, self.root, self.detail, None)
        return digest(self.name, tensor.dtype, self.op, self.root, self.detail, tensor.numel())


@functools.lru_cache(maxsize=4096)
def digest(name: str, dtype: torch.dtype | None, op: Reduction | None, root: int | None, detail: str, numel: int | None) -> int:
    """As `Collective.digest`, of a call that has these."""
    return crc32(repr((name, dtype, op, root, detail, numel)).encode())


def different_calls(signatures: Sequence[str]) -> DisagreementError:
    """The error when ranks, in order, called collectives with these signatures."""
    calls = Statements.of(signatures).in_words()
    return DisagreementError(f"the ranks called different collectives ({calls}); make every rank issue the same ones")


def in_words(tensor: torch.Tensor) -> str:
    """A tensor's dtype and shape: "float32[10, 3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
