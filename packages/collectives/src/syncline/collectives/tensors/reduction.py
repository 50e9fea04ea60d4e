"""Reduce tensors that lie in this process: the arithmetic that every host backend shares."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from ..reduce_op import EXACTLY_HALVED, HALVES, PremulSum, ReduceOp, Reduction, divide

_COMBINE: dict[ReduceOp, Callable[..., torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}

# Widened halves of this many elements stay in a core's cache: several times faster than all at once.
_PIECE_NUMEL = 64 * 1024


def core_op(op: Reduction) -> ReduceOp:
    """What is done between the ranks: SUM for AVG and PREMUL_SUM, which scale before or after it."""
    return ReduceOp.SUM if isinstance(op, PremulSum) or op is ReduceOp.AVG else op


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what a dtype is combined: halves in float32, all others in themselves."""
    return torch.float32 if dtype in HALVES else dtype


def reduce_in_rank_order(op: Reduction, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine one tensor of each rank, first to last, so that whoever computes it gets the same bits.

    Halves are widened to float32, combined (and scaled) there, and rounded once.

    Args:
        op: a reduction that is defined for the dtype (see `check_reduction`).
        terms: at least one tensor; all of the same shape and dtype, on one device. None is changed.

    Returns:
        A new tensor with the shape and dtype of the terms.
    """
    total = torch.empty_like(terms[0], memory_format=torch.contiguous_format)
    if total.dtype in HALVES and total.is_cpu:
        pieces = [torch.split(tensor.reshape(-1), _PIECE_NUMEL) for tensor in (total, *terms)]
        for into, *parts in zip(*pieces, strict=True):
            reduce_into(into, op, parts)
    else:
        reduce_into(total, op, terms)
    return total


def reduce_into(out: torch.Tensor, op: Reduction, terms: Sequence[torch.Tensor]) -> None:
    """As `reduce_in_rank_order`, into a tensor, which may be one of the terms."""
    if len(terms) == 1 and not isinstance(op, PremulSum):
        if terms[0] is not out:
            out.copy_(terms[0])
        return
    if _is_one_addition(op, terms, out.dtype):  # at once: small ones come often
        torch.add(terms[0], terms[1], out=out)
        return
    total = combine(op, terms, out)
    if op is ReduceOp.AVG:
        divide(total, len(terms))
    if total is not out:
        out.copy_(total)


def always_of(terms: Sequence[torch.Tensor], op: Reduction, dtype: torch.dtype) -> Callable[..., object]:
    """`reduce_into` for terms that lie at the same place every time: a function of `out`, by that name."""
    if _is_one_addition(op, terms, dtype):
        return functools.partial(torch.add, *terms)
    if op is ReduceOp.AVG and len(terms) == 2 and dtype in EXACTLY_HALVED:
        return functools.partial(_mean_of_two, *terms)
    return functools.partial(reduce_into, op=op, terms=terms)


def combine(op: Reduction, terms: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Combine in rank order, in the accumulation dtype, without the division of AVG.

    Args:
        op: as for `reduce_in_rank_order`.
        terms: as for `reduce_in_rank_order`.
        out: may be written, last of all, if it has the accumulation dtype; may be one of the terms.

    Returns:
        `out`, or a new tensor.
    """
    function, dtype = _COMBINE[core_op(op)], accumulation_dtype(out.dtype)
    if isinstance(op, PremulSum) or dtype is not terms[0].dtype:
        total = _scaled(op, terms[0].to(dtype, copy=True))
        for term in terms[1:]:
            function(total, _scaled(op, term.to(dtype, copy=isinstance(op, PremulSum))), out=total)
        return total
    if len(terms) == 1:
        return out if out is terms[0] else out.copy_(terms[0])
    total = terms[0] if len(terms) == 2 else function(terms[0], terms[1])
    for term in terms[2:-1]:
        function(total, term, out=total)
    return function(total, terms[-1], out=out)


def _mean_of_two(first: torch.Tensor, second: torch.Tensor, *, out: torch.Tensor) -> None:
    torch.add(first, second, out=out).mul_(0.5)


def _is_one_addition(op: Reduction, terms: Sequence[torch.Tensor], dtype: torch.dtype) -> bool:
    return op is ReduceOp.SUM and len(terms) == 2 and dtype not in HALVES


def _scaled(op: Reduction, term: torch.Tensor) -> torch.Tensor:
    return term.mul_(op.factor) if isinstance(op, PremulSum) else term
