"""An all-reduce of several tensors on each rank into one result, as torch's groups do it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ..group import ProcessGroup
from ..reduce_op import ReduceOp, Reduction, checked_reduction
from ..tensors import checks
from ..tensors.checks import has_fakes, resolved
from ..tensors.layout import untracked
from ..tensors.reduction import reduce_in_rank_order
from ..work import FinishedWork, FutureWork, TensorsFuture, Work
from .options import some


def all_reduce_together(group: ProcessGroup, tensors: Sequence[torch.Tensor], op: Reduction) -> Work:
    """Combine all tensors of all ranks, as if each tensor came from another rank. Every tensor gets the result.

    In torch's C++ groups, a process may pass one tensor for each of its devices. `all_reduce_coalesced`, in contrast, reduces
    each tensor separately.

    Args:
        group: our group; all its ranks call, with the same number of tensors.
        tensors: tensors of the same shape and dtype.
        op: a reduction that does not scale.

    Raises:
        InvalidArgumentError: there is no tensor, shapes or dtypes differ, or the reduction scales (AVG, PREMUL_SUM).
    """
    tensors = resolved(some(tensors, "allreduce"))
    # The program only computes shapes; see Note [Tensors that are no memory] in `tensors.checks`.
    if has_fakes(tensors):
        return FinishedWork(list(tensors))
    for tensor in tensors:
        problem = checks.unusable(tensor, group.device_types, group.backend_name) or checks.unwritable(tensor)
        if problem is not None:
            raise InvalidArgumentError(f"allreduce on {group.place()}: {problem}")
    first, *others = tensors
    if any(other.shape != first.shape or other.dtype != first.dtype for other in others):
        raise InvalidArgumentError(
            "allreduce of several tensors reduces them together, so they must be alike in shape and dtype: call it for each of "
            "them, or torch.distributed.all_reduce_coalesced"
        )
    op = checked_reduction(op, first.dtype)
    if not isinstance(op, ReduceOp) or op is ReduceOp.AVG:
        raise InvalidArgumentError(f"allreduce of several tensors does not scale, found {op.name}: call it for each tensor")
    with untracked():
        total = reduce_in_rank_order(op, tensors)

    def copy_back(done: Any) -> list[torch.Tensor]:
        done.value()
        with untracked():
            for tensor in tensors:
                tensor.copy_(total)
        return list(tensors)

    future: TensorsFuture = group.all_reduce(total, op, async_op=True).get_future().then(copy_back)
    return FutureWork(future, list(tensors), lambda: f"allreduce of {len(tensors)} tensors on {group.place()}")
