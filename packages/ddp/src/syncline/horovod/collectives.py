"""Horovod's operations on tensors: blocking, asynchronous, in place, and grouped.

Every function has Horovod's arguments. The argument `name` has no effect. `root_rank` is a rank among all ranks, also in a
process set. An asynchronous function returns a handle for `poll` and `synchronize`.

Blocking functions that return a new tensor are differentiable. As in Horovod, the gradients of `allgather` and `broadcast` are
averages over the ranks, although the true derivatives are sums. The gradient of `reducescatter` is the true derivative times
the number of ranks. For true derivatives, use the functions of `syncline.collectives` that return tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any

import torch

from syncline.collectives import (
    InvalidArgumentError,
    PendingResult,
    ProcessGroup,
    ReduceOp,
    Work,
    adasum_coalesced,
    all_gather_rows_coalesced,
    all_reduce_copy_coalesced,
    all_to_all_rows,
    broadcast_copy,
    reduce_scatter_rows_coalesced,
)
from syncline.collectives import all_reduce_coalesced as reduce_in_place
from syncline.collectives.internal import is_list

from .world import ProcessSet, global_process_set, world


class Op(Enum):
    """The operation that combines the tensors of all ranks."""

    AVERAGE = "average"
    SUM = "sum"
    ADASUM = "adasum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


Average, Sum, Adasum, Min, Max, Product = Op.AVERAGE, Op.SUM, Op.ADASUM, Op.MIN, Op.MAX, Op.PRODUCT

REDUCTIONS = {
    Average: ReduceOp.AVG,
    Sum: ReduceOp.SUM,
    Min: ReduceOp.MIN,
    Max: ReduceOp.MAX,
    Product: ReduceOp.PRODUCT,
}

Handle = PendingResult[Any]


class Compressor:
    """Makes tensors smaller before they are reduced. Derive your own compressor from this class.

    Attributes:
        is_elementwise: whether several tensors may be concatenated and compressed as one tensor.
    """

    is_elementwise = False

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the smaller tensor, and an object `ctx` that `decompress` gets."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return a tensor with the original dtype and shape."""
        raise NotImplementedError


class NoCompressor(Compressor):
    """Leaves tensors unchanged."""

    is_elementwise = True

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # noqa: ARG004 - the contract's
        """Return the tensor itself."""
        return tensor


class HalfCompressor(Compressor):
    """Sends floating point tensors as float16. `syncline.collectives.ReduceOp` says how sums of float16 are rounded."""

    is_elementwise = True

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor and its original dtype. A floating point tensor becomes float16."""
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in its original dtype."""
        return tensor.to(ctx)


class Compression:
    """The available compressors."""

    none = NoCompressor
    fp16 = HalfCompressor


