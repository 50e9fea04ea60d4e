"""Where the calls of several ranks diverge, and in words who did what. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..engine.call import CallRecord
from .statements import ranks_in_words

Calls = Mapping[int, CallRecord]


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
    placed = {rank: _by_position(records) for rank, records in sorted(histories.items())}
    known = {rank: calls for rank, calls in placed.items() if calls}
    if not known:
        return None
    first = max(min(calls) for calls in known.values())
    last = max(max(calls) for calls in known.values())
    for position in range(first, last + 1):
        calls = {rank: mine.get(position) for rank, mine in placed.items()}
        if len({None if call is None else call.digest for call in calls.values()}) > 1:
            return Divergence(position, calls, _sentence(position, placed))
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
    """The call that most ranks made; of several, that of the lowest rank."""
    present = [calls[position] for _, calls in sorted(placed.items()) if position in calls]
    most = Counter(call.digest for call in present).most_common(1)[0][0]
    return next(call for call in present if call.digest == most)


def _deviation(
    usual: CallRecord, following: CallRecord | None, mine: CallRecord | None, my_next: CallRecord | None
) -> tuple[str, str]:
    """What a rank did that did not make the usual call: as said of one rank, and of several."""
    place = f"{usual.name} #{usual.position}"
    if mine is None:
        return f"has not come to {place}", f"have not come to {place}"
    if following is not None and mine.digest == following.digest and mine.digest != usual.digest:
        return f"skipped {place} (it called {mine})", f"skipped {place} (they called {mine})"
    if my_next is not None and my_next.digest == usual.digest:
        return (f"made a call that the others did not, {mine}",) * 2
    return (f"called {mine}",) * 2
