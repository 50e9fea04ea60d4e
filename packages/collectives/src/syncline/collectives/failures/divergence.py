"""Where the sequences of calls of several ranks part, and in words who did what."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from .call_record import CallRecord

Calls = Mapping[int, CallRecord]

_LISTED_RUN = 3  # so many neighbours are shown one by one


@dataclass(frozen=True)
class Divergence:
    """The first position at which the ranks did not begin the same call.

    Attributes:
        position: in the total order, from 0.
        calls: for each rank its call there; None if it did not come so far.
        sentence: who did what.
    """

    position: int
    calls: Mapping[int, CallRecord | None]
    sentence: str


def find_divergence(histories: Mapping[int, Sequence[CallRecord]]) -> Divergence | None:
    """Compare what ranks remember of their calls on one group. A pure function.

    Args:
        histories: for each rank its calls. Those without a position are ignored.

    Returns:
        None if they agree as far as all of them remember.
    """
    placed = {rank: _by_position(records) for rank, records in histories.items()}
    known = {rank: calls for rank, calls in placed.items() if calls}
    if not known:
        return None
    first = max(min(calls) for calls in known.values())
    last = max(max(calls) for calls in known.values())
    for position in range(first, last + 1):
        calls = {rank: mine.get(position) for rank, mine in placed.items()}
        if len({None if call is None else call.key for call in calls.values()}) > 1:
            return Divergence(position, calls, _sentence(position, placed))
    return None


def _by_position(records: Iterable[CallRecord]) -> Calls:
    return {record.position: record for record in records if record.position is not None}


def _sentence(position: int, placed: Mapping[int, Calls]) -> str:
    usual = _usual_call(position, placed)
    same = [rank for rank, calls in placed.items() if position in calls and calls[position].key == usual.key]
    following = placed[same[0]].get(position + 1)
    others = ", ".join(
        _deviation(rank, usual, following, calls.get(position), calls.get(position + 1))
        for rank, calls in placed.items()
        if rank not in same
    )
    return f"{others}; {ranks_in_words(same)} called {usual}"


def _usual_call(position: int, placed: Mapping[int, Calls]) -> CallRecord:
    """The call that most ranks made; of several, that of the lowest rank."""
    present = [calls[position] for _, calls in sorted(placed.items()) if position in calls]
    most = Counter(call.key for call in present).most_common(1)[0][0]
    return next(call for call in present if call.key == most)


def _deviation(
    rank: int, usual: CallRecord, following: CallRecord | None, mine: CallRecord | None, my_next: CallRecord | None
) -> str:
    if mine is None:
        return f"rank {rank} has not come to {usual.name} #{usual.position}"
    if following is not None and mine.key == following.key and mine.key != usual.key:
        return f"rank {rank} skipped {usual.name} #{usual.position} (it called {mine})"
    if my_next is not None and my_next.key == usual.key:
        return f"rank {rank} made a call that the others did not, {mine}"
    return f"rank {rank} called {mine}"


def ranks_in_words(ranks: Sequence[int]) -> str:
    """In words: "rank 3", "ranks 0, 1, 2", or "ranks 0-16, 18-9999" where more than three follow one another.

    Args:
        ranks: ascending.
    """
    parts = [str(first) if first == last else f"{first}-{last}" for first, last in _shown(runs(ranks))]
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(parts)}"


def runs(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last of each run of neighbours: [(0, 2), (4, 4)] for 0, 1, 2, 4.

    Args:
        ranks: ascending.
    """
    found: list[tuple[int, int]] = []
    for rank in ranks:
        first = found.pop()[0] if found and found[-1][1] == rank - 1 else rank
        found.append((first, rank))
    return found


def _shown(found: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Short runs as single ranks."""
    for first, last in found:
        if last - first < _LISTED_RUN:
            yield from ((rank, rank) for rank in range(first, last + 1))
        else:
            yield first, last
