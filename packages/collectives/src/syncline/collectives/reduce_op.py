"""The reductions, and the dtypes for which each is defined."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from .errors import InvalidArgumentError
from .torch_internals import premul_factor


class ReduceOp(enum.Enum):
    """How the tensors of all ranks are combined, element by element.

    =========== ====================================================================
    SUM         sum over the ranks; of bool the logical or
    AVG         sum divided by the number of ranks, integers rounded towards zero; not for bool
    PRODUCT     product over the ranks; of bool the logical and
    MIN, MAX    smallest, largest value; not for complex numbers
    BAND        bitwise and (logical and for bool); integers and bool only
    BOR         bitwise or; integers and bool only
    BXOR        bitwise exclusive or; integers and bool only
    PREMUL_SUM  sum of the terms, each multiplied by a factor; made by `premul_sum`
    =========== ====================================================================

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
    PREMUL_SUM = "premul_sum"

    __hash__ = object.__hash__  # enum's own is a Python function, and every call of a reduction looks its op up several times


@dataclass(frozen=True)
class PremulSum:
    """SUM in which each rank's tensor is multiplied by `factor` first; the same factor on every rank."""

    factor: float

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"PREMUL_SUM({self.factor:g})"


Reduction: TypeAlias = ReduceOp | PremulSum


def premul_sum(factor: float) -> PremulSum:
    """The reduction sum(factor * tensor) over the ranks; floating point and complex only.

    Raises:
        InvalidArgumentError: the factor is not a finite number.
    """
    if not math.isfinite(factor):
        raise InvalidArgumentError(f"expected a finite factor for premul_sum, found {factor}")
    return PremulSum(float(factor))


HALVES = frozenset({torch.float16, torch.bfloat16})
FLOATS = HALVES | {torch.float32, torch.float64}
COMPLEX = frozenset({torch.complex64, torch.complex128})
INTEGERS = frozenset({torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8})
BOOL = frozenset({torch.bool})
REDUCIBLE = FLOATS | COMPLEX | INTEGERS | BOOL

DTYPES_OF: dict[ReduceOp, frozenset[torch.dtype]] = {
    ReduceOp.SUM: FLOATS | COMPLEX | INTEGERS | BOOL,
    ReduceOp.AVG: FLOATS | COMPLEX | INTEGERS,
    ReduceOp.PRODUCT: FLOATS | COMPLEX | INTEGERS | BOOL,
    ReduceOp.MIN: FLOATS | INTEGERS | BOOL,
    ReduceOp.MAX: FLOATS | INTEGERS | BOOL,
    ReduceOp.BAND: INTEGERS | BOOL,
    ReduceOp.BOR: INTEGERS | BOOL,
    ReduceOp.BXOR: INTEGERS | BOOL,
    ReduceOp.PREMUL_SUM: FLOATS | COMPLEX,
}


EXACTLY_HALVED = frozenset({torch.float32, torch.float64})
"""The product with 1 / 2, 1 / 4, ... has the bits of the quotient (complex numbers take other ways, integers have none)."""

# What a sum and a product of truth values are: a backend need not know.
_ON_BOOL: dict[Reduction, Reduction] = {ReduceOp.SUM: ReduceOp.BOR, ReduceOp.PRODUCT: ReduceOp.BAND}

# For each reduction without a factor, and each of its dtypes, the reduction that a backend carries out. Most calls end here.
_CARRIED_OUT: dict[tuple[ReduceOp, torch.dtype], Reduction] = {
    (op, dtype): _ON_BOOL.get(op, op) if dtype in BOOL else op
    for op, dtypes in DTYPES_OF.items()
    for dtype in dtypes
    if op is not ReduceOp.PREMUL_SUM
}


def check_reduction(op: Reduction, dtype: torch.dtype) -> None:
    """Refuse a reduction that is not defined for a dtype.

    Raises:
        InvalidArgumentError: `op` is no reduction of ours, or not one that `dtype` has. The message lists those that exist.
    """
    if op is ReduceOp.PREMUL_SUM:
        raise InvalidArgumentError("PREMUL_SUM needs a factor: pass premul_sum(factor)")
    kind = ReduceOp.PREMUL_SUM if isinstance(op, PremulSum) else op
    if dtype in DTYPES_OF.get(kind, ()):
        return
    if kind not in DTYPES_OF:
        known = ", ".join(member.name for member in ReduceOp)
        raise InvalidArgumentError(f"expected a reduction of syncline or of torch.distributed ({known}), found {op!r}")
    defined = ", ".join(member.name for member in ReduceOp if dtype in DTYPES_OF[member])
    raise InvalidArgumentError(
        f"{kind.name} is not defined for {dtype}; reductions defined for it: {defined or 'none (it can only be moved)'}"
    )


def divide(total: torch.Tensor, count: int) -> None:
    """Divide in place; integers are rounded towards zero.

    By a power of two floating point is multiplied, which gives the same bits in half the time.
    """
    if count == 1:
        return
    if total.dtype in EXACTLY_HALVED and count & (count - 1) == 0:
        total.mul_(1 / count)
    elif total.is_complex() and not total.is_conj():
        # Divided as complex numbers by torch 2.6, an element's bits depend on where in memory it lies.
        torch.view_as_real(total).div_(count)
    else:
        total.div_(count, rounding_mode="trunc" if total.dtype in INTEGERS else None)


# ---- the reductions of torch.distributed, in our words ----

_OURS: dict[Any, Reduction] = (
    {getattr(dist.ReduceOp, op.name): op for op in ReduceOp if op is not ReduceOp.PREMUL_SUM} if dist.is_available() else {}
)

_PREMUL_SUM: Any = getattr(dist.ReduceOp, "PREMUL_SUM", None) if dist.is_available() else None


def from_torch(op: Any) -> Reduction | None:
    """Our word for a reduction of torch's, or None if it is none of these."""
    if not _OURS:
        return None
    ours = _OURS.get(getattr(op, "op", op))  # an instance of `dist.ReduceOp` is equal to the constants, but not found by them
    if ours is None and isinstance(op, dist.ReduceOp) and op == _PREMUL_SUM:
        factor = premul_factor(op)
        return None if factor is None else premul_sum(factor)
    return ours


def checked_reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """Ours or torch's, as a backend carries it out: sums and products of bool are BOR and BAND.

    Raises:
        InvalidArgumentError: it is no reduction, or not one that `dtype` has; see `check_reduction`.
    """
    if type(op) is not ReduceOp and not isinstance(op, PremulSum):
        op = from_torch(op) or op
    carried_out = _CARRIED_OUT.get((op, dtype)) if type(op) is ReduceOp else None
    if carried_out is not None:
        return carried_out
    check_reduction(op, dtype)
    return op  # type: ignore[no-any-return]  # it is a PremulSum: anything else was found above, or refused
