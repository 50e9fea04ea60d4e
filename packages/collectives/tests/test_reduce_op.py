from __future__ import annotations

import pytest
import torch

from syncline.collectives import InvalidArgumentError, ReduceOp
from syncline.collectives.reduce_op import (
    BOOL,
    COMPLEX,
    DTYPES_OF,
    FLOATS,
    HALVES,
    INTEGERS,
    check_reduction,
    divide,
    premul_sum,
)


def test_every_reduction_has_its_dtypes() -> None:
    assert set(DTYPES_OF) == set(ReduceOp)
    assert HALVES < FLOATS
    kinds = [FLOATS, COMPLEX, INTEGERS, BOOL]
    assert sum(map(len, kinds)) == len(frozenset().union(*kinds))


@pytest.mark.parametrize("op", ReduceOp)
def test_documented(op: ReduceOp) -> None:
    assert op.name in (ReduceOp.__doc__ or "")


@pytest.mark.parametrize("op", ReduceOp)
def test_accepts_what_is_in_the_table_and_nothing_else(op: ReduceOp) -> None:
    reduction = premul_sum(0.5) if op is ReduceOp.PREMUL_SUM else op
    for dtype in FLOATS | COMPLEX | INTEGERS | BOOL | {torch.uint16, torch.float8_e5m2}:
        if dtype in DTYPES_OF[op]:
            check_reduction(reduction, dtype)
        else:
            with pytest.raises(InvalidArgumentError, match=f"{op.name} is not defined for {dtype}"):
                check_reduction(reduction, dtype)


def test_premul_sum_has_a_finite_factor() -> None:
    with pytest.raises(InvalidArgumentError, match="needs a factor"):
        check_reduction(ReduceOp.PREMUL_SUM, torch.float32)
    for factor in (float("nan"), float("inf")):
        with pytest.raises(InvalidArgumentError, match="finite factor"):
            premul_sum(factor)


def test_refusal_lists_what_exists() -> None:
    with pytest.raises(InvalidArgumentError, match="reductions defined for it: SUM, PRODUCT, MIN, MAX, BAND, BOR, BXOR"):
        check_reduction(ReduceOp.AVG, torch.bool)
    with pytest.raises(InvalidArgumentError, match="can only be moved"):
        check_reduction(ReduceOp.SUM, torch.float8_e5m2)


@pytest.mark.parametrize("op", ["sum", None, torch.distributed.ReduceOp.SUM])
def test_only_our_reductions(op: object) -> None:
    with pytest.raises(InvalidArgumentError, match=r"expected a reduction of syncline or of torch\.distributed \(SUM, AVG"):
        check_reduction(op, torch.float32)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", sorted(INTEGERS, key=str))
@pytest.mark.parametrize("ranks", [2, 127, 128, 200, 256, 300, 40_000])
def test_integers_are_divided_by_more_ranks_than_their_dtype_can_count(dtype: torch.dtype, ranks: int) -> None:
    values = [torch.iinfo(dtype).min, 0, 1, 100, torch.iinfo(dtype).max]
    total = torch.tensor(values, dtype=dtype)
    divide(total, ranks)
    assert total.tolist() == [abs(value) // ranks * (-1 if value < 0 else 1) for value in values]
