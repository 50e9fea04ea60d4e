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
    """How the tensors of all ranks are combined, element by element. Collectives also take the reductions of torch.distributed.

    =========== ====================================================================
    SUM         sum over the ranks; for bool the logical or
    AVG         sum divided by the number of ranks, integers rounded towards zero; not for bool
    PRODUCT     product over the ranks; for bool the logical and
    MIN, MAX    smallest, largest value; not for complex numbers
    BAND        bitwise and (logical and for bool); integers and bool only
    BOR         bitwise or; integers and bool only
    BXOR        bitwise exclusive or; integers and bool only
    PREMUL_SUM  sum over the ranks of factor * tensor; make it with `premul_sum(factor)`
    =========== ====================================================================

    float16 and bfloat16 are accumulated in float32 and rounded once. But NCCL rounds each addition, unless the group was made
    with `reproducible=True`.
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

    __hash__ = object.__hash__  # enum's own hash is a slow Python function, and every call hashes its op several times


@dataclass(frozen=True)
class PremulSum:
    """The reduction that adds up `factor` times the tensor of each rank. All ranks pass the same factor."""

    factor: float

    @property
    def name(self) -> str:
        """The reduction's name in error messages."""
        return f"PREMUL_SUM({self.factor:g})"


Reduction: TypeAlias = ReduceOp | PremulSum


def premul_sum(factor: float) -> PremulSum:
    """Return the reduction that multiplies each rank's tensor by `factor`, then adds up the products of all ranks.

    Only for floating-point and complex dtypes. All ranks pass the same factor.

    Raises:
        InvalidArgumentError: the factor is not a finite number.
    """
    try:
        is_finite = math.isfinite(factor)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor with more than one element
        is_finite = False
    if not is_finite:
        raise InvalidArgumentError(f"expected a finite factor for premul_sum, found {factor!r}")
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
"""Dtypes for which multiplying by 1 / 2, 1 / 4, ... gives the same bits as dividing by 2, 4, ... Complex dtypes are missing,
because torch divides complex numbers in another way."""

# The reductions that replace the sum and the product of bools, so that backends need no special case for bools.
_ON_BOOL: dict[Reduction, Reduction] = {ReduceOp.SUM: ReduceOp.BOR, ReduceOp.PRODUCT: ReduceOp.BAND}

# The reduction that a backend carries out, for each reduction without a factor and each of its dtypes. Most calls need only one
# look-up in this table.
_CARRIED_OUT: dict[tuple[ReduceOp, torch.dtype], Reduction] = {
    (op, dtype): _ON_BOOL.get(op, op) if dtype in BOOL else op
    for op, dtypes in DTYPES_OF.items()
    for dtype in dtypes
    if op is not ReduceOp.PREMUL_SUM
}


def check_reduction(op: object, dtype: torch.dtype) -> None:
    """Raise an error if a reduction is not defined for a dtype.

    Raises:
        InvalidArgumentError: `op` is not a `Reduction`, is PREMUL_SUM without a factor, or is not defined for `dtype`.
    """
    if op is ReduceOp.PREMUL_SUM:
        raise InvalidArgumentError("PREMUL_SUM needs a factor: pass premul_sum(factor)")
    kind = ReduceOp.PREMUL_SUM if isinstance(op, PremulSum) else op
    if not isinstance(kind, ReduceOp):
        known = ", ".join(member.name for member in ReduceOp)
        raise InvalidArgumentError(f"expected a reduction of syncline or of torch.distributed ({known}), found {op!r}")
    if dtype in DTYPES_OF[kind]:
        return
    defined = ", ".join(member.name for member in ReduceOp if dtype in DTYPES_OF[member])
    raise InvalidArgumentError(
        f"{kind.name} is not defined for {dtype}; reductions defined for it: {defined or 'none (it can only be moved)'}"
    )


def divide(total: torch.Tensor, count: int) -> None:
    """Divide a tensor by `count` in place; integers are rounded towards zero."""
    if count == 1:
        return
    if total.dtype in EXACTLY_HALVED and count & (count - 1) == 0:
        total.mul_(1 / count)
    elif total.is_complex() and not total.is_conj():
        # When torch 2.6 divides complex numbers, the bits of an element's result depend on the element's address in memory. If
        # we divide the real view, the bits do not depend on the address.
        torch.view_as_real(total).div_(count)
    elif total.dtype not in INTEGERS:
        total.div_(count)
    elif count <= torch.iinfo(total.dtype).max:
        total.div_(count, rounding_mode="trunc")
    else:
        # torch converts `count` to the dtype of `total`, and `count` may overflow there: in int8, 200 becomes -56.
        total.copy_(total.long().div_(count, rounding_mode="trunc"))


# ---- the reductions of torch.distributed ----

_OURS: dict[Any, Reduction] = (
    {getattr(dist.ReduceOp, op.name): op for op in ReduceOp if op is not ReduceOp.PREMUL_SUM} if dist.is_available() else {}
)

_PREMUL_SUM: Any = getattr(dist.ReduceOp, "PREMUL_SUM", None) if dist.is_available() else None


def from_torch(op: Any) -> Reduction | None:
    """Return the `Reduction` that equals `op`, a reduction of torch.distributed.

    None if `op` is not a reduction of torch.distributed, or if its factor cannot be read.
    """
    if not _OURS:  # a torch without torch.distributed
        return None
    # An instance of `dist.ReduceOp` equals torch's constant, but has another hash. Its attribute `op` is the constant.
    constant = getattr(op, "op", op)
    try:
        ours = _OURS.get(constant)
    except TypeError:  # not hashable, so it is no reduction
        return None
    if ours is None and isinstance(op, dist.ReduceOp) and op == _PREMUL_SUM:
        factor = premul_factor(op)
        return None if factor is None else premul_sum(factor)
    return ours


def checked_reduction(op: Any, dtype: torch.dtype) -> Reduction:
    """Check `op`, and return the reduction that a backend carries out. For bool, SUM becomes BOR and PRODUCT becomes BAND.

    `op` is a `Reduction`, or a reduction of torch.distributed.

    Raises:
        InvalidArgumentError: `op` is not a reduction, or is not defined for `dtype`.
    """
    if type(op) is not ReduceOp and not isinstance(op, PremulSum):
        op = from_torch(op) or op
    carried_out = _CARRIED_OUT.get((op, dtype)) if type(op) is ReduceOp else None
    if carried_out is not None:
        return carried_out
    check_reduction(op, dtype)
    return op  # type: ignore[no-any-return]  # only a PremulSum comes here: everything else was found above or refused
