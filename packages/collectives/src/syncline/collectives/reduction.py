"""Reduce tensors that lie in this process: the arithmetic that every host backend shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from .reduce_op import HALVES, PremulSum, ReduceOp, Reduction

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

# Widened halves of this many elements stay in a core's cache: several times faster than all at once.
_PIECE_NUMEL = 64 * 1024


def core_op(op: Reduction) -> ReduceOp:
    """What is done between the ranks: SUM for AVG and PREMUL_SUM, which scale before or after it."""
    return ReduceOp.SUM if isinstance(op, PremulSum) or op is ReduceOp.AVG else op


def reduce_in_rank_order(op: Reduction, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine one tensor of each rank, first to last, so that whoever computes it gets the same bits.

    Halves are widened to float32, combined (and scaled) there, and rounded once.

    Args:
        op: a reduction that is defined for the dtype (see `check_reduction`).
        terms: at least one tensor; all of the same shape and dtype, on one device. None is changed.

    Returns:
        A new tensor with the shape and dtype of the terms.
    """
    first = terms[0]
    if first.dtype not in HALVES or not first.is_cpu or first.numel() <= _PIECE_NUMEL:
        return _reduced(op, terms)
    result = torch.empty_like(first, memory_format=torch.contiguous_format)
    pieces = [torch.split(tensor.reshape(-1), _PIECE_NUMEL) for tensor in (result, *terms)]
    for into, *parts in zip(*pieces, strict=True):
        into.copy_(_reduced(op, parts))
    return result


def _reduced(op: Reduction, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype = terms[0].dtype
    wide = torch.float32 if dtype in HALVES else dtype
    combine = _COMBINE[core_op(op)]
    total = _scaled(op, terms[0].to(wide, copy=True))
    for term in terms[1:]:
        combine(total, _scaled(op, term.to(wide, copy=isinstance(op, PremulSum))))
    if op is ReduceOp.AVG:
        total.div_(len(terms))
    return total.to(dtype)


def _scaled(op: Reduction, term: torch.Tensor) -> torch.Tensor:
    return term.mul_(op.factor) if isinstance(op, PremulSum) else term
