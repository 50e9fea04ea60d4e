"""The reductions, and the dtypes for which each is defined."""

from __future__ import annotations

import enum

import torch

from .errors import InvalidArgumentError


class ReduceOp(enum.Enum):
    """How the tensors of all ranks are combined, element by element.

    ======== ====================================================================
    SUM      sum over the ranks
    AVG      sum divided by the number of ranks; floating point and complex only
    PRODUCT  product over the ranks
    MIN, MAX smallest, largest value; not for complex numbers
    BAND     bitwise and (logical and for bool); integers and bool only
    BOR      bitwise or; integers and bool only
    BXOR     bitwise exclusive or; integers and bool only
    ======== ====================================================================

    float16 and bfloat16 are accumulated in float32 and rounded once.
    """

    SUM = "sum"
    AVG = "avg"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    BAND = "band"
    BOR = "bor"
    BXOR = "bxor"


HALVES = frozenset({torch.float16, torch.bfloat16})
FLOATS = HALVES | {torch.float32, torch.float64}
COMPLEX = frozenset({torch.complex64, torch.complex128})
INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})
BOOL = frozenset({torch.bool})

DTYPES_OF: dict[ReduceOp, frozenset[torch.dtype]] = {
    ReduceOp.SUM: FLOATS | COMPLEX | INTEGERS,
    ReduceOp.AVG: FLOATS | COMPLEX,
    ReduceOp.PRODUCT: FLOATS | COMPLEX | INTEGERS,
    ReduceOp.MIN: FLOATS | INTEGERS | BOOL,
    ReduceOp.MAX: FLOATS | INTEGERS | BOOL,
    ReduceOp.BAND: INTEGERS | BOOL,
    ReduceOp.BOR: INTEGERS | BOOL,
    ReduceOp.BXOR: INTEGERS | BOOL,
}


def check_reduction(op: ReduceOp, dtype: torch.dtype) -> None:
    """Refuse a reduction that is not defined for a dtype.

    Raises:
        InvalidArgumentError: `op` is no `ReduceOp`, or not one that `dtype` has. The message lists those that exist.
    """
    if not isinstance(op, ReduceOp):  # an unchecked caller may pass torch's
        known = ", ".join(member.name for member in ReduceOp)  # type: ignore[unreachable]  # callers without type checks
        raise InvalidArgumentError(f"expected a syncline ReduceOp ({known}), found {op!r}")
    if dtype not in DTYPES_OF[op]:
        defined = ", ".join(member.name for member in ReduceOp if dtype in DTYPES_OF[member])
        raise InvalidArgumentError(
            f"{op.name} is not defined for {dtype}; reductions defined for it: {defined or 'none (it can only be moved)'}"
        )
