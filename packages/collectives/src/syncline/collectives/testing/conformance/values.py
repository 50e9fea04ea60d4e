"""Inputs and expected results of the checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ...group import ProcessGroup
from ...reduce_op import BOOL, COMPLEX, FLOATS, INTEGERS
from ...tensors.layout import bytes_of, in_plain_order

Check: TypeAlias = Callable[[ProcessGroup], None]

#: All dtypes for which at least one reduction is defined.
REDUCIBLE_DTYPES = sorted(BOOL | COMPLEX | FLOATS | INTEGERS, key=str)
#: All dtypes that can be sent: `REDUCIBLE_DTYPES`, and some dtypes that cannot be reduced.
MOVABLE_DTYPES = [
    *REDUCIBLE_DTYPES,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]

_MODULUS = 127  # so that a value fits into every dtype
_UNTOUCHED = 99  # the value of the memory between the elements of a tensor with gaps


class CheckError(AssertionError):
    """A conformance check has found an error of a process group."""


def values(shape: Sequence[int], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of integers from 0 to 126, which depend on rank and index."""
    numel = math.prod(shape)
    index = torch.arange(numel, dtype=torch.int64)
    numbers = (index * 7 + index // _MODULUS * 3 + (rank + 1) * 29) % _MODULUS
    return (numbers % 2 if dtype is torch.bool else numbers).reshape(tuple(shape)).to(dtype)


def terms(shape: Sequence[int], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a rank's input of a SUM. The element at `index` is `(rank + 1) * (1 + index % 5)`."""
    index = torch.arange(math.prod(shape), dtype=torch.int64)
    return ((rank + 1) * (1 + index % 5)).reshape(tuple(shape)).to(dtype)


def sum_of_terms(shape: Sequence[int], size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the SUM of the `terms` of all ranks. The element at `index` is `size * (size + 1) / 2 * (1 + index % 5)`."""
    index = torch.arange(math.prod(shape), dtype=torch.int64)
    return (size * (size + 1) // 2 * (1 + index % 5)).reshape(tuple(shape)).to(dtype)


@dataclass(frozen=True)
class Layout:
    """A memory layout: a view of a contiguous block of memory, which may be larger."""

    name: str
    block_shape: tuple[int, ...]
    view: Callable[[torch.Tensor], torch.Tensor] = lambda block: block

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the view."""
        return tuple(self.view(torch.empty(self.block_shape, device="meta")).shape)


LAYOUTS = (
    Layout("one dimension", (17,)),
    Layout("no dimension", ()),
    Layout("one element", (1,)),
    Layout("no element", (0,)),
    Layout("no element in three dimensions", (3, 0, 2)),
    Layout("two dimensions", (4, 5)),
    Layout("transposed", (5, 4), lambda block: block.t()),
    Layout("channels last", (2, 4, 5, 3), lambda block: block.permute(0, 3, 1, 2)),
    Layout("with an offset", (21,), lambda block: block[4:]),
    Layout("every second row, every third column", (9, 8), lambda block: block[1::2, ::3]),
    Layout("a column", (6, 5), lambda block: block[:, 2]),
    Layout("the diagonal", (5, 5), lambda block: block.diagonal()),
    Layout("one element, of which the stride says nothing", (5,), lambda block: block[3::2]),
    Layout("one element of many", (5, 5), lambda block: block[2, 3]),
    Layout("the middle, transposed", (6, 7), lambda block: block[1:4, 2:6].t()),
)
#: Layouts of the same shape. Ranks must agree on the shape, but not on the layout.
SAME_SHAPE = (
    Layout("4 x 5", (4, 5)),
    Layout("4 x 5, transposed", (5, 4), lambda block: block.t()),
    Layout("4 x 5 with gaps", (8, 11), lambda block: block[::2, 1::2]),
)


class Laid:
    """A tensor that lies inside a block of memory.

    Args:
        layout: the tensor's layout in the block.
        content: the tensor's content.
        block: memory with the shape `layout.block_shape` and the dtype of `content`. None: allocate this memory.
    """

    def __init__(self, layout: Layout, content: torch.Tensor, block: torch.Tensor | None = None) -> None:
        self._layout = layout
        self._untouched = torch.full(layout.block_shape, _UNTOUCHED, dtype=torch.uint8).to(content.dtype)
        self._block = self._untouched.clone() if block is None else block.copy_(self._untouched)
        self.tensor = layout.view(self._block)
        self.tensor.copy_(content)

    def expect(self, content: torch.Tensor) -> None:
        """Check that the tensor has this content, and that the rest of the block has not changed."""
        expect(self.tensor, content, self._layout.name)
        self.tensor.copy_(self._layout.view(self._untouched))
        expect(self._block, self._untouched, f"{self._layout.name}, elements that are not part of the tensor")


def expect(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Check that two tensors have the same shape, dtype and bits.

    Raises:
        CheckError: the tensors differ. The message shows the first difference.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise CheckError(f"{what}: expected {expected.dtype}{list(expected.shape)}, found {found.dtype}{list(found.shape)}")
    differs = (raw(found) != raw(expected)).view(found.numel(), -1).any(dim=1) if found.numel() else torch.empty(0)
    if differs.any():
        first = int(differs.nonzero()[0])
        raise CheckError(
            f"{what}: {int(differs.sum())} of {found.numel()} elements differ; at flat index {first} expected "
            f"{expected.flatten()[first].item()}, found {found.flatten()[first].item()}"
        )


def expect_equal(found: Any, expected: Any, what: str) -> None:
    """Check that two values are equal (`==`).

    Raises:
        CheckError: `found` and `expected` differ.
    """
    if found != expected:
        raise CheckError(f"{what}: expected {expected!r}, found {found!r}")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, in the order of its elements."""
    return bytes_of(in_plain_order(tensor.detach()))


def expect_raises(kind: type[BaseException], call: Callable[[], Any], what: str, mentions: str = "") -> None:
    """Check that `call` raises an error of class `kind`, whose message contains `mentions`.

    Raises:
        CheckError: there is no error, or another message. An error of another class passes through.
    """
    try:
        call()
    except kind as error:
        if mentions not in str(error):
            raise CheckError(f"{what}: expected a message that mentions {mentions!r}, found: {error}") from error
        return
    raise CheckError(f"{what}: expected {kind.__name__}, but nothing was raised")
