"""`Recorder` keeps the last calls of one group on this rank, like torch's flight recorder."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..engine.call import RUNNING, Call, CallRecord
from .statements import ranks_in_words

MOST_CALLS = 256


class CallCount:
    """Counts the calls of a group that have begun, except calls that only some ranks issue.

    Attributes:
        begun: the number of these calls, and so the position of the next call.
    """

    __slots__ = ("begun",)

    def __init__(self) -> None:
        self.begun = 0


class Recorder:
    """Keeps the last 256 calls of a group, but no tensor of a call that is over.

    Any thread may call the methods. The group calls `begin` for one call at a time, in the order in which the calls run.

    `ranks` are the group's ranks in the default group.

    Attributes:
        members: the group's ranks, as numbered when the job began. After `shrink`, these numbers differ from `ranks`.
    """

    def __init__(self, group_name: str, rank: int, ranks: Sequence[int], count: CallCount | None = None) -> None:
        self.group_name = group_name
        self.rank = rank
        self.ranks = tuple(ranks)
        self.members = self.ranks
        self.count = count or CallCount()
        self._calls: deque[Call] = deque(maxlen=MOST_CALLS)
        self.add = self._calls.append  # not a method, because every call uses it and a method would cost one more call

    def begin(self, call: Call) -> None:
        """Mark the call as running. If all ranks issue the call, also set the call's position in the group's order of calls."""
        # Calls without a number run only on some ranks, so they have no position.
        if call.number is not None:
            call.position = self.count.begun
            self.count.begun += 1
        call.state = RUNNING

    def latest(self) -> float:
        """Return the time when the last call was issued, in seconds since the epoch; 0 if no call was issued."""
        # The group has issued no call yet. A test before the access would race with other threads.
        try:
            return self._calls[-1].issued_at
        except IndexError:
            return 0.0

    def running(self) -> Call | None:
        """Return the latest running call, or None if no call runs."""
        return next((call for call in reversed(self._all()) if call.state == RUNNING), None)

    def records(self) -> list[CallRecord]:
        """Return records of the last 256 calls, in the order in which the calls were issued."""
        return [call.record() for call in self._all()]

    def _all(self) -> list[Call]:
        while True:
            try:
                return list(self._calls)
            except RuntimeError:  # another thread has issued a call meanwhile
                continue


Calls = Mapping[int, CallRecord]


@dataclass(frozen=True)
class Divergence:
    """The first position at which the ranks did not begin the same call.

    Attributes:
        position: the position in the group's order of calls, from 0.
        calls: the call of each compared rank at this position; None if the rank has not reached this position.
        sentence: names the ranks with different calls, and their calls.
    """

    position: int
    calls: Mapping[int, CallRecord | None]
    sentence: str


def find_divergence(histories: Mapping[int, Sequence[CallRecord]], begun: Mapping[int, int] | None = None) -> Divergence | None:
    """Return the first divergence of the ranks of one group, or None. A pure function.

    Only positions that all ranks still remember are compared. Calls without a position are ignored.

    Args:
        histories: the last calls of each rank.
        begun: how many calls with a position each rank has begun. If no remembered call of a rank has a position, the rank is
            compared only from this number on. If `begun` is None, such a rank is compared at every position.
    """
    placed = {rank: _by_position(records) for rank, records in sorted(histories.items())}
    known = {rank: calls for rank, calls in placed.items() if calls}
    # A rank that remembers no call is not in `known`: it does not change where the comparison starts, but is compared below.
    if not known:
        return None
    # Only positions that every rank may remember can be compared.
    first = max(min(calls) for calls in known.values())
    last = max(max(calls) for calls in known.values())
    for position in range(first, last + 1):
        # Many sends and receives make a rank forget its other calls. It has made `begun` calls, but they are unknown.
        compared = {rank: mine for rank, mine in placed.items() if mine or position >= (begun or {}).get(rank, 0)}
        calls = {rank: mine.get(position) for rank, mine in compared.items()}
        # None stands for a rank that has not reached this position. Such a rank diverges, too.
        if len({None if call is None else call.digest for call in calls.values()}) > 1:
            return Divergence(position, calls, _sentence(position, compared))
    return None


def _by_position(records: Iterable[CallRecord]) -> Calls:
    return {record.position: record for record in records if record.position is not None}


def _sentence(position: int, placed: Mapping[int, Calls]) -> str:
    usual = _usual_call(position, placed)
    same = [rank for rank, calls in placed.items() if position in calls and calls[position].digest == usual.digest]
    following = placed[same[0]].get(position + 1)
    others: dict[tuple[str, str], list[int]] = {}
    for rank, calls in placed.items():
        if position not in calls or calls[position].digest != usual.digest:
            words = _deviation(usual, following, calls.get(position), calls.get(position + 1))
            others.setdefault(words, []).append(rank)
    said = (f"{ranks_in_words(ranks)} {of_one if len(ranks) == 1 else of_many}" for (of_one, of_many), ranks in others.items())
    return f"{', '.join(said)}; {ranks_in_words(same)} called {usual}"


def _usual_call(position: int, placed: Mapping[int, Calls]) -> CallRecord:
    present = [calls[position] for _, calls in sorted(placed.items()) if position in calls]
    # If several calls are equally frequent, take the call of the lowest rank.
    most = Counter(call.digest for call in present).most_common(1)[0][0]
    return next(call for call in present if call.digest == most)


def _deviation(
    usual: CallRecord, following: CallRecord | None, mine: CallRecord | None, my_next: CallRecord | None
) -> tuple[str, str]:
    place = f"{usual.name} #{usual.position}"
    # The rank waits in an earlier call, or still computes.
    if mine is None:
        return f"has not come to {place}", f"have not come to {place}"
    # The rank's call at this position is the call that the others make next.
    if following is not None and mine.digest == following.digest and mine.digest != usual.digest:
        return f"skipped {place} (it called {mine})", f"skipped {place} (they called {mine})"
    # The rank's next call is the call that the others make at this position.
    if my_next is not None and my_next.digest == usual.digest:
        return (f"made a call that the others did not, {mine}",) * 2
    return (f"called {mine}",) * 2
