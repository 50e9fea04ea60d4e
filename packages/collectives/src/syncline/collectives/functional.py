"""The collectives as functions on the default group, with torch.distributed's names, argument order and defaults.

Each has the shapes, dtypes and errors of the `ProcessGroup` method of the same name. `group=None` is the default group
(`NotInitializedError` if there is none). With `async_op=True` a function returns a `Work`, otherwise None.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .process_group import ProcessGroup
from .reduce_op import ReduceOp
from .work import Work
from .world import get_default_group


def all_reduce(
    tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Combine the tensors of all ranks in place; see `ProcessGroup.all_reduce`."""
    work = (group or get_default_group()).all_reduce(tensor, op, async_op=async_op)
    return work if async_op else None


def broadcast(tensor: torch.Tensor, src: int = 0, group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Copy rank `src`'s tensor to every rank; see `ProcessGroup.broadcast`."""
    work = (group or get_default_group()).broadcast(tensor, src, async_op=async_op)
    return work if async_op else None


def all_gather(
    tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Fill `tensor_list` with the tensors of all ranks; see `ProcessGroup.all_gather`."""
    work = (group or get_default_group()).all_gather(tensor_list, tensor, async_op=async_op)
    return work if async_op else None


def barrier(group: ProcessGroup | None = None, async_op: bool = False) -> Work | None:
    """Wait until all ranks have called it; see `ProcessGroup.barrier`."""
    work = (group or get_default_group()).barrier(async_op=async_op)
    return work if async_op else None
