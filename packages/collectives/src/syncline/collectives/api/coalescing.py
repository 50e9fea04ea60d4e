"""Collectives that copy many tensors into a few flat buffers, communicate, and copy the results back."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InvalidArgumentError
from ..group import ProcessGroup
from ..reduce_op import ReduceOp, Reduction, checked_reduction
from ..tensors import checks
from ..tensors.checks import has_fakes, resolved
from ..tensors.layout import untracked
from ..torch_internals import copy_each
from ..work import FinishedWork, FutureWork, TensorsFuture, Work, join_futures
from .default_group import resolve_group

DEFAULT_BUFFER_BYTES = 250 * 1024 * 1024
_IN_FLIGHT = 2
# If the tensors have at most this total size, and one buffer for each dtype and device is enough, the broadcasts run one after
# the other on the caller's thread. For so few bytes, handing a broadcast to another thread costs more than it saves (36 buffers
# of batch normalisation, two ranks: 1.1 ms with another thread, 0.7 ms one after the other).
_BLOCKING_BYTES = 1 << 20


def plan_buffers(nbytes: Sequence[int], kinds: Sequence[object], buffer_size_bytes: int) -> list[list[int]]:
    """Decide which tensors share a flat buffer. A pure function.

    `nbytes` and `kinds` have the size and the kind (dtype and device) of each tensor. A buffer holds tensors of one kind only.
    A tensor above `buffer_size_bytes` gets a buffer of its own.

    Returns:
        For each buffer, the indices of its tensors in ascending order. The buffers are ordered by their first index.
    """
    buffers: list[list[int]] = []
    filling: dict[object, tuple[list[int], int]] = {}
    for index, (size, kind) in enumerate(zip(nbytes, kinds, strict=True)):
        members, filled = filling.get(kind, ([], 0))
        # After a new buffer of a kind has begun, earlier buffers of the kind get no more tensors, not even small ones. So the
        # tensors of a kind stay in their order.
        if not members or filled + size > buffer_size_bytes:
            members, filled = [], 0
            buffers.append(members)
        members.append(index)
        filling[kind] = (members, filled + size)
    return buffers


def broadcast_coalesced(
    tensors: Sequence[torch.Tensor],
    *,
    group: ProcessGroup | None = None,
    root: int = 0,
    buffer_size_bytes: int = DEFAULT_BUFFER_BYTES,
) -> None:
    """Copy the root's tensors to every rank. Many small tensors travel together, in a few flat buffers.

    Args:
        tensors: the same number, shapes and dtypes on every rank, in the same order. Read on the root, overwritten on the other
            ranks.
        group: None means the default group. Every rank of the group calls this function.
        root: a rank in the group, from 0.
        buffer_size_bytes: the largest size of a flat buffer, in bytes. A tensor above this size gets a buffer of its own.

    Extra memory: two buffers. The ranks send as many bytes as if they called `broadcast` for each tensor.

    Raises:
        InvalidArgumentError: the buffer size is not positive, or a tensor cannot be used (see `ProcessGroup`).
    """
    if buffer_size_bytes < 1:
        raise InvalidArgumentError(f"expected buffer_size_bytes of at least 1, found {buffer_size_bytes}")
    chosen = resolve_group(group)
    is_root = chosen.rank == root
    # The root writes no tensor. Check its tensors like those of other ranks, so that all ranks refuse the same tensors.
    tensors, are_fake = _checked("broadcast_coalesced", tensors, chosen, are_written=chosen.size > 1)
    if are_fake:
        return
    pending: deque[_Pending] = deque()
    plan = _plan(tensors, buffer_size_bytes)
    at_once = len(plan) == len(set(map(_kind, tensors))) and sum(map(_nbytes, tensors)) <= _BLOCKING_BYTES
    for members in plan:
        if len(pending) == _IN_FLIGHT:
            pending.popleft().wait_and_copy_back()
        targets = [tensors[index] for index in members]
        buffer = _flatten(targets)
        # The root has the values already.
        destinations = [] if is_root else targets
        if at_once:
            chosen.broadcast(buffer, root)
            _copy_back(buffer, destinations)
        else:
            pending.append(_Pending(chosen.broadcast(buffer, root, async_op=True), buffer, destinations))
    for entry in pending:
        entry.wait_and_copy_back()


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Reduction = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Combine the tensors of all ranks in place, as `all_reduce` does for each tensor, but in fewer calls.

    Tensors of the same dtype and device travel together, up to 250 MiB in one all_reduce.

    Args:
        tensors: the same number, shapes and dtypes on every rank, in the same order. Overwritten.
        op: a reduction that is defined for the dtypes of all tensors.
        group: None means the default group.
        async_op: if true, return a `Work` at once. If false, wait for the results and return None.

    Extra memory: a copy of all tensors.
    """
    chosen = resolve_group(group)
    tensors, are_fake = _checked("all_reduce_coalesced", tensors, chosen, are_written=True)
    for dtype in {tensor.dtype for tensor in tensors}:
        checked_reduction(op, dtype)
    if are_fake:
        return FinishedWork(tensors) if async_op else None
    futures: list[TensorsFuture] = []
    for members in _plan(tensors, DEFAULT_BUFFER_BYTES):
        targets = [tensors[index] for index in members]
        buffer = _flatten(targets)
        entry = _Pending(chosen.all_reduce(buffer, op, async_op=True), buffer, targets)
        futures.append(entry.copied_back())
    return _joined(futures, list(tensors), "all_reduce_coalesced", chosen, async_op)


