"""The memory that a group's ranks share on a node, and which tensors lie in it."""

from __future__ import annotations

import logging
import threading
import weakref
from bisect import bisect_right
from typing import NamedTuple

import torch
from mpi4py import MPI

from ....contract.running_call import RunningCall
from ....host.shared_memory.segment import Segment
from ..call_verifier import NO_KEY, CallVerifier
from ..library import mpi_errors
from .hierarchy import Hierarchy
from .shared_allocation import SharedMemoryError, allocate_shared

logger = logging.getLogger("syncline.collectives")
_warned_of: set[str] = set()  # by this process: every group meets the same reasons


class Place(NamedTuple):
    """Where a tensor lies.

    Attributes:
        segment: the shared memory.
        offset_bytes: from the beginning of this rank's part.
    """

    segment: Segment
    offset_bytes: int


class _Entry(NamedTuple):
    start: int
    part_bytes: int
    first_key: int
    segment: weakref.ref[Segment]


class Windows:
    """The segments that tensors were allocated in, in this process.

    The keys of places are addresses in a space of their own, in which all segments that ever were lie one after the other. All
    ranks make the same segments in the same order, so they agree on it; 63 bits last for 8 EiB of allocations.

    It does not keep them alive: a segment goes when this rank's last tensor in it has gone. So what was allocated and is not
    needed any more (a reducer's first buckets) costs nothing, without anybody having to say so.
    """

    def __init__(self) -> None:
        # By start, and the starts alone; replaced as a whole, for a segment may go at any moment.
        self._known: tuple[list[int], list[_Entry]] = [], []
        self._changing = threading.RLock()  # on any thread, also on the one that is in `add`
        self._next_key = 0

    def add(self, segment: Segment) -> None:
        """Remember a segment. All ranks do, in the same order."""
        with self._changing:
            entry = _Entry(segment.address(), segment.part_bytes, self._next_key, weakref.ref(segment, self._forget))
            self._next_key += segment.part_bytes + 1  # its end is a place, too
            # One that goes just now may stay until the next one is added: `key_of` does not mind.
            alive = (known for known in self._known[1] if known.segment() is not None)
            self._know(sorted((*alive, entry), key=lambda known: known.start))

    def key_of(self, tensor: torch.Tensor) -> int:
        """The key of the place where a contiguous tensor lies, if it lies in this rank's part of a segment from end to end.

        Else `NO_KEY`. It is equal on all ranks if and only if the places are, and no other place will ever have it.
        """
        starts, entries = self._known
        address = tensor.data_ptr()
        index = bisect_right(starts, address) - 1
        if index < 0:
            return NO_KEY
        start, part_bytes, first_key, segment = entries[index]
        if address + tensor.nbytes > start + part_bytes or segment() is None:
            return NO_KEY
        return first_key + address - start

    def place(self, key: int) -> Place:
        """That of a key which `key_of` has given for a tensor that still lies there."""
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


class NodeMemory:
    """Makes segments, and remembers those in which tensors lie: the windows.

    Args:
        hierarchy: who is on which node.
        communicator: of the whole group, private.
        verifier: of the whole group.
    """

    def __init__(self, hierarchy: Hierarchy, communicator: MPI.Intracomm, verifier: CallVerifier) -> None:
        self.windows = Windows()
        self._hierarchy = hierarchy
        self._communicator = communicator
        self._verifier = verifier
        self._has_windows = False

    @property
    def has_windows(self) -> bool:
        """Whether `allocate` was ever successful; the same on all ranks."""
        return self._has_windows

    def allocate_segment(self, part_bytes: int, call: RunningCall) -> Segment | None:
        """A segment with a part for each rank of a node; None, on all ranks, if it cannot be had. A collective of the group."""
        try:
            with mpi_errors():
                run = lambda start: self._verifier.run(call, start)  # noqa: E731
                return allocate_shared(self._hierarchy, self._communicator, part_bytes, run)
        except SharedMemoryError as error:
            self._warn(error)
            return None

    def allocate(self, numel: int, dtype: torch.dtype, call: RunningCall) -> torch.Tensor | None:
        """A window, filled with zeros; None, on all ranks, if it cannot be had."""
        segment = self.allocate_segment(numel * dtype.itemsize, call)
        if segment is None:
            return None
        segment.holds_tensors = True
        self.windows.add(segment)
        self._has_windows = True
        return segment.view(segment.mine, 0, numel, dtype).zero_()  # written, so that no first use pays for it

    def _warn(self, error: SharedMemoryError) -> None:
        reason = str(error)
        if self._communicator.Get_rank() == 0 and reason not in _warned_of:
            _warned_of.add(reason)
            logger.warning(
                "in a group of %d ranks those of a node cannot share memory (%s). They use MPI instead, which is slower; the "
                "results are equal up to rounding. Leave the job more memory, or start the ranks of a node in one container; "
                "`syncline doctor` tries whether they can share any",
                self._communicator.Get_size(),
                reason,
            )
