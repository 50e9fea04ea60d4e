"""Ranks that have left the job, and the calls that wait for them and will never end.

Note [Who will not come]
~~~~~~~~~~~~~~~~~~~~~~~~
A rank that leaves the job tells the others how many collectives of each group it has started. The collectives of a group run
in one total order, the same on every rank. So collective k of a group never ends on a rank if a member of the group left
after it had started fewer than k.
A collective that the leaver did start still finishes: the leaver stays in an exit barrier and lets its
library work. A rank that waits for nobody is never disturbed, however long it computes or saves after the others have left.

Sends and receives have no place in that order. There, `TRANSFER_GRACE_S` seconds after the notice of a rank has come, the other
ranks assume that everything which it sent has arrived.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol
from zlib import crc32

from ..errors import RankLostError, with_details
from .recorder import CallCount

TRANSFER_GRACE_S = 2.0


class OpenGroup(Protocol):
    """A group, as the end of MPI sees it."""

    def close(self) -> None:
        """As `ProcessGroup.close`."""


@dataclass(frozen=True)
class Leaving:
    """One rank's notice that it has left.

    Attributes:
        rank: of the job.
        started: for each of its groups, how many collectives it started there.
    """

    rank: int
    started: Mapping[str, int]


def absentees(notices: Iterable[Leaving], group: str, number: int, members: Sequence[int]) -> list[int]:
    """Who will never come to collective `number` (from 1) of a group: a pure function of the notices so far."""
    return sorted(left.rank for left in notices if left.rank in members and left.started.get(group, 0) < number)


class Leavers:
    """The notices that came so far, and what this rank's own will say.

    Args:
        receive: returns the notices that have come since it was called last, without waiting. Any thread may call it.
    """

    def __init__(self, receive: Callable[[], Iterable[Leaving]]) -> None:
        self._receive = receive
        self._lock = threading.Lock()
        self._left: dict[int, tuple[Leaving, float]] = {}
        self._groups: dict[str, GroupLeavers] = {}
        self._made_by: list[weakref.ref[OpenGroup]] = []
        self._made: Counter[str] = Counter()

    def group(self, name: str, ranks: Sequence[int], *, is_part: bool = False) -> GroupLeavers:
        """Count the calls of a new group. All members make their groups of one name in the same order.

        A group's key is the same on all its members, whatever other groups each of them has made. It is kept when the group is
        closed: another member may still be in the last collective, and the notice must say that this rank has started it.
        """
        same = f"{name}/{crc32(repr(list(ranks)).encode()):08x}"
        with self._lock:
            key = f"{same}/{self._made[same]}"
            self._made[same] += 1
            calls = self._groups[key] = GroupLeavers(self, key, ranks, is_part=is_part)
        return calls

    def own(self) -> dict[str, int]:
        """How many collectives of each group this rank has started."""
        with self._lock:
            return {key: calls.count.begun for key, calls in self._groups.items()}

    def has_open_group(self) -> bool:
        """Whether a group that was connected (not made of another) was never closed in order."""
        with self._lock:
            return any(not (calls.is_part or calls.is_closed) for calls in self._groups.values())

    def add(self, group: OpenGroup) -> None:
        """A group whose calls are counted here."""
        self._made_by = [made for made in self._made_by if made() is not None]
        self._made_by.append(weakref.ref(group))

    def open_groups(self) -> list[OpenGroup]:
        """The groups that somebody holds, the latest one first."""
        return [group for made in reversed(self._made_by) if (group := made()) is not None]

    def left(self) -> dict[int, tuple[Leaving, float]]:
        """For each rank that has left: its notice, and when it came (on the monotonic clock)."""
        with self._lock:
            for notice in self._receive():
                self._left[notice.rank] = notice, monotonic()
            return dict(self._left)


class GroupLeavers:
    """How many collectives of one group this rank has started, and why the one that runs will not finish.

    Attributes:
        count: of those that this rank has started.
        is_part: whether the group was made of another.
        is_closed: whether it was closed in order.
    """

    def __init__(self, leavers: Leavers, key: str, ranks: Sequence[int], *, is_part: bool) -> None:
        self.count = CallCount()
        self.is_part = is_part
        self.is_closed = False
        self._leavers = leavers
        self._key = key
        self._ranks = tuple(ranks)

    def belong_to(self, group: OpenGroup) -> None:
        """The group whose calls these are."""
        self._leavers.add(group)

    def part(self, name: str, members: Sequence[int]) -> GroupLeavers:
        """The same for a group of some members of this one, by their ranks in it."""
        ranks = [self._ranks[member] for member in members]
        return self._leavers.group(f"{self._key}/{name}", ranks, is_part=True)

    def reason_to_give_up(self) -> RankLostError | None:
        """Why the collective that this rank started last will not finish; None if it may."""
        left = [notice for notice, _ in self._leavers.left().values()]
        return self._error(absentees(left, self._key, self.count.begun, self._ranks))

    def transfer_reason_to_give_up(self, peers: Sequence[int]) -> RankLostError | None:
        """The same for a transfer with one of these ranks of the group."""
        left = self._leavers.left()
        latest = monotonic() - TRANSFER_GRACE_S
        gone = [self._ranks[peer] for peer in peers if self._ranks[peer] in left and left[self._ranks[peer]][1] < latest]
        return self._error(gone) if len(gone) == len(peers) else None

    def _error(self, gone: Sequence[int]) -> RankLostError | None:
        """What to raise when these ranks of the job have left."""
        if not gone:
            return None
        return RankLostError(
            with_details(
                f"rank(s) {', '.join(map(str, gone))} of the job left without taking part; let every rank issue the same calls",
                "Did the script return or exit early there, or take another branch?",
            ),
            [self._ranks.index(rank) for rank in gone],
        )
