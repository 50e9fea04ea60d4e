"""Reduce tensors that lie in this process: the arithmetic that every host backend shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .reduce_op import HALVES, ReduceOp

_COMBINE: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.Tensor.add_,
    ReduceOp.AVG: torch.Tensor.add_,
    ReduceOp.PRODUCT: torch.Tensor.mul_,
    ReduceOp.MIN: lambda total, term: torch.minimum(total, term, out=total),
    ReduceOp.MAX: lambda total, term: torch.maximum(total, term, out=total),
    ReduceOp.BAND: torch.Tensor.bitwise_and_,
    ReduceOp.BOR: torch.Tensor.bitwise_or_,
    ReduceOp.BXOR: torch.Tensor.bitwise_xor_,
}


def reduce_in_rank_order(op: ReduceOp, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine one tensor of each rank, first to last, so that whoever computes it gets the same bits.

    Halves are widened to float32, combined there and rounded once.

    Args:
        op: a reduction that is defined for the dtype (see `check_reduction`).
        terms: at least one tensor; all of the same shape and dtype, on one device. None is changed.

    Returns:
        A new tensor with the shape and dtype of the terms.
    """
    dtype = terms[0].dtype
    wide = torch.float32 if dtype in HALVES else dtype
    total = terms[0].to(wide, copy=True)
    combine = _COMBINE[op]
    for term in terms[1:]:
        combine(total, term.to(wide))
    if op is ReduceOp.AVG:
        total.div_(len(terms))
    return total.to(dtype)
