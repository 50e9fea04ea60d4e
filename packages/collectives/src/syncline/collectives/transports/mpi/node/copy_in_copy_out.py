"""Reduce tensors that are in no window: copy them into the group's own window, reduce there, and copy the results back."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import memmove
from typing import NamedTuple, TypeVar

import torch

from ....engine.call import Call, Signature
from ....tensors.layout import flat
from ....tensors.reduction import reduce_into
from ...shared_memory.segment import Segment
from .choice import Operation, chunks, slice_of
from .memory import Node
from .plan import Algorithm

# The size of a slot, which holds one chunk. Small chunks are still in the core's cache when they are reduced. Large chunks need
# fewer barriers. A barrier is cheap if every rank has its own core, and expensive if not.
SLOT_BYTES = 1 << 20
SLOTS = 3

_T = TypeVar("_T")


class StagingArea:
    """A window (memory that all ranks of a node have mapped) with three slots for each rank. A slot holds a chunk of a tensor.

    Note [Slots in turn]
    ~~~~~~~~~~~~~~~~~~~~
    Chunks use the three slots in turn. The next collective goes on with the next slot. There is at least one barrier for each
    chunk. Ranks reduce chunk k after the barrier of chunk k, and copy the results of chunk k out of the slots after the barrier
    of chunk k + 1. So all reads of chunk k end before the barrier of chunk k + 2. Chunk k + 3 uses the slot of chunk k, but is
    written after the barrier of chunk k + 2. So no rank overwrites data that another rank still reads.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._segment: Segment | None = None
        self._may_exist = True
        self._next = 0

    def segment(self, call: Call) -> Segment | None:
        """Return the window. The first call makes the window. If a rank cannot make it, all ranks return None.

        All ranks call this method together.
        """
        # If the window could not be made once, do not try again: each try costs a collective.
        if self._segment is None and self._may_exist:
            self._segment = self._node.segment(SLOTS * SLOT_BYTES, call)
            self._may_exist = self._segment is not None
        return self._segment

    def take(self) -> int:
        """Take the next slot, and return its number."""
        number = self._next
        self._next = (number + 1) % SLOTS
        return number

    def forget(self) -> None:
        """Release the window."""
        self._segment, self._may_exist = None, False


class _Copy(NamedTuple):
    """One copy of `nbytes` bytes between a slot and a tensor.

    `slot` is the address of the bytes in the slot. `offset_bytes` is their offset in the tensor, from the start of the chunk.
    """

    slot: int
    offset_bytes: int
    nbytes: int


class _Step(NamedTuple):
    """The copies and the reduction that a rank does for each chunk of one length.

    Attributes:
        copies_in: for each slice that another rank reduces, the copy of this slice to this rank's slot.
        slots: for each rank r, the slice in rank r's slot that this rank reduces.
        share: the slice that this rank reduces: its start in the chunk and its length, in elements.
        copy_to_slot: the copy of this rank's result to this rank's slot; None if no other rank needs the result.
        copies_out: for each other rank, the copy of its result from its slot to this rank's tensor.
    """

    copies_in: list[_Copy]
    slots: list[torch.Tensor]
    share: tuple[int, int]
    copy_to_slot: _Copy | None
    copies_out: list[_Copy]


