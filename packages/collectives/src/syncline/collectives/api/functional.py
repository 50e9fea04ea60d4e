"""The collectives as functions on the default group, with torch.distributed's names, argument order and defaults.

Each function has the shapes, dtypes and errors of the `ProcessGroup` method of the same name. `group=None` means the default
group. `src` and `dst` are ranks of the default group; `group_src` and `group_dst` are ranks of the group itself. With
`async_op=True` a function returns a `Work`, otherwise None.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InvalidArgumentError
from ..group import ProcessGroup
from ..reduce_op import ReduceOp, Reduction
from ..work import Work
from .default_group import rank_in, resolve_group


def all_reduce(
    tensor: torch.Tensor, op: Reduction = ReduceOp.SUM, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Combine the tensors of all ranks in place.

    See [`ProcessGroup.all_reduce`][syncline.collectives.ProcessGroup.all_reduce].
    """
    work = resolve_group(group).all_reduce(tensor, op, async_op=async_op)
    return work if async_op else None


def reduce(
    tensor: torch.Tensor,
    dst: int | None = None,
    op: Reduction = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Combine the tensors of all ranks on one rank.

    See [`ProcessGroup.reduce`][syncline.collectives.ProcessGroup.reduce].
    """
    chosen = resolve_group(group)
    work = chosen.reduce(tensor, rank_in(chosen, dst, group_dst), op, async_op=async_op)
    return work if async_op else None


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Copy one rank's tensor to every rank.

    See [`ProcessGroup.broadcast`][syncline.collectives.ProcessGroup.broadcast].
    """
    chosen = resolve_group(group)
    work = chosen.broadcast(tensor, rank_in(chosen, src, group_src), async_op=async_op)
    return work if async_op else None


def all_gather(
    tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Fill `tensor_list` with the tensors of all ranks.

    See [`ProcessGroup.all_gather`][syncline.collectives.ProcessGroup.all_gather].
    """
    work = resolve_group(group).all_gather(tensor_list, tensor, async_op=async_op)
    return work if async_op else None


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Fill one tensor with the tensors of all ranks.

    See [`ProcessGroup.all_gather_into_tensor`][syncline.collectives.ProcessGroup.all_gather_into_tensor].
    """
    work = resolve_group(group).all_gather_into_tensor(output_tensor, input_tensor, async_op=async_op)
    return work if async_op else None


def gather(
    tensor: torch.Tensor,
    gather_list: Sequence[torch.Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_dst: int | None = None,
) -> Work | None:
    """Fill one rank's list with the tensors of all ranks.

    See [`ProcessGroup.gather`][syncline.collectives.ProcessGroup.gather].
    """
    chosen = resolve_group(group)
    root = rank_in(chosen, dst, group_dst, default=0)
    work = chosen.gather(tensor, gather_list, root, async_op=async_op)
    return work if async_op else None


def scatter(
    tensor: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
) -> Work | None:
    """Give each rank its tensor from one rank's list.

    See [`ProcessGroup.scatter`][syncline.collectives.ProcessGroup.scatter].
    """
    chosen = resolve_group(group)
    root = rank_in(chosen, src, group_src, default=0)
    work = chosen.scatter(tensor, scatter_list, root, async_op=async_op)
    return work if async_op else None


def reduce_scatter(
    output: torch.Tensor,
    input_list: Sequence[torch.Tensor],
    op: Reduction = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine the lists of all ranks, and give each rank its part of the result.

    See [`ProcessGroup.reduce_scatter`][syncline.collectives.ProcessGroup.reduce_scatter].
    """
    work = resolve_group(group).reduce_scatter(output, input_list, op, async_op=async_op)
    return work if async_op else None


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Reduction = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine the tensors of all ranks, and give each rank its part of the result.

    See [`ProcessGroup.reduce_scatter_tensor`][syncline.collectives.ProcessGroup.reduce_scatter_tensor].
    """
    work = resolve_group(group).reduce_scatter_tensor(output, input, op, async_op=async_op)
    return work if async_op else None


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send a tensor to each rank, and receive a tensor from each rank.

    See [`ProcessGroup.all_to_all`][syncline.collectives.ProcessGroup.all_to_all].
    """
    work = resolve_group(group).all_to_all(output_tensor_list, input_tensor_list, async_op=async_op)
    return work if async_op else None


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send rows to each rank, and receive rows from each rank.

    See [`ProcessGroup.all_to_all_single`][syncline.collectives.ProcessGroup.all_to_all_single].
    """
    work = resolve_group(group).all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op=async_op)
    return work if async_op else None


def barrier(group: ProcessGroup | None = None, async_op: bool = False, device_ids: None = None) -> Work | None:
    """Wait until all ranks have called this function.

    See [`ProcessGroup.barrier`][syncline.collectives.ProcessGroup.barrier].

    Raises:
        InvalidArgumentError: `device_ids` was given. The group knows its device.
    """
    if device_ids is not None:
        raise InvalidArgumentError(
            f"barrier takes no device_ids (the group knows its device), found {device_ids}; leave it out"
        )
    work = resolve_group(group).barrier(async_op=async_op)
    return work if async_op else None
