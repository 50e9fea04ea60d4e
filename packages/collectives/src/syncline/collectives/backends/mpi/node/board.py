"""Where the ranks of a node meet: by writing a number where all can read it, which is faster than a message."""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch

from ....contract.deadline import Deadline
from .. import yielding
from .segment import Segment

NOWHERE = -1  # as a key or an address: this rank has none
_GAVE_UP = -1  # as an arrival

# A rank's part: two lines of numbers, for arrivals in turn, then two slots for what the rank shows.
_LINE_BYTES = 128  # two cache lines: some processors fetch them in pairs
_HEAD_BYTES = 2 * _LINE_BYTES
NOTE_BYTES = 64  # the least that a slot can hold

# A look costs 0.06 us. Ranks that come at about the same time find each other without giving the core away.
_LOOKS_BEFORE_YIELDING = 100
_LOOKS_BETWEEN_CLOCKS = 256
_MOST_VIEWS = 512


def is_ordered() -> bool:
    """Whether this processor shows one core's writes to the others in the order in which they were made, and reads in order.

    That is what a board stands on: whoever reads a number there sees what was written before it. Others than x86 need
    instructions for that which Python does not have.
    """
    return platform.machine().lower() in ("x86_64", "amd64")


def board_bytes(slot_bytes: int) -> int:
    """The size of each rank's part of a board."""
    return _HEAD_BYTES + 2 * slot_bytes


class GaveUpError(Exception):
    """A rank said that it will not arrive any more."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class Board:
    """The ranks of a node arrive at points in a common order, say what for, and show each other a few bytes.

    Note [Arrivals in turn]
    ~~~~~~~~~~~~~~~~~~~~~~~
    Each rank writes in its own part only. Arrival k writes what the rank shows into slot k mod 2, what it is about to do into
    line k mod 2, and last of all k itself; then it waits until all others have written k there, and reads what they show.
    Nobody needs to say when it has read: a rank writes to the same slot and line again at arrival k + 2, which it reaches when
    all have arrived at k + 1, that is, after they have read everything of arrival k.

    Args:
        segment: with a part of `board_bytes(slot_bytes)` for each rank of the node.
        slot_bytes: how much a rank can show; a multiple of 64.
        progress: called while waiting, for what the library underneath has to do meanwhile: another rank may come only when
            a message of this one has reached it.
    """

    def __init__(self, segment: Segment, slot_bytes: int, progress: Callable[[], object]) -> None:
        self.size = segment.parts
        self.mine = segment.mine
        self.slot_bytes = slot_bytes
        self._segment = segment
        self._progress = progress
        self._numbers = segment.contents().cast("q")
        self._lines = [self._lines_of(turn) for turn in (0, 1)]
        self.arrivals = 0  # of this rank, so far
        self._views: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}

    def slots(self, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """What every rank shows at the next arrival: flat tensors, of at most `slot_bytes` and at least one element.

        This rank's is to be written before, the others' to be read after it.
        """
        return self.slots_at(self.arrivals + 1, numel, dtype)

    def slots_at(self, arrival: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """As `slots`, for any arrival: the same for every other one."""
        turn = arrival & 1
        views = self._views.get((turn, numel, dtype))
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            offset_bytes = _HEAD_BYTES + turn * self.slot_bytes
            with torch.inference_mode(False):  # they serve calls outside that mode, too
                views = self._segment.rows(offset_bytes, numel, dtype)
            self._views[turn, numel, dtype] = views
        return views

    def arrive(self, deadline: Deadline, digest: int = 0, key: int = NOWHERE, address: int = NOWHERE) -> tuple[bool, bool]:
        """Return when all ranks have arrived: whether `digest` is the same everywhere, and whether `key` is, and not `NOWHERE`.

        All are integers of 64 bits; the others learn the `address`.

        Raises:
            GaveUpError: a rank will not come.
            TimeoutError: the deadline passed.
        """
        self.arrivals = arrival = self.arrivals + 1
        numbers, (own, others, _) = self._numbers, self._lines[arrival & 1]
        numbers[own + 1] = digest
        numbers[own + 2] = key
        numbers[own + 3] = address
        numbers[own] = arrival
        is_same, is_common = True, key != NOWHERE
        for line in others:
            if numbers[line] != arrival:
                self._wait(line, arrival, deadline)
            if numbers[line + 1] != digest:
                is_same = False
            if numbers[line + 2] != key:
                is_common = False
        return is_same, is_common

    def give_up(self) -> None:
        """Let all who wait for this rank, or will, hear that it does not come; those, too, for whom it had arrived."""
        for own, _, _ in self._lines:
            self._numbers[own] = _GAVE_UP

    def addresses(self) -> list[int]:
        """What every rank gave as address at the last arrival; ask before this rank arrives again."""
        return [self._numbers[line + 3] for line in self._lines[self.arrivals & 1][2]]

    def _lines_of(self, turn: int) -> tuple[int, list[int], list[int]]:
        """Where this rank writes its numbers, where the others write theirs, and all, in rank order."""
        lines = [(self._segment.offset_of(rank) + turn * _LINE_BYTES) // 8 for rank in range(self.size)]
        return lines[self.mine], lines[: self.mine] + lines[self.mine + 1 :], lines

    def _wait(self, line: int, arrival: int, deadline: Deadline) -> None:
        numbers = self._numbers
        for _ in range(_LOOKS_BEFORE_YIELDING):
            if numbers[line] == arrival:
                return
        looks = 0
        while (number := numbers[line]) != arrival:
            if number == _GAVE_UP:
                raise GaveUpError(self._lines[arrival & 1][2].index(line))
            self._progress()
            yielding.give_way()
            looks += 1
            if looks % _LOOKS_BETWEEN_CLOCKS == 0 and deadline.expired():
                raise TimeoutError("rank(s) of this node did not come")