# ---- allreduce ----


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine the tensors of all ranks into a new tensor. The default is the average.

    Args:
        tensor: the tensor, with the same shape and dtype on every rank.
        average: deprecated; False means `op=Sum`.
        name: ignored.
        compression: the compressor for the tensors that are sent.
        op: `Average`, `Sum`, `Min`, `Max`, `Product` or `Adasum`. `Average` and `Sum` are differentiable.
        prescale_factor: multiply each rank's tensor by this factor before the reduction. Products of integers are rounded
            towards zero.
        postscale_factor: multiply the result by this factor.
        process_set: the ranks that take part.
    """
    return grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)[0]


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `allreduce`. `synchronize(handle)` returns the new tensor."""
    return _first(grouped_allreduce_async([tensor], average, name, op, prescale_factor, postscale_factor, process_set))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Combine the tensors of all ranks in place. Returns the tensor."""
    return grouped_allreduce_([tensor], average, name, op, prescale_factor, postscale_factor, process_set)[0]


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `allreduce_`. Do not touch the tensor before `synchronize(handle)`, which returns the tensor."""
    return _first(grouped_allreduce_async_([tensor], average, name, op, prescale_factor, postscale_factor, process_set))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,  # noqa: ARG001 - matching is by order
    compression: type[Compressor] = Compression.none,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Call `allreduce` for several tensors, which are sent together."""
    chosen, group = _chosen_op(op, average), process_set.group()
    _check("allreduce", tensors)
    compressed, contexts = _compressed(tensors, compression)
    _announce(process_set, compressed, chosen)
    if chosen is Adasum:
        results = _start_adasum(compressed, prescale_factor, postscale_factor, group)
    else:
        results = all_reduce_copy_coalesced(
            compressed, REDUCTIONS[chosen], group, prescale=prescale_factor, postscale=postscale_factor
        )
        _announce_gradients(process_set, results, chosen)
    return list(map(compression.decompress, results, contexts))


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,  # noqa: ARG001 - matching is by order
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `grouped_allreduce`. `synchronize(handle)` returns the list of new tensors."""
    chosen, group = _chosen_op(op, average), process_set.group()
    _check("allreduce", tensors)
    _announce(process_set, tensors, chosen)
    if chosen is Adasum:
        return _finished(_start_adasum(tensors, prescale_factor, postscale_factor, group))
    pending: Handle = all_reduce_copy_coalesced(
        tensors, REDUCTIONS[chosen], group, async_op=True, prescale=prescale_factor, postscale=postscale_factor
    )
    return pending


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Call `allreduce_` for several tensors, which are sent together."""
    results: list[torch.Tensor] = grouped_allreduce_async_(
        tensors, average, name, op, prescale_factor, postscale_factor, process_set
    ).wait()
    return results


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,  # noqa: ARG001 - matching is by order
    op: Op | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `grouped_allreduce_`. `synchronize(handle)` returns the tensors."""
    chosen, group = _chosen_op(op, average), process_set.group()
    _check("allreduce", tensors)
    _announce(process_set, tensors, chosen)
    targets = [tensor.detach() for tensor in tensors]  # the same memory, but autograd allows writes to it
    if chosen is Adasum:
        # Adasum works on copies, so its results are copied back.
        results = _start_adasum(tensors, prescale_factor, postscale_factor, group)
        for target, result in zip(targets, results, strict=True):
            target.copy_(result)
        return _finished(list(tensors))
    for target in targets:
        _scale_(target, prescale_factor)
    work = _reduce_in_place(targets, REDUCTIONS[chosen], group)

    def finish() -> list[torch.Tensor]:
        for target in targets:
            _scale_(target, postscale_factor)
        return list(tensors)

    return PendingResult([work], finish)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,  # noqa: ARG001 - matching is by order
    op: Op | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Begin to average a sparse tensor over the ranks. With `op=Sum`, begin to sum it. The indices may differ between ranks.

    Returns:
        A function that waits and returns the new sparse tensor, coalesced. `synchronize` also accepts this function.
    """
    chosen = _chosen_op(op, None)
    if chosen not in (Average, Sum):
        raise InvalidArgumentError(f"sparse_allreduce_async: expected Average or Sum as op, found {chosen.name}")
    _check("sparse_allreduce_async", [tensor])
    _announce_complete(process_set, "sparse_allreduce_async")
    # Reduce a copy, because the collective works in place.
    copy = tensor.detach().clone()
    work = process_set.group().all_reduce(copy, REDUCTIONS[chosen], async_op=True)
    return PendingResult([work], lambda: copy).wait


def _compressed(tensors: Iterable[torch.Tensor], compression: type[Compressor]) -> tuple[list[torch.Tensor], list[Any]]:
    pairs = [compression.compress(tensor) for tensor in tensors]
    return [compressed for compressed, _ in pairs], [context for _, context in pairs]


def _start_adasum(
    tensors: Sequence[torch.Tensor], prescale: float, postscale: float, group: ProcessGroup
) -> list[torch.Tensor]:
    copies = [tensor.detach().clone() for tensor in tensors]
    for factor, is_before in ((prescale, True), (postscale, False)):
        for copy in copies:
            _scale_(copy, factor)
        if is_before:
            adasum_coalesced(copies, group)
    return copies


def _reduce_in_place(targets: list[torch.Tensor], op: ReduceOp, group: ProcessGroup) -> Work:
    # A single tensor needs no flat copy.
    if len(targets) == 1:
        return group.all_reduce(targets[0], op, async_op=True)
    work = reduce_in_place(targets, op, group, async_op=True)
    assert work is not None
    return work


def _scale_(tensor: torch.Tensor, factor: float) -> None:
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    # Integers are multiplied in float64; the copy rounds towards zero.
    else:
        tensor.copy_(tensor.double() * factor)


def _chosen_op(op: Op | None, average: bool | None) -> Op:
    if op is not None and average is not None:
        raise InvalidArgumentError("expected op or average, found both; average is deprecated: leave it out")
    if average is not None:
        warnings.warn("average is deprecated: pass op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3)
        return Average if average else Sum
    if op is not None and not isinstance(op, Op):
        raise InvalidArgumentError(f"expected hvd.{', hvd.'.join(each.name.capitalize() for each in Op)} as op, found {op!r}")
    return Average if op is None else op


# ---- allgather ----


def allgather(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """Concatenate the tensors of all ranks along the first dimension, whose size may differ between ranks."""
    return grouped_allgather([tensor], name, process_set)[0]


def allgather_async(tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Handle:
    """Begin an `allgather`. `synchronize(handle)` returns the concatenated tensor."""
    return _first(grouped_allgather_async([tensor], name, process_set))


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,  # noqa: ARG001 - matching is by order
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Call `allgather` for several tensors, which are sent together."""
    _check("allgather", tensors)
    _announce_complete(process_set, "allgather")
    group = process_set.group()
    results: list[torch.Tensor] = all_gather_rows_coalesced(_with_gradients_times(1 / group.size, tensors), group)
    return results


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,  # noqa: ARG001 - matching is by order
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `grouped_allgather`. `synchronize(handle)` returns the list of results."""
    _check("allgather", tensors)
    _announce_complete(process_set, "allgather")
    pending: Handle = all_gather_rows_coalesced(tensors, process_set.group(), async_op=True)
    return pending


# ---- broadcast ----


def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,  # noqa: ARG001 - matching is by order
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return the root's tensor on every rank."""
    group = process_set.group()
    root = _checked_root(tensor, root_rank, group)
    _announce_complete(process_set, "broadcast")
    (scaled,) = _with_gradients_times(1 / group.size, [tensor])
    result: torch.Tensor = broadcast_copy(scaled, group=group, group_src=root)
    return result


