"""Recorder: the last calls of one group on this rank (torch calls it a flight recorder)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ..engine.call import RUNNING, Call, CallRecord

MOST_CALLS = 256


class CallCount:
    """Counts the calls of a group that have begun and that all ranks issue.

    Attributes:
        begun: how many; also the position of the next one in the group's total order.
    """

    __slots__ = ("begun",)

    def __init__(self) -> None:
        self.begun = 0


class Recorder:
    """Keeps the last `MOST_CALLS` calls. A call that is over holds no tensor, so the recorder keeps no memory alive.

    Any thread may call. `begin` and `end` are called for one call after the other, in the group's total order.

    Args:
        group_name: how messages call the group.
        rank: this rank in the group.
        ranks: for each rank of the group its rank in the job.
        count: counts the calls that begin; by default a count of its own.
    """

    def __init__(self, group_name: str, rank: int, ranks: Sequence[int], count: CallCount | None = None) -> None:
        self.group_name = group_name
        self.rank = rank
        self.ranks = tuple(ranks)
        self.count = count or CallCount()
        self._calls: deque[Call] = deque(maxlen=MOST_CALLS)
        self.add = self._calls.append  # every call comes here: one function less

    def begin(self, call: Call) -> None:
        """The call begins to run. If all ranks issue it, it has its position in the total order from now on."""
        if call.number is not None:
            call.position = self.count.begun
            self.count.begun += 1
        call.state = RUNNING

    def latest(self) -> float:
        """When the last call was issued, in seconds since the epoch; 0 if there is none."""
        try:
            return self._calls[-1].issued_at
        except IndexError:
            return 0.0

    def running(self) -> Call | None:
        """The latest call that runs; None if none does."""
        return next((call for call in reversed(self._all()) if call.state == RUNNING), None)

    def records(self) -> list[CallRecord]:
        """The calls that are remembered, in the order of their issue."""
        return [call.record() for call in self._all()]

    def _all(self) -> list[Call]:
        while True:
            try:
                return list(self._calls)
            except RuntimeError:  # another thread has issued a call meanwhile
                continue
