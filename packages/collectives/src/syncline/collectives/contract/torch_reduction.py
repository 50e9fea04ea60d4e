"""The reductions of torch.distributed, in our words."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..torch_internals import premul_factor
from .reduce_op import BOOL, PremulSum, ReduceOp, Reduction, check_reduction, premul_sum

_OURS: dict[Any, Reduction] = (
    {getattr(dist.ReduceOp, op.name): op for op in ReduceOp if op is not ReduceOp.PREMUL_SUM} if dist.is_available() else {}
)

# What a sum and a product of truth values are: a backend need not know.
_ON_BOOL: dict[Reduction, Reduction] = {ReduceOp.SUM: ReduceOp.BOR, ReduceOp.PRODUCT: ReduceOp.BAND}

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
    if not isinstance(op, ReduceOp | PremulSum):
        op = from_torch(op) or op
    check_reduction(op, dtype)
    return _ON_BOOL.get(op, op) if dtype in BOOL else op  # type: ignore[no-any-return]  # what is no reduction was refused