def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,  # noqa: ARG001 - matching is by order
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `broadcast`. `synchronize(handle)` returns the root's tensor."""
    group = process_set.group()
    root = _checked_root(tensor, root_rank, group)
    _announce_complete(process_set, "broadcast")
    pending: Handle = broadcast_copy(tensor, group=group, async_op=True, group_src=root)
    return pending


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Copy the root's tensor into the tensor of every rank. Returns the tensor."""
    result: torch.Tensor = broadcast_async_(tensor, root_rank, name, process_set).wait()
    return result


def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,  # noqa: ARG001 - matching is by order
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin a `broadcast_`. `synchronize(handle)` returns the tensor."""
    group = process_set.group()
    root = _checked_root(tensor, root_rank, group)
    _announce_complete(process_set, "broadcast")
    work = group.broadcast(tensor.detach(), root, async_op=True)
    return PendingResult([work], lambda: tensor)


def _checked_root(tensor: torch.Tensor, root_rank: int, group: ProcessGroup) -> int:
    _check("broadcast", [tensor])
    return root_in(group, root_rank)


def root_in(group: ProcessGroup, root_rank: int) -> int:
    """Convert a rank among all ranks to the rank of the same process in `group`.

    Raises:
        InvalidArgumentError: the rank is not in the group.
    """
    if root_rank not in group.ranks:
        raise InvalidArgumentError(f"expected one of the ranks {list(group.ranks)} as root_rank, found {root_rank}")
    return group.ranks.index(root_rank)


# ---- alltoall ----


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,  # noqa: ARG001 - matching is by order
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send some of the tensor's rows to each rank. A receiver need not know how many rows will come.

    Args:
        tensor: the rows to send. All dimensions except the first are the same on every rank.
        splits: the number of rows for each rank. None or empty: all ranks get the same number of rows.
        name: ignored.
        process_set: the ranks that take part.

    Returns:
        The received rows, in the order of the sending ranks. If `splits` is given, also a tensor of integers: the number of
        rows from each rank.
    """
    counts = _counts_of(splits)
    _check("alltoall", [tensor])
    _announce_complete(process_set, "alltoall")
    output, received = all_to_all_rows(tensor, counts, process_set.group())
    return output if splits is None else (output, _as_splits(received, splits))


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,  # noqa: ARG001 - matching is by order
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin an `alltoall`. `synchronize(handle)` returns the rows, and the number of rows from each rank."""
    counts = _counts_of(splits)
    _check("alltoall", [tensor])
    _announce_complete(process_set, "alltoall")
    pending = all_to_all_rows(tensor, counts, process_set.group(), async_op=True)

    def finish() -> tuple[torch.Tensor, torch.Tensor]:
        output, received = pending.wait()
        return output, _as_splits(received, splits)

    return _then(pending, finish)


def _counts_of(splits: torch.Tensor | Sequence[int] | None) -> list[int] | None:
    if splits is None:
        return None
    if isinstance(splits, torch.Tensor) and (splits.is_floating_point() or splits.is_complex() or splits.dim() != 1):
        raise InvalidArgumentError(
            f"expected splits to be integers, one for each rank, found {splits.dtype} of shape {list(splits.shape)}"
        )
    # As in Horovod, no splits at all means equal parts.
    return [int(count) for count in splits] or None


def _as_splits(received: Sequence[int], like: torch.Tensor | Sequence[int] | None) -> torch.Tensor:
    if isinstance(like, torch.Tensor):
        return torch.tensor(received, dtype=like.dtype, device=like.device)
    return torch.tensor(received, dtype=torch.int32, device="cpu")


# ---- reducescatter ----


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Combine the tensors of all ranks, and return this rank's share of the rows of the result.

    If the rows cannot be divided evenly, the first ranks get one row more.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a `reducescatter`. `synchronize(handle)` returns this rank's share."""
    return _first(grouped_reducescatter_async([tensor], name, op, process_set, prescale_factor, postscale_factor))


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,  # noqa: ARG001 - matching is by order
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Call `reducescatter` for several tensors, which are sent together."""
    reduction, group = _scattering(op), process_set.group()
    _check("reducescatter", tensors)
    _announce_complete(process_set, "reducescatter")
    compressed, contexts = _compressed(_with_gradients_times(group.size, tensors), compression)
    results = reduce_scatter_rows_coalesced(compressed, reduction, group, prescale=prescale_factor, postscale=postscale_factor)
    return list(map(compression.decompress, results, contexts))


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,  # noqa: ARG001 - matching is by order
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin a `grouped_reducescatter`. `synchronize(handle)` returns the list of results."""
    reduction = _scattering(op)
    _check("reducescatter", tensors)
    _announce_complete(process_set, "reducescatter")
    pending: Handle = reduce_scatter_rows_coalesced(
        tensors, reduction, process_set.group(), async_op=True, prescale=prescale_factor, postscale=postscale_factor
    )
    return pending


