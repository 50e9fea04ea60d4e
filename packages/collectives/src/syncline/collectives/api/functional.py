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
    """Combine the tensors of all ranks by `op`, in place. Every rank gets the result.

    Returns a `Work` if `async_op` is true, otherwise None. See
    [`ProcessGroup.all_reduce`][syncline.collectives.ProcessGroup.all_reduce].
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
    """Combine the tensors of all ranks by `op`. Only one rank, the root, gets the result.

    Pass the root as `dst` (a rank of the default group) or as `group_dst` (a rank of the group). Returns a `Work` if
    `async_op` is true, otherwise None. See [`ProcessGroup.reduce`][syncline.collectives.ProcessGroup.reduce].
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
    """Copy the tensor of one rank, the root, to every rank.

    Pass the root as `src` (a rank of the default group) or as `group_src` (a rank of the group). Returns a `Work` if
    `async_op` is true, otherwise None. See [`ProcessGroup.broadcast`][syncline.collectives.ProcessGroup.broadcast].
    """
    chosen = resolve_group(group)
    work = chosen.broadcast(tensor, rank_in(chosen, src, group_src), async_op=async_op)
    return work if async_op else None


def all_gather(
    tensor_list: Sequence[torch.Tensor], tensor: torch.Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Fill the `tensor_list` of every rank with the tensors of all ranks.

    Returns a `Work` if `async_op` is true, otherwise None. See
    [`ProcessGroup.all_gather`][syncline.collectives.ProcessGroup.all_gather].
    """
    work = resolve_group(group).all_gather(tensor_list, tensor, async_op=async_op)
    return work if async_op else None


def all_gather_into_tensor(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: ProcessGroup | None = None, async_op: bool = False
) -> Work | None:
    """Concatenate the tensors of all ranks into the `output_tensor` of every rank.

    Returns a `Work` if `async_op` is true, otherwise None. See
    [`ProcessGroup.all_gather_into_tensor`][syncline.collectives.ProcessGroup.all_gather_into_tensor].
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
    """Fill the `gather_list` of one rank, the root, with the tensors of all ranks. Other ranks pass no list.

    Pass the root as `dst` (a rank of the default group) or as `group_dst` (a rank of the group). The default
    is rank 0 of the group. Returns a `Work` if `async_op` is true, otherwise None. See
    [`ProcessGroup.gather`][syncline.collectives.ProcessGroup.gather].
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
    """Send each rank one tensor of the root's `scatter_list`: rank r gets `scatter_list[r]` in its `tensor`.

    Other ranks than the root pass no list. Pass the root as `src` (a rank of the default group) or as `group_src` (a rank of
    the group). The default is rank 0 of the group. Returns a `Work` if `async_op` is true, otherwise None. See
    [`ProcessGroup.scatter`][syncline.collectives.ProcessGroup.scatter].
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
    """Combine the lists of all ranks, entry by entry. Rank r gets the result of entry r in its `output`.

    Returns a `Work` if `async_op` is true, otherwise None. See
    [`ProcessGroup.reduce_scatter`][syncline.collectives.ProcessGroup.reduce_scatter].
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
    """Combine the tensors of all ranks, divide the result into equal parts, and write part r to the `output` of rank r.

    Returns a `Work` if `async_op` is true, otherwise None. See
    [`ProcessGroup.reduce_scatter_tensor`][syncline.collectives.ProcessGroup.reduce_scatter_tensor].
    """
    work = resolve_group(group).reduce_scatter_tensor(output, input, op, async_op=async_op)
    return work if async_op else None


def all_to_all(
    output_tensor_list: Sequence[torch.Tensor],
    input_tensor_list: Sequence[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Send `input_tensor_list[r]` to each rank r, and receive `output_tensor_list[r]` from each rank r.

    Returns a `Work` if `async_op` is true, otherwise None. See
    [`ProcessGroup.all_to_all`][syncline.collectives.ProcessGroup.all_to_all].
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
    """Send a part of the rows of `input` to each rank, and receive rows from each rank into `output`.

    Returns a `Work` if `async_op` is true, otherwise None. See
    [`ProcessGroup.all_to_all_single`][syncline.collectives.ProcessGroup.all_to_all_single].
    """
    work = resolve_group(group).all_to_all_single(output, input, output_split_sizes, input_split_sizes, async_op=async_op)
    return work if async_op else None


def barrier(group: ProcessGroup | None = None, async_op: bool = False, device_ids: None = None) -> Work | None:
    """Wait until all ranks have called this function.

    If `async_op` is true, return a `Work` at once; its `wait` then waits for the other ranks. See
    [`ProcessGroup.barrier`][syncline.collectives.ProcessGroup.barrier].

    Raises:
        InvalidArgumentError: `device_ids` was given. Leave it out: the group knows its device.
    """
    if device_ids is not None:
        raise InvalidArgumentError(
            f"barrier takes no device_ids (the group knows its device), found {device_ids}; leave it out"
        )
    work = resolve_group(group).barrier(async_op=async_op)
    return work if async_op else None
