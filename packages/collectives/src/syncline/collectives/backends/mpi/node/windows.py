"""Which tensors lie in shared memory, and where."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from typing import NamedTuple

import torch

from .segment import Segment


class Place(NamedTuple):
    """Where a tensor lies.

    Attributes:
        segment: the shared memory.
        offset_bytes: from the beginning of this rank's part.
        key: says the same in one number, which is equal on all ranks if and only if the places are.
    """

    segment: Segment
    offset_bytes: int
    key: int


class _Entry(NamedTuple):
    start: int
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
            entry = _Entry(segment.address(), self._next_key, weakref.ref(segment, self._forget))
            self._next_key += segment.part_bytes + 1  # its end is a place, too
            # One that goes just now may stay until the next one is added: `find` does not mind.
            alive = (known for known in self._known[1] if known.segment() is not None)
            self._know(sorted((*alive, entry), key=lambda known: known.start))

    def find(self, tensor: torch.Tensor) -> Place | None:
        """Where a contiguous tensor lies, if it lies in this rank's part of a segment from end to end."""
        starts, entries = self._known
        address = tensor.data_ptr()
        index = bisect_right(starts, address) - 1
        segment = entries[index].segment() if index >= 0 else None
        if segment is None:
            return None
        offset = address - entries[index].start
        if offset + tensor.nbytes > segment.part_bytes:
            return None
        return Place(segment, offset, entries[index].first_key + offset)

    def __len__(self) -> int:
        return len(self._known[1])

    def _forget(self, dead: weakref.ref[Segment]) -> None:
        with self._changing:
            self._know([entry for entry in self._known[1] if entry.segment is not dead])

    def _know(self, entries: list[_Entry]) -> None:
        self._known = [entry.start for entry in entries], entries
