"""Inputs and expected results of the checks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ...group import ProcessGroup
from ...reduce_op import BOOL, COMPLEX, FLOATS, INTEGERS, ReduceOp, Reduction, premul_sum
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

#: The number of elements of a large tensor. Most numbers of ranks do not divide this number. Above 2**20 elements, many
#: libraries cut a message into pieces.
LARGE_NUMEL = 2**20 + 3

_FACTOR = 0.3  # of PREMUL_SUM; no floating-point dtype holds it exactly
_COMBINE: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
    ReduceOp.PREMUL_SUM: torch.add,
}


class CheckError(AssertionError):
    """A conformance check has found an error of a process group."""


def values(shape: Sequence[int], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of integers from 0 to 126, which depend on rank and index."""
    numel = math.prod(shape)
    index = torch.arange(numel, dtype=torch.int64)
    numbers = (index * 7 + index // _MODULUS * 3 + (rank + 1) * 29) % _MODULUS
    return (numbers % 2 if dtype is torch.bool else numbers).reshape(tuple(shape)).to(dtype)


def bits(shape: Sequence[int], rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor with unusual bits, which a transport must move unchanged.

    Every fourth element is a nan with a payload, another fourth is -0.0, and another fourth is a subnormal number. The bits of
    the other elements depend on rank and index.
    """
    index = torch.arange(math.prod(shape) * dtype.itemsize, dtype=torch.int64)
    numbers = (index * 2_654_435_761 + (rank + 1) * 40_503 * 65_537 >> 11) % 256
    if dtype is torch.bool:
        return (numbers % 2).reshape(tuple(shape)).bool()
    elements = numbers.to(torch.uint8).view(-1, dtype.itemsize)
    elements[1::4] = 0xFF
    elements[2::4], elements[2::4, -1] = 0, 0x80  # the last byte has the sign
    elements[3::4, 1:], elements[3::4, 0] = 0, 1 + rank % 100
    return elements.view(-1).view(dtype).reshape(tuple(shape))


def reduction(op: ReduceOp) -> Reduction:
    """Return `op` itself; for PREMUL_SUM, return `op` with a factor."""
    return premul_sum(_FACTOR) if op is ReduceOp.PREMUL_SUM else op


def random_terms(op: ReduceOp, shape: Sequence[int], rank: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a rank's random input for a reduction: both signs, fractions, and integers that need all bits of the dtype.

    With up to sixteen ranks, an average does not overflow. Other results of integers may wrap around.
    """
    generator = torch.Generator().manual_seed(1000 + rank)
    draw = functools.partial(torch.rand, tuple(shape), generator=generator, dtype=torch.float64, device="cpu")
    if dtype in BOOL:
        numbers = draw().round()
    elif dtype in INTEGERS:
        info = torch.iinfo(dtype)
        most = info.max // 16 if op is ReduceOp.AVG else info.max
        numbers = torch.randint(-most if info.min < 0 else 0, most, tuple(shape), generator=generator, device="cpu")
    else:  # between 0.5 and 1.5, so that no product overflows
        signed = (draw() + 0.5) * (draw().round() * 2 - 1)
        numbers = torch.complex(signed, draw() - 0.5) if dtype in COMPLEX else signed
    return numbers.to(torch.empty(0).device, dtype)


def expect_reduced(found: torch.Tensor, op: ReduceOp, inputs: Sequence[torch.Tensor], what: str) -> None:
    """Check a result against the reduction of all ranks' inputs. Floating-point results may be rounded once for each rank.

    Raises:
        CheckError: the result is wrong. The message shows the first wrong element.
    """
    dtype = found.dtype
    is_rounded = op not in (ReduceOp.MIN, ReduceOp.MAX) and dtype in FLOATS | COMPLEX
    wide = torch.complex128 if dtype in COMPLEX else torch.float64 if dtype in FLOATS else torch.int64
    wides = [term.to(wide) for term in inputs]
    exact = _reduced(op, wides)
    if not is_rounded:  # a bool is 0 or 1 here; if `to` gets another number than 0, the bool is true
        expect(found, exact.to(dtype), what)
        return
    info = torch.finfo(dtype)
    # A result has at most one rounding for each rank. Each rounding is at most `eps` times the result for absolute values.
    bound = _reduced(op, [term.abs() for term in wides]) * (2 * (len(wides) + 1) * info.eps) + info.tiny
    is_wrong = ~((found.to(wide) - exact).abs() <= bound)  # also true for nan
    if is_wrong.any():
        first = int(is_wrong.flatten().nonzero()[0])
        raise CheckError(
            f"{what}: {int(is_wrong.sum())} of {found.numel()} elements are wrong; at flat index {first} expected "
            f"{exact.flatten()[first].item()} up to rounding, found {found.flatten()[first].item()}"
        )


def _reduced(op: ReduceOp, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    result = functools.reduce(_COMBINE[op], terms)
    if op is ReduceOp.AVG:
        is_integer = result.dtype is torch.int64
        return torch.div(result, len(terms), rounding_mode="trunc") if is_integer else result / len(terms)
    return result * _FACTOR if op is ReduceOp.PREMUL_SUM else result


def in_every_way(group: ProcessGroup, tensor: torch.Tensor, op: Reduction) -> list[tuple[str, torch.Tensor]]:
    """Reduce a flat tensor by all_reduce, by reduce to each root, and by reduce_scatter_tensor.

    Return the name and the result of each call. A reduce to another root gives this rank no result, and is left out.
    """
    all_reduced, scattered = tensor.clone(), torch.zeros_like(tensor)
    group.all_reduce(all_reduced, op)
    group.reduce_scatter_tensor(scattered, tensor.repeat(group.size), op)
    found = [("all_reduce", all_reduced), ("reduce_scatter_tensor", scattered)]
    for root in range(group.size):
        reduced = tensor.clone()
        group.reduce(reduced, root, op)
        if group.rank == root:
            found.append(("reduce", reduced))
    return found


def terms(shape: Sequence[int], rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a rank's input for a SUM. The element at `index` is `(rank + 1) * (1 + index % 5)`."""
    index = torch.arange(math.prod(shape), dtype=torch.int64)
    return ((rank + 1) * (1 + index % 5)).reshape(tuple(shape)).to(dtype)


def sum_of_terms(shape: Sequence[int], size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the SUM of the `terms` of all ranks. The element at `index` is `size * (size + 1) / 2 * (1 + index % 5)`."""
    index = torch.arange(math.prod(shape), dtype=torch.int64)
    return (size * (size + 1) // 2 * (1 + index % 5)).reshape(tuple(shape)).to(dtype)


@dataclass(frozen=True)
class Layout:
    """A memory layout: a view of a contiguous block of memory. The block may be larger than the view."""

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
