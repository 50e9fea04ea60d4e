"""Signature: what a collective is. Ranks compare signatures, and a transport finds its plan by one."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple
from zlib import crc32

import torch

from ..reduce_op import Reduction


class Signature(NamedTuple):
    """What one call of a collective does, without its tensors. Hashable.

    A tuple, because every call makes one and looks up its plan by it; a frozen dataclass costs four times as much.

    Attributes:
        name: the method's name, such as "all_reduce".
        op: the reduction; None if there is none.
        root: the root's rank in the group; None if there is none.
        dtype: of the tensor that stands for the call; None if no tensor does.
        shape: of that tensor.
        device_type: where the call's tensors are, such as "cpu".
        detail: what else the ranks must agree on, such as "dtype=torch.int8"; empty if nothing.
        splits: for an all-to-all, how many elements this rank gets from and sends to each rank. Each rank has its own.
    """

    name: str
    op: Reduction | None = None
    root: int | None = None
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    device_type: str = "cpu"
    detail: str = ""
    splits: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    @classmethod
    def of(
        cls, name: str, tensor: torch.Tensor, op: Reduction | None = None, root: int | None = None, detail: str = ""
    ) -> Signature:
        """The signature of a call for which this tensor stands."""
        return cls(name, op, root, tensor.dtype, tensor.shape, device_type_of(tensor), detail)

    # What follows is for those who know that the collective has one.

    @property
    def reduction(self) -> Reduction:
        """The reduction."""
        assert self.op is not None
        return self.op

    @property
    def root_rank(self) -> int:
        """The root's rank in the group."""
        assert self.root is not None
        return self.root

    @property
    def element_dtype(self) -> torch.dtype:
        """The dtype of the tensor."""
        assert self.dtype is not None
        return self.dtype

    @property
    def numel(self) -> int:
        """The number of elements of the tensor that stands for the call."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of that tensor; 0 if there is none."""
        return 0 if self.dtype is None else self.numel * self.dtype.itemsize

    def digest(self) -> int:
        """32 bits of what must be the same on all ranks, so that no rank gets wrong results.

        Of a tensor, the dtype and the number of elements count. Shapes may differ, as in torch.distributed; only `check_calls`
        compares them, too.
        """
        return _digest(self.name, self.op, self.root, self.dtype, self.detail, None if self.dtype is None else self.numel)

    def __str__(self) -> str:
        """In words: "all_reduce(float32[10, 3], op=SUM)"."""
        words = (
            "" if self.dtype is None else f"{dtype_in_words(self.dtype)}{list(self.shape)}",
            "" if self.op is None else f"op={self.op.name}",
            "" if self.root is None else f"root={self.root}",
            self.detail,
        )
        return f"{self.name}({', '.join(filter(None, words))})"


def device_type_of(tensor: torch.Tensor) -> str:
    """Where the tensor is, such as "cpu"."""
    return "cpu" if tensor.is_cpu else tensor.device.type  # the first question costs a third of the second


@functools.lru_cache(maxsize=4096)
def _digest(
    name: str, op: Reduction | None, root: int | None, dtype: torch.dtype | None, detail: str, numel: int | None
) -> int:
    return crc32(repr((name, dtype, op, root, detail, numel)).encode())


def dtype_in_words(dtype: torch.dtype) -> str:
    """A dtype without torch's prefix: "float32"."""
    return str(dtype).removeprefix("torch.")


def tensor_in_words(tensor: torch.Tensor) -> str:
    """A tensor's dtype and shape: "float32[10, 3]"."""
    return f"{dtype_in_words(tensor.dtype)}{list(tensor.shape)}"