def _scattering(op: Op) -> ReduceOp:
    if op is Adasum:
        raise InvalidArgumentError("reducescatter: Adasum needs whole tensors; use allreduce")
    return REDUCTIONS[_chosen_op(op, None)]


# ---- handles, join, barrier ----


def poll(handle: Handle) -> bool:
    """Whether the collective is complete, so that `synchronize(handle)` returns at once."""
    return handle.is_completed()


def synchronize(handle: Handle | Callable[[], torch.Tensor]) -> Any:
    """Wait for the collective that returned this handle, and return the collective's result."""
    return handle() if callable(handle) else handle.wait()


def join(device: int = -1) -> int:  # noqa: ARG001 - zeros are made where the others' tensors are
    """Take part in the `allreduce`s and optimizer steps of the other ranks with zeros, until all ranks have called `join`.

    The rank also takes part in the backwards of these `allreduce`s, with one exception. If a backward begins to reduce the
    gradients of a `DistributedOptimizer` and then reaches an `allreduce`, a joined rank cannot take part in the backward of
    this `allreduce`. In this case, the ranks raise a `DisagreementError`.

    Call `join` on a rank that has no data left. While only some ranks have joined, the other ranks may only compute sums and
    averages over all ranks. All other collectives over all ranks raise an error. Do not call a collective of a process set that
    contains a joined rank.

    Returns:
        A rank that joined last, the same on every rank.
    """
    return world().calls.join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks have called `barrier`."""
    _announce_complete(process_set, "barrier")
    process_set.group().barrier()


def _check(call: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise an error if an argument is not a tensor. Call this function before `_announce` tells joined ranks to take part."""
    if not is_list(tensors):
        raise InvalidArgumentError(f"hvd.{call}: expected a list of tensors, found {type(tensors).__name__}")
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgumentError(
                f"hvd.{call}: expected a torch.Tensor, found {type(tensor).__name__}; "
                "make a tensor of it, or use hvd.broadcast_object or hvd.allgather_object"
            )