def all_gather_coalesced(
    output_tensor_lists: Sequence[Sequence[torch.Tensor]],
    input_tensor_list: Sequence[torch.Tensor],
    group: ProcessGroup | None = None,
    async_op: bool = False,
) -> Work | None:
    """Give every rank the tensors of all ranks, as `all_gather` does for each tensor, but in fewer calls.

    Inputs of the same dtype and device travel together, up to 250 MiB in one all_gather.

    Args:
        output_tensor_lists: one list for each rank, with tensors like those in `input_tensor_list`. List r is overwritten with
            the tensors of rank r.
        input_tensor_list: the same number, shapes and dtypes on every rank, in the same order. Only read.
        group: None means the default group.
        async_op: if true, return a `Work` at once. If false, wait for the results and return None.

    Raises:
        InvalidArgumentError: there is not one list for each rank, a list differs from the input in number, shapes or dtypes, or
            two outputs share memory.
    """
    chosen = resolve_group(group)
    inputs, are_fake = _checked("all_gather_coalesced", input_tensor_list, chosen, are_written=False)
    if not checks.is_list(output_tensor_lists):
        raise InvalidArgumentError(
            f"all_gather_coalesced on {chosen.place()}: expected a list of tensors for each rank, found "
            f"{type(output_tensor_lists).__name__}"
        )
    rows_and_fakes = [_checked("all_gather_coalesced", tensors, chosen, are_written=True) for tensors in output_tensor_lists]
    output_tensor_lists = [row for row, _ in rows_and_fakes]
    _check_lists(output_tensor_lists, inputs, chosen)
    everything = [tensor for outputs in output_tensor_lists for tensor in outputs]
    if are_fake or any(fake for _, fake in rows_and_fakes):
        return FinishedWork(everything) if async_op else None
    problem = checks.overlapping(everything)
    if problem is not None:
        raise InvalidArgumentError(f"all_gather_coalesced on {chosen.place()}: {problem}")
    futures: list[TensorsFuture] = []
    for members in _plan(inputs, DEFAULT_BUFFER_BYTES):
        buffer = _flatten([inputs[index] for index in members])
        rows = [torch.empty_like(buffer) for _ in range(chosen.size)]
        work = chosen.all_gather(rows, buffer, async_op=True)
        targets = [outputs[index] for outputs in output_tensor_lists for index in members]
        futures.append(_Pending(work, rows, targets).copied_back())
    return _joined(futures, everything, "all_gather_coalesced", chosen, async_op)


@dataclass
class _Pending:
    """A collective on flat memory, and the tensors to which this memory is copied when the collective ends."""

    work: Work
    memory: torch.Tensor | list[torch.Tensor]
    destinations: list[torch.Tensor]

    def wait_and_copy_back(self) -> None:
        self.work.wait()
        _copy_back(self.memory, self.destinations)

    def copied_back(self) -> TensorsFuture:
        """Return a future whose value is `destinations`. It is done when the memory has been copied to the destinations."""

        def copy_back(done: Any) -> list[torch.Tensor]:
            done.value()
            _copy_back(self.memory, self.destinations)
            return self.destinations

        return self.work.get_future().then(copy_back)


def _copy_back(memory: torch.Tensor | list[torch.Tensor], destinations: list[torch.Tensor]) -> None:
    if not destinations:  # on the root
        return
    flat = torch.cat(memory) if isinstance(memory, list) else memory
    with untracked():
        pieces = torch.split(flat, [tensor.numel() for tensor in destinations])
        shaped = [piece.view(tensor.shape) for tensor, piece in zip(destinations, pieces, strict=True)]
        copy_each(shaped, destinations)


def _plan(tensors: Sequence[torch.Tensor], buffer_size_bytes: int) -> list[list[int]]:
    return plan_buffers(
        list(map(_nbytes, tensors)),
        list(map(_kind, tensors)),
        buffer_size_bytes,
    )


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _kind(tensor: torch.Tensor) -> object:
    return tensor.dtype, tensor.device


def _flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors])


def _joined(
    futures: list[TensorsFuture], tensors: list[torch.Tensor], name: str, group: ProcessGroup, async_op: bool
) -> Work | None:
    work = FutureWork(join_futures(futures, tensors), tensors, lambda: f"{name} on {group.place()}")
    if async_op:
        return work
    work.wait()
    return None


def _checked(
    name: str, tensors: Sequence[torch.Tensor], group: ProcessGroup, *, are_written: bool
) -> tuple[list[torch.Tensor], bool]:
    """Check the tensors. Return the tensors that `checks.resolved` makes from them, and whether one is a FakeTensor.

    See Note [Tensors that are no memory] in `tensors.checks`.
    """
    problem = checks.no_tensors({"tensors": tensors})
    if problem is None and not all(tensor.layout is torch.strided for tensor in tensors):
        problem = "expected dense tensors, which are joined to one, found a sparse one; reduce it by all_reduce"
    usable = [] if problem is not None else resolved(list(tensors))
    are_fake = has_fakes(usable)
    for tensor in () if are_fake else usable:
        problem = problem or checks.unusable(tensor, group.device_types, group.backend_name)
        if are_written:
            problem = problem or checks.unwritable(tensor)
    if problem is not None:
        raise InvalidArgumentError(f"{name} on {group.place()}: {problem}")
    return usable, are_fake


def _check_lists(outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], group: ProcessGroup) -> None:
    if len(outputs) != group.size:
        raise InvalidArgumentError(
            f"all_gather_coalesced on {group.place()}: expected {group.size} lists of outputs, found {len(outputs)}"
        )
    wanted = [(tensor.dtype, tensor.shape) for tensor in inputs]
    for rank, entry in enumerate(outputs):
        if [(tensor.dtype, tensor.shape) for tensor in entry] != wanted:
            raise InvalidArgumentError(
                f"all_gather_coalesced on {group.place()}: the list of outputs for rank {rank} is not like the list of inputs "
                "in number, shapes and dtypes"
            )
