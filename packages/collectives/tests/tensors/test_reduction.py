from __future__ import annotations

import pytest
import torch

from syncline.collectives import ReduceOp, premul_sum
from syncline.collectives.reduce_op import DTYPES_OF, Reduction, divide
from syncline.collectives.tensors.reduction import reduce_in_rank_order, reducer_of

# PREMUL_SUM is a kind of reduction; the reduction itself has a factor, here 2, which every dtype multiplies exactly.
CELLS = [(op, dtype) for op in ReduceOp for dtype in sorted(DTYPES_OF[op], key=str)]


def numbers(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(12) * 5 + rank * 3) % 7 % (2 if dtype is torch.bool else 7)).to(dtype)


ORACLE = {
    ReduceOp.SUM: lambda stack: stack.sum(0),
    ReduceOp.AVG: lambda stack: stack.sum(0) / 3,
    ReduceOp.PRODUCT: lambda stack: stack.prod(0),
    ReduceOp.MIN: lambda stack: stack.amin(0),
    ReduceOp.MAX: lambda stack: stack.amax(0),
    ReduceOp.BAND: lambda stack: stack[0] & stack[1] & stack[2],
    ReduceOp.BOR: lambda stack: stack[0] | stack[1] | stack[2],
    ReduceOp.BXOR: lambda stack: stack[0] ^ stack[1] ^ stack[2],
    ReduceOp.PREMUL_SUM: lambda stack: 2 * stack.sum(0),
}


def reduction(op: ReduceOp) -> Reduction:
    return premul_sum(2) if op is ReduceOp.PREMUL_SUM else op


@pytest.mark.parametrize(("op", "dtype"), CELLS)
def test_against_torch(op: ReduceOp, dtype: torch.dtype) -> None:
    terms = [numbers(rank, dtype) for rank in range(3)]
    before = [term.clone() for term in terms]
    result = reduce_in_rank_order(reduction(op), terms)
    assert result.dtype is dtype
    torch.testing.assert_close(result, ORACLE[op](torch.stack(terms)).to(dtype))
    assert all(torch.equal(term, old) for term, old in zip(terms, before, strict=True))


@pytest.mark.parametrize(("op", "dtype"), CELLS)
def test_one_term_is_copied(op: ReduceOp, dtype: torch.dtype) -> None:
    term = numbers(1, dtype)
    result = reduce_in_rank_order(reduction(op), [term])
    assert torch.equal(result, 2 * term if op is ReduceOp.PREMUL_SUM else term)
    assert result.data_ptr() != term.data_ptr()


def test_order_is_the_ranks() -> None:
    """Addition is not associative: (1e8 + 1) - 1e8 is 0 in float32, (1e8 - 1e8) + 1 is 1."""
    big, one = torch.tensor([1e8]), torch.tensor([1.0])
    assert reduce_in_rank_order(ReduceOp.SUM, [big, one, -big]).item() == 0
    assert reduce_in_rank_order(ReduceOp.SUM, [big, -big, one]).item() == 1


def test_halves_round_once() -> None:
    terms = [torch.tensor([256.0 if rank == 0 else 1.0], dtype=torch.bfloat16) for rank in range(5)]
    assert reduce_in_rank_order(ReduceOp.SUM, terms).item() == 260
    assert reduce_in_rank_order(ReduceOp.AVG, [torch.tensor([60000.0]).half()] * 3).item() == 60000


def any_bits(dtype: torch.dtype) -> torch.Tensor:
    """Numbers of every size, also those too small to be normal, infinities and what is no number."""
    integer = torch.int32 if dtype.itemsize == 4 else torch.int64
    limits = torch.iinfo(integer)
    return torch.randint(limits.min, limits.max, (4096,), generator=torch.Generator().manual_seed(0), dtype=integer).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 64, 1000])
def test_division_has_the_bits_of_a_division(dtype: torch.dtype, count: int) -> None:
    numbers = torch.cat([any_bits(dtype), torch.tensor([5e-324, 1.4e-45, 3e-45, 0.0, -0.0], dtype=dtype)])
    expected = numbers / count
    divide(numbers, count)
    assert torch.equal(numbers.isnan(), expected.isnan())
    assert torch.equal(numbers.nan_to_num(0.0).view(torch.uint8), expected.nan_to_num(0.0).view(torch.uint8))


@pytest.mark.parametrize(("op", "dtype"), CELLS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_prepared_is_the_same(op: ReduceOp, dtype: torch.dtype, count: int) -> None:
    terms = [numbers(rank, dtype) for rank in range(count)]
    expected = reduce_in_rank_order(reduction(op), terms)
    reducer_of(terms, reduction(op), dtype)(out=terms[-1])  # where one of the terms is, as in a window
    assert torch.equal(terms[-1], expected)
