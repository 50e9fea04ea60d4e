"""Reductions of plain memory: copied into a window of the group, reduced there, and copied out."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import memmove
from typing import NamedTuple

import torch

from ....contract.collective import Collective
from ....contract.deadline import Deadline
from ....contract.layout import mark_written
from ....contract.running_call import RunningCall
from ....host.reduction import always_of
from .algorithm import Algorithm, Operation, chunks, slice_of
from .group_sync import GroupSync
from .plan import NodePlan, PlanRequest
from .segment import Segment
from .windows import NodeMemory

# Each chunk costs a barrier, which is little where every rank has a core, and much where it has not. But what was copied in
# shall still be in the core's cache when it is reduced.
SLOT_BYTES = 1 << 20
SLOTS = 3


class StagingArea:
    """A window of the group with three slots for each rank, used in turn; made when it is first needed.

    Note [Slots in turn]
    ~~~~~~~~~~~~~~~~~~~~
    Chunks use the slots in turn, whatever collectives they belong to, and every rank passes the same barriers, at least one for
    each chunk. What is written for chunk k is read after a barrier. The last reads of chunk k are over when their rank comes to
    the barrier of chunk k + 1. The first writes of chunk k + 3, to the same slot, come after the barrier of chunk
    k + 1 (a rank copies one chunk ahead). So nothing is overwritten that somebody still reads, without further barriers.

    Args:
        memory: of the group.
        sync: of the group.
    """

    def __init__(self, memory: NodeMemory, sync: GroupSync) -> None:
        self._memory = memory
        self._sync = sync
        self._segment: Segment | None = None
        self._may_exist = True
        self._next = 0

    def segment(self, describe: Callable[[], Collective], deadline: Deadline) -> Segment | None:
        """The window; None, on all ranks, if it cannot be had. All ranks call it at the same point of their order."""
        if self._segment is None and self._may_exist:
            self._sync.verify(describe, deadline)
            self._segment = self._memory.allocate_segment(SLOTS * SLOT_BYTES, RunningCall(describe(), deadline))
            self._may_exist = self._segment is not None
        return self._segment

    def take(self) -> int:
        """The number of the slot whose turn it is."""
        number = self._next
        self._next = (number + 1) % SLOTS
        return number

    def forget(self) -> None:
        """Give the window back."""
        self._segment, self._may_exist = None, False


class _Copy(NamedTuple):
    """One copy between a slot and a tensor.

    Attributes:
        slot: the address in the slot.
        offset_bytes: from the beginning of the tensor, or of the chunk in it.
        nbytes: how much.
    """

    slot: int
    offset_bytes: int
    nbytes: int


class _Step(NamedTuple):
    """What a rank does with a chunk of one length in one slot.

    Attributes:
        copies_in: from the rank's tensor (the block) to its slot.
        reduce: combines everybody's slices, into `out`; None if there are no elements for this rank.
        out: this rank's slice, in its slot.
        copies_out: from the slots to the rank's tensor.
    """

    copies_in: list[_Copy]
    reduce: Callable[..., object] | None
    out: torch.Tensor | None
    copies_out: list[_Copy]


class CopyInCopyOut(NodePlan):
    """`all_reduce` and `reduce_scatter` through the staging area, chunk by chunk.

    A rank copies its chunk into its slot, and after a barrier reduces one slice of it from all slots, in rank order, into its
    slot. For `all_reduce` it copies the slices out after the next barrier; for `reduce_scatter` its slice is the result. A rank
    copies in the next chunk before it reduces this one, so one barrier serves for both.

    Cost of n bytes: n copied in; n/p reduced; `all_reduce` n copied out, and one barrier more than chunks; `reduce_scatter` n/p
    copied out.

    Args:
        request: as for `NodePlan`.
        staging: of the group.
        otherwise: as for `NodePlan`.
    """

    chosen = Algorithm.COPY_IN_COPY_OUT

    def __init__(self, request: PlanRequest, staging: StagingArea, otherwise: NodePlan | None) -> None:
        super().__init__(request, otherwise)
        self._is_all_reduce = request.operation is Operation.ALL_REDUCE
        self._staging = staging
        self._segment: Segment | None = None
        self._steps: dict[tuple[int, int], _Step] = {}
        self._chunks: list[tuple[int, int]] = []

    def run(self, tensor: torch.Tensor, whole: torch.Tensor, deadline: Deadline, *, is_verified: bool = False) -> None:
        """Verify the call at the first chunk's barrier, and reduce."""
        if self._segment is None and not self._bind(tensor, deadline):
            self._run_otherwise(tensor, whole, deadline, is_verified=is_verified)
            return
        source, target, itemsize = whole.data_ptr(), tensor.data_ptr(), self._kind.dtype.itemsize
        pending: tuple[_Step, int] | None = None
        for start, stop in self._chunks:
            step = self._step(self._staging.take(), stop - start)
            for slot, offset, nbytes in step.copies_in:
                memmove(slot, source + start * itemsize + offset, nbytes)
            if pending is not None:
                _reduce(pending[0])
            if is_verified:
                self._wait(tensor, deadline)
            else:
                self._verify(tensor, deadline)
                is_verified = True
            if pending is not None:
                _copy_out(*pending)
            pending = step, target + start * itemsize
        assert pending is not None
        _reduce(pending[0])
        if self._is_all_reduce:
            self._wait(tensor, deadline)
        _copy_out(*pending)
        mark_written(tensor)

    def _bind(self, tensor: torch.Tensor, deadline: Deadline) -> bool:
        segment = self._staging.segment(lambda: self._call(tensor), deadline)
        if segment is not None:
            parts = 1 if self._is_all_reduce else segment.parts
            step = max(1, SLOT_BYTES // (parts * self._kind.dtype.itemsize))
            self._chunks = list(chunks(0, self._kind.numel, step))
            self._segment = segment
        return segment is not None

    def _step(self, number: int, length: int) -> _Step:
        step = self._steps.get((number, length))
        if step is None:
            make = self._all_reduce_step if self._is_all_reduce else self._reduce_scatter_step
            assert self._segment is not None
            step = self._steps[number, length] = make(self._segment, number * SLOT_BYTES, length)
        return step

    def _all_reduce_step(self, segment: Segment, offset: int, length: int) -> _Step:
        mine, itemsize = segment.mine, self._kind.dtype.itemsize
        slots = _slots(segment, offset)
        slices = [slice_of(length, segment.parts, rank) for rank in range(segment.parts)]
        start, stop = slices[mine]
        reduce, out = self._reduction(segment, offset + start * itemsize, stop - start)
        copies_out = [
            _Copy(slot + start * itemsize, start * itemsize, (stop - start) * itemsize)
            for slot, (start, stop) in zip(slots, slices, strict=True)
        ]
        return _Step([_Copy(slots[mine], 0, length * itemsize)], reduce, out, copies_out)

    def _reduce_scatter_step(self, segment: Segment, offset: int, length: int) -> _Step:
        mine, itemsize = segment.mine, self._kind.dtype.itemsize
        slot, nbytes, part_bytes = _slots(segment, offset)[mine], length * itemsize, self._kind.numel * itemsize
        copies_in = [_Copy(slot + rank * nbytes, rank * part_bytes, nbytes) for rank in range(segment.parts)]
        reduce, out = self._reduction(segment, offset + mine * nbytes, length)
        return _Step(copies_in, reduce, out, [_Copy(slot + mine * nbytes, 0, nbytes)])

    def _reduction(
        self, segment: Segment, offset_bytes: int, numel: int
    ) -> tuple[Callable[..., object] | None, torch.Tensor | None]:
        if numel == 0:
            return None, None
        with torch.inference_mode(False):  # it serves calls outside that mode, too
            terms = segment.rows(offset_bytes, numel, self._kind.dtype)
        assert self._kind.op is not None
        return always_of(terms, self._kind.op, self._kind.dtype), terms[segment.mine]


def _reduce(step: _Step) -> None:
    if step.reduce is not None:
        step.reduce(out=step.out)


def _copy_out(step: _Step, target: int) -> None:
    for slot, offset, nbytes in step.copies_out:
        memmove(target + offset, slot, nbytes)


def _slots(segment: Segment, offset_bytes: int) -> list[int]:
    return [slot.data_ptr() for slot in segment.rows(offset_bytes, 1, torch.uint8)]
