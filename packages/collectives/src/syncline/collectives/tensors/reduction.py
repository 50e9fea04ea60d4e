"""Reduce tensors in this process: the arithmetic that all host backends share."""

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

# Halves (float16, bfloat16) are widened in pieces of this many elements, which stay in a core's cache. Widening in pieces is
# several times faster than widening all elements at once.
_PIECE_NUMEL = 64 * 1024


def core_op(op: Reduction) -> ReduceOp:
    """Return the operation that combines two terms: SUM if `op` is AVG or PREMUL_SUM, otherwise `op`."""
    return ReduceOp.SUM if isinstance(op, PremulSum) or op is ReduceOp.AVG else op


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values are combined: float32 for float16 and bfloat16, else the dtype itself."""
    return torch.float32 if dtype in HALVES else dtype


def reduce_in_rank_order(op: Reduction, terms: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine one tensor of each rank, in the order of the ranks. Every rank that computes the result gets the same bits.

    float16 and bfloat16 are combined in float32, and rounded once.

    Args:
        op: a reduction that is defined for the dtype (see `check_reduction`).
        terms: at least one tensor; all have the same shape, dtype and device. Only read.

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
    """Do `reduce_in_rank_order`, and write the result to `out`, which may be one of the terms."""
    if len(terms) == 1 and not isinstance(op, PremulSum):  # with one term, only the factor changes anything
        if terms[0] is not out:
            out.copy_(terms[0])
        return
    if _is_one_addition(op, terms, out.dtype):  # a shortcut for a case that is frequent and small
        torch.add(terms[0], terms[1], out=out)
        return
    total = combine(op, terms, out)
    if op is ReduceOp.AVG:
        divide(total, len(terms))
    if total is not out:
        out.copy_(total)


def reducer_of(terms: Sequence[torch.Tensor], op: Reduction, dtype: torch.dtype) -> Callable[..., object]:
    """Make a function that reduces these terms as `reduce_into` does, with the keyword `out` for the result.

    If the same terms are reduced often, the new function is cheaper than `reduce_into`.
    """
    if _is_one_addition(op, terms, dtype):
        return functools.partial(torch.add, *terms)
    if op is ReduceOp.AVG and len(terms) == 2 and dtype in EXACTLY_HALVED:
        return functools.partial(_mean_of_two, *terms)
    return functools.partial(reduce_into, op=op, terms=terms)


def combine(op: Reduction, terms: Sequence[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
    """Combine the terms in rank order, in the dtype that `accumulation_dtype` returns, without the division of AVG.

    Return `out` or a new tensor. `out` may be one of the terms.
    """
    function, dtype = _COMBINE[core_op(op)], accumulation_dtype(out.dtype)
    if isinstance(op, PremulSum) or dtype is not terms[0].dtype:
        total = _scaled(op, terms[0].to(dtype, copy=True))
        for term in terms[1:]:
            function(total, _scaled(op, term.to(dtype, copy=isinstance(op, PremulSum))), out=total)
        return total
    if len(terms) == 1:
        return out if out is terms[0] else out.copy_(terms[0])
    # Only the last operation writes `out`, because `out` may be one of the terms.
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