class CopyInCopyOut(Algorithm):
    """Runs `all_reduce` and `reduce_scatter` through shared memory (the group's `StagingArea`), chunk by chunk.

    Each rank owns one slice of each chunk, and does these steps for each chunk:

    1. Copy all slices of other ranks into this rank's slot.
    2. Wait at a barrier.
    3. Reduce this rank's slice in rank order, and write the result to this rank's tensor. For `all_reduce`, also copy the
       result to this rank's slot.
    4. For `all_reduce`: after the next barrier, copy the results of the other ranks out of their slots.

    Cost for n bytes and p ranks: each rank copies n - n/p bytes into slots and reduces n/p bytes. For `all_reduce`, each rank
    then copies n/p more bytes into slots, and n - n/p bytes out of slots. There is one barrier for each chunk, and one more at
    the end of an `all_reduce`.
    """

    name = "copy-in copy-out"

    def __init__(self, node: Node, signature: Signature, operation: Operation, staging: StagingArea) -> None:
        self._node = node
        self._numel, self._dtype, self._op = signature.numel, signature.element_dtype, signature.reduction
        self._is_all_reduce = operation is Operation.ALL_REDUCE
        self._staging = staging
        self._segment: Segment | None = None
        self._steps: dict[tuple[int, int], _Step] = {}
        self._chunks: list[tuple[int, int]] = []

    def prepare(self, call: Call) -> bool:
        """At the first call, make the shared memory of the group's `StagingArea`. Return whether the group has this memory."""
        if self._segment is None:
            segment = self._segment = self._staging.segment(call)
            if segment is not None:
                parts = 1 if self._is_all_reduce else segment.parts
                step = max(1, SLOT_BYTES // (parts * self._dtype.itemsize))
                self._chunks = list(chunks(0, self._numel, step))
        return self._segment is not None

    def run(self, part: torch.Tensor, whole: torch.Tensor, call: Call) -> None:
        """See `Plan.run`."""
        segment, sync = self._segment, self._node.local_sync(call)
        assert segment is not None
        out, itemsize = flat(part), self._dtype.itemsize
        own = out if self._is_all_reduce else flat(whole).narrow(0, segment.mine * self._numel, self._numel)
        source, target = whole.data_ptr(), part.data_ptr()
        pending: tuple[_Step, int] | None = None
        for start, stop in self._chunks:
            step = self._step(segment, self._staging.take(), stop - start)
            for slot, offset, nbytes in step.copies_in:
                memmove(slot, source + start * itemsize + offset, nbytes)
            # Reduce the previous chunk only now, so that this copy and the reduction share one barrier.
            # Since the last barrier, all terms of the previous chunk are in the slots.
            if pending is not None:
                self._reduce(*pending, own, out)
            sync.wait(call)
            # After the barrier above, all ranks have also reduced the previous chunk.
            if pending is not None:
                _copy_out(pending[0], target + pending[1] * itemsize)
            pending = step, start
        assert pending is not None
        self._reduce(*pending, own, out)
        # In a reduce-scatter, no rank needs the result of another rank, so the call ends without another barrier.
        if self._is_all_reduce:
            sync.wait(call)
            _copy_out(pending[0], target + pending[1] * itemsize)

    def _reduce(self, step: _Step, start: int, own: torch.Tensor, out: torch.Tensor) -> None:
        begin, numel = step.share
        if numel == 0:  # a chunk with fewer elements than ranks
            return
        assert self._segment is not None
        terms = step.slots.copy()
        # Read this rank's own term from its tensor: the rank never copies its own term to the slot.
        terms[self._segment.mine] = own.narrow(0, start + begin, numel)
        result = out.narrow(0, start + begin, numel)
        reduce_into(result, self._op, terms)
        # Only an all-reduce gives the result to the other ranks.
        if step.copy_to_slot is not None:
            memmove(step.copy_to_slot.slot, result.data_ptr(), step.copy_to_slot.nbytes)

    def _step(self, segment: Segment, number: int, length: int) -> _Step:
        step = self._steps.get((number, length))
        if step is None:
            make = self._all_reduce_step if self._is_all_reduce else self._reduce_scatter_step
            step = self._steps[number, length] = make(segment, number * SLOT_BYTES, length)
        return step

    def _all_reduce_step(self, segment: Segment, offset: int, length: int) -> _Step:
        mine, itemsize = segment.mine, self._dtype.itemsize
        slots = _slots(segment, offset)
        shares = [slice_of(length, segment.parts, rank) for rank in range(segment.parts)]
        copies = [(start * itemsize, (stop - start) * itemsize) for start, stop in shares]
        copies_in = [_Copy(slots[mine] + start, start, nbytes) for start, nbytes in _without(mine, copies)]
        copies_out = [
            _Copy(slot + start, start, nbytes)
            for slot, (start, nbytes) in zip(_without(mine, slots), _without(mine, copies), strict=True)
        ]
        (start, stop), (start_byte, nbytes) = shares[mine], copies[mine]
        terms = self._terms(segment, offset + start_byte, stop - start)
        return _Step(copies_in, terms, (start, stop - start), _Copy(slots[mine] + start_byte, start_byte, nbytes), copies_out)

    def _reduce_scatter_step(self, segment: Segment, offset: int, length: int) -> _Step:
        mine, itemsize = segment.mine, self._dtype.itemsize
        slot, nbytes, part_bytes = _slots(segment, offset)[mine], length * itemsize, self._numel * itemsize
        others = _without(mine, range(segment.parts))
        copies_in = [_Copy(slot + rank * nbytes, rank * part_bytes, nbytes) for rank in others]
        return _Step(copies_in, self._terms(segment, offset + mine * nbytes, length), (0, length), None, [])

    def _terms(self, segment: Segment, offset_bytes: int, numel: int) -> list[torch.Tensor]:
        # torch cannot make a tensor without elements at an address.
        if numel == 0:
            return []
        with torch.inference_mode(False):  # the tensors are kept for later calls, which may be outside of this mode
            return segment.rows(offset_bytes, numel, self._dtype)


def _without(mine: int, of_ranks: Sequence[_T]) -> list[_T]:
    return [*of_ranks[:mine], *of_ranks[mine + 1 :]]


def _copy_out(step: _Step, target: int) -> None:
    for slot, offset, nbytes in step.copies_out:
        memmove(target + offset, slot, nbytes)


def _slots(segment: Segment, offset_bytes: int) -> list[int]:
    return [slot.data_ptr() for slot in segment.rows(offset_bytes, 1, torch.uint8)]
