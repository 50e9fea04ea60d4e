"""`Node` makes the memory that the ranks of a node share. `Windows` finds the tensors in this memory."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from bisect import bisect_right
from typing import NamedTuple

import torch
from mpi4py import MPI

from ....engine.call import Call
from ...shared_memory.segment import Segment
from ..library import Tag, mpi_errors
from ..sync import NOWHERE, MessageSync, Sync
from .hierarchy import Hierarchy
from .shared_allocation import SharedMemoryError, allocate_shared
from .shared_sync import LEAST_SLOT_BYTES, SharedSync, ShmBarrier, barrier_bytes

logger = logging.getLogger("syncline.collectives")
_warned_of: set[str] = set()  # for the whole process, because every group would warn of the same reasons


class Place(NamedTuple):
    """The place of a tensor in shared memory.

    Attributes:
        segment: the shared memory, which has a part for each rank of the node.
        offset_bytes: the offset of the tensor in the rank's part.
    """

    segment: Segment
    offset_bytes: int


class _Entry(NamedTuple):
    start: int
    part_bytes: int
    first_key: int
    segment: weakref.ref[Segment]


class Windows:
    """The windows of this process: the shared segments in which tensors were allocated.

    Each place in a window has a key, an integer. All ranks make the same segments in the same order, so equal places have equal
    keys on all ranks. A key is never used again.
    """

    def __init__(self) -> None:
        # The start addresses, and the entries sorted by start. Replace both together, because a segment may be freed at
        # any moment, on any thread.
        self._known: tuple[list[int], list[_Entry]] = [], []
        self._changing = threading.RLock()  # reentrant: `_forget` may run inside `add`, on the same thread
        self._next_key = 0

    def add(self, segment: Segment) -> None:
        """Add a segment. All ranks add the same segments in the same order."""
        with self._changing:
            entry = _Entry(segment.address(), segment.part_bytes, self._next_key, weakref.ref(segment, self._forget))
            self._next_key += segment.part_bytes + 1  # + 1 because the end of a segment is a place, too
            # A segment that is freed just now may stay in the list until the next `add`. `key_of` ignores it.
            alive = (known for known in self._known[1] if known.segment() is not None)
            self._know(sorted((*alive, entry), key=lambda known: known.start))

    def key_of(self, tensor: torch.Tensor) -> int:
        """Return the key of a contiguous tensor's place, or `NOWHERE` if the tensor is not in this rank's part of a window.

        Two ranks get the same key if and only if their tensors are at the same place.
        """
        starts, entries = self._known
        address = tensor.data_ptr()
        index = bisect_right(starts, address) - 1
        # The tensor is before the first segment.
        if index < 0:
            return NOWHERE
        start, part_bytes, first_key, segment = entries[index]
        # If the tensor ends outside of the segment, it has no place there. If the segment is being freed, another segment may
        # soon have its address.
        if address + tensor.nbytes > start + part_bytes or segment() is None:
            return NOWHERE
        return first_key + address - start

    def place(self, key: int) -> Place:
        """Return the place for a key that `key_of` has returned. A tensor must still be at this place."""
        for entry in self._known[1]:
            segment = entry.segment()
            if segment is not None and 0 <= key - entry.first_key <= entry.part_bytes:
                return Place(segment, key - entry.first_key)
        raise LookupError(f"no segment has place {key}")

    def __len__(self) -> int:
        return len(self._known[1])

    def _forget(self, dead: weakref.ref[Segment]) -> None:
        with self._changing:
            self._know([entry for entry in self._known[1] if entry.segment is not dead])

    def _know(self, entries: list[_Entry]) -> None:
        self._known = [entry.start for entry in entries], entries


class Node:
    """A group's ranks on this node, and the memory that these ranks share.

    The shared memory comes in segments, with a part for each rank of the node. Windows are the segments that hold tensors. The
    first call on the group makes a barrier in a segment of its own.

    Args:
        communicator: a private communicator of the whole group.
        messages: lets all ranks of the group wait for one another by MPI messages.
        local_messages: like `messages`, but only for the ranks of this node.
        slot_bytes: the size of an eager slot; a multiple of 64, or 0.
        ranks_on_node: the number of the job's ranks on this node.

    Attributes:
        has_windows: whether `allocate` has ever succeeded. The value is the same on all ranks.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        communicator: MPI.Intracomm,
        messages: MessageSync,
        local_messages: MessageSync,
        slot_bytes: int,
        ranks_on_node: int,
    ) -> None:
        self.hierarchy = hierarchy
        self.windows = Windows()
        self.has_windows = False
        self._communicator = communicator
        self._messages = messages
        self._local_messages = local_messages
        self._slot_bytes = max(slot_bytes, LEAST_SLOT_BYTES)
        self._has_own_core = ranks_on_node <= len(os.sched_getaffinity(0))
        self._fence = hierarchy.fence if hierarchy.shares_memory else None  # None: make no barrier
        self._shared: SharedSync | None = None

    # ---- waits ----

    def sync(self, call: Call) -> Sync:
        """Return the object with which all ranks of the group wait for one another. All ranks call this method together."""
        return self._messages if self.hierarchy.nodes > 1 else self.shared_sync(call) or self._messages

    def local_sync(self, call: Call) -> Sync:
        """Return the object with which the ranks of this node wait for one another. All ranks of the group call this method."""
        return self.shared_sync(call) or self._local_messages

    def shared_sync(self, call: Call) -> SharedSync | None:
        """Return the object with which the ranks of this node wait for one another in shared memory.

        All ranks of the group call this method together. The first call makes the object. If a rank cannot make it, all ranks
        return None.
        """
        if self._shared is None and self._fence is not None:
            # Making the sync is a collective, so first make sure that all ranks are here, for the same call.
            self._messages.compare(call)
            segment = self._new_segment(barrier_bytes(self._slot_bytes), call)
            if segment is None:
                # The ranks have agreed that no rank has the memory, so all ranks use messages from now on.
                self._fence = None
            else:
                # A probe for a message that never comes lets MPI make progress while this rank waits in shared memory.
                probe, rank = self._communicator.Iprobe, self._communicator.Get_rank()
                barrier = ShmBarrier(
                    segment, self._slot_bytes, lambda: probe(rank, Tag.NOTHING), self._fence, has_own_core=self._has_own_core
                )
                self._shared = SharedSync(barrier, self._messages)
        return self._shared

    # ---- memory ----

    def segment(self, part_bytes: int, call: Call) -> Segment | None:
        """Make new memory with a part for each rank of a node. If the allocation fails, all ranks return None.

        All ranks of the group call this method together.
        """
        # Making a segment is a collective, so first make sure that all ranks are here, for the same call.
        self.sync(call).compare(call)
        return self._new_segment(part_bytes, call)

    def allocate(self, numel: int, dtype: torch.dtype, call: Call) -> torch.Tensor | None:
        """Make a window, and return this rank's tensor in the window, filled with zeros.

        All ranks of the group call this method together. If the allocation fails, all ranks return None.
        """
        segment = self.segment(numel * dtype.itemsize, call)
        if segment is None:
            return None
        segment.holds_tensors = True
        self.windows.add(segment)
        self.has_windows = True
        # Zeros map the pages now, so the first use is not slower. Fill bytes: torch cannot fill int4 or quantized tensors.
        segment.view(segment.mine, 0, numel * dtype.itemsize, torch.uint8).zero_()
        return segment.view(segment.mine, 0, numel, dtype)

    def _new_segment(self, part_bytes: int, call: Call) -> Segment | None:
        try:
            with mpi_errors():
                run = lambda start: self._messages.run(call, start)  # noqa: E731
                return allocate_shared(self.hierarchy, self._communicator, part_bytes, run)
        except SharedMemoryError as error:
            reason = str(error)
            # Only rank 0 warns, and only once for each reason, because every new bucket would fail for the same reason.
            if self._communicator.Get_rank() == 0 and reason not in _warned_of:
                _warned_of.add(reason)
                logger.warning(
                    "in a group of %d ranks those of a node cannot share memory (%s). They use MPI instead, which is slower; "
                    "the results are equal up to rounding. Leave the job more memory, or start the ranks of a node in one "
                    "container; `syncline doctor` tries whether they can share any",
                    self._communicator.Get_size(),
                    reason,
                )
            return None

    # ---- the end ----

    def give_up(self) -> None:
        """Tell the ranks of this node that this rank makes no more calls."""
        if self._shared is not None:
            self._shared.barrier.give_up()

    def forget(self) -> None:
        """Release the barrier."""
        self._shared, self._fence = None, None