def _announce(process_set: ProcessSet, tensors: Sequence[torch.Tensor], op: Op) -> None:
    # Joined ranks take part only in collectives of all ranks, and a single rank has nobody to tell.
    if process_set.process_set_id != 0 or world().group.size == 1:
        return
    if op is Adasum:
        world().calls.announce_complete("Adasum")
    else:
        world().calls.announce_all_reduce(tensors, REDUCTIONS[op])


def _announce_gradients(process_set: ProcessSet, results: Sequence[torch.Tensor], op: Op) -> None:
    """Make backward announce its all-reduce to ranks that have called `join`, right before this all-reduce begins."""
    node = next((result.grad_fn for result in results if result.grad_fn is not None), None)
    # Without a node, autograd does not record the allreduce. Operations other than `Average` and `Sum` have no backward.
    if node is None or op not in (Average, Sum):
        return
    # A gradient has the shape, dtype and device of its result. Do not hold the results, which hold the node.
    kinds = [result.detach().new_empty(()).expand(result.shape) for result in results]
    node.register_prehook(lambda _: _announce(process_set, kinds, op))
    # With `create_graph=True`, the gradients have a backward, too.
    node.register_hook(lambda gradients, _: _announce_gradients(process_set, gradients, op))


def _announce_complete(process_set: ProcessSet, what: str) -> None:
    if process_set.process_set_id == 0 and world().group.size > 1:
        world().calls.announce_complete(what)


def _finished(result: Any) -> Handle:
    return PendingResult((), lambda: result)


def _first(pending: Handle) -> Handle:
    return _then(pending, lambda: pending.wait()[0])


def _then(pending: Handle, finish: Callable[[], Any]) -> Handle:
    return _Then(pending, finish)


class _Then(PendingResult[Any]):
    def __init__(self, pending: Handle, finish: Callable[[], Any]) -> None:
        super().__init__((), finish)
        self._pending = pending

    def is_completed(self) -> bool:
        return self._pending.is_completed()


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * ctx.factor, None


def _with_gradients_times(factor: float, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the same tensors. Backward multiplies their gradients by `factor`."""
    return [
        _ScaleGradient.apply(tensor, factor) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]
        for tensor in tensors
    ]
