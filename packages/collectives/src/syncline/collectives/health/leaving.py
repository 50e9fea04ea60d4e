"""Find calls that will never end, because they wait for ranks that have left the job.

Note [Who will not come]
~~~~~~~~~~~~~~~~~~~~~~~~
A rank that leaves the job sends a notice (`Leaving`) to the other ranks. The notice says how many collectives of each group
the rank has started. All ranks run the collectives of a group in the same order. So if a member has started fewer than k
collectives and leaves, collective k of the group never ends. Earlier collectives still finish, because the member waits in a
barrier before it exits, and its library goes on working meanwhile.

Sends and receives have no place in this order. If a rank waits for a message from a rank that has left, it waits 2 more
seconds after the notice, then raises an error.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Protocol
from zlib import crc32

from ..engine.living_set import LivingSet
from ..errors import RankLostError, with_details
from .recorder import CallCount

TRANSFER_GRACE_S = 2.0


class OpenGroup(Protocol):
    """A group that this process closes before MPI ends, if the program has not closed it."""

    def close(self) -> None:
        """See `ProcessGroup.close`."""


@dataclass(frozen=True)
class Leaving:
    """The message with which a rank tells the other ranks that it leaves the job.

    Attributes:
        rank: the rank that leaves, as a rank of the job.
        started: how many collectives the rank has started in each of its groups, by the group's key.
    """

    rank: int
    started: Mapping[str, int]


def absentees(notices: Iterable[Leaving], group: str, number: int, members: Sequence[int]) -> list[int]:
    """Return the ranks that will never start collective `number` of a group. Numbers begin at 1. A pure function."""
    return sorted(left.rank for left in notices if left.rank in members and left.started.get(group, 0) < number)


class Leavers:
    """Collects the notices (`Leaving`) of ranks that have left the job, and makes this rank's own notice.

    Args:
        receive: returns the notices that have arrived since its last call, without waiting. Any thread may call `receive`.
    """

    def __init__(self, receive: Callable[[], Iterable[Leaving]]) -> None:
        self._receive = receive
        self._lock = threading.Lock()
        self._left: dict[int, tuple[Leaving, float]] = {}
        self._groups: dict[str, GroupLeavers] = {}
        self._made_by = LivingSet[OpenGroup]()
        self._made: Counter[str] = Counter()

    def group(self, name: str, ranks: Sequence[int], *, is_part: bool = False) -> GroupLeavers:
        """Return an object that counts the calls of a new group.

        The group gets a key, which is the same on all members. Members must make groups with equal names in the same order.
        """
        same = f"{name}/{crc32(repr(list(ranks)).encode()):08x}"
        with self._lock:
            # A program may make several groups of one name and the same ranks; the count tells them apart.
            key = f"{same}/{self._made[same]}"
            self._made[same] += 1
            # The key stays after this rank has closed the group: another member may still be in the last collective.
            calls = self._groups[key] = GroupLeavers(self, key, ranks, is_part=is_part)
        return calls

    def forget(self, key: str) -> None:
        """Drop the group with this key: this rank's notice will not contain the group."""
        with self._lock:
            self._groups.pop(key, None)

    def own(self) -> dict[str, int]:
        """Return the content of this rank's own notice: for each group key, how many collectives this rank has started."""
        with self._lock:
            return {key: calls.count.begun for key, calls in self._groups.items()}

    def has_open_group(self) -> bool:
        """Whether a group is still open. Groups that were made from another group are ignored."""
        with self._lock:
            return any(not (calls.is_part or calls.is_closed) for calls in self._groups.values())

    def add(self, group: OpenGroup) -> None:
        """Add a group whose calls this object counts. This object keeps only a weak reference to the group."""
        self._made_by.add(group)

    def open_groups(self) -> list[OpenGroup]:
        """Return the groups that were passed to `add` and still exist, the newest first."""
        return list(self._made_by)[::-1]

    def left(self) -> dict[int, tuple[Leaving, float]]:
        """Return, for each rank that has left, the notice and the time of its arrival (monotonic clock)."""
        with self._lock:
            for notice in self._receive():
                self._left[notice.rank] = notice, monotonic()
            return dict(self._left)


class GroupLeavers:
    """Counts the collectives that this rank has started in one group, and finds calls that will never finish.

    Attributes:
        count: the count of started collectives.
        is_part: whether the group was made from another group.
        is_closed: whether the group was closed properly.
    """

    def __init__(self, leavers: Leavers, key: str, ranks: Sequence[int], *, is_part: bool) -> None:
        self.count = CallCount()
        self.is_part = is_part
        self.is_closed = False
        self._leavers = leavers
        self._key = key
        self._ranks = tuple(ranks)

    def belong_to(self, group: OpenGroup) -> None:
        """Set the group whose calls are counted."""
        self._leavers.add(group)

    def part(self, name: str, members: Sequence[int]) -> GroupLeavers:
        """Return the `GroupLeavers` of a new group of some members of this group. `members` are ranks in this group."""
        ranks = [self._ranks[member] for member in members]
        return self._leavers.group(f"{self._key}/{name}", ranks, is_part=True)

    def forget(self) -> None:
        """Drop the group's count. Call this method when all members close the group, so that no member is in a collective."""
        self._leavers.forget(self._key)

    def reason_to_give_up(self) -> RankLostError | None:
        """Return an error if the collective that this rank started last will never finish, else None."""
        left = [notice for notice, _ in self._leavers.left().values()]
        return self._error(absentees(left, self._key, self.count.begun, self._ranks))

    def transfer_reason_to_give_up(self, peers: Sequence[int]) -> RankLostError | None:
        """Return an error if a transfer with `peers` will never finish, because all of them have left; else None."""
        left = self._leavers.left()
        latest = monotonic() - TRANSFER_GRACE_S
        # A message may arrive shortly after the notice, so only notices that are old enough count.
        gone = [self._ranks[peer] for peer in peers if self._ranks[peer] in left and left[self._ranks[peer]][1] < latest]
        # For a receive from any rank, one remaining peer is enough to go on.
        return self._error(gone) if len(gone) == len(peers) else None

    def _error(self, gone: Sequence[int]) -> RankLostError | None:
        if not gone:
            return None
        return RankLostError(
            with_details(
                f"rank(s) {', '.join(map(str, gone))} of the job left without taking part; let every rank issue the same calls",
                "Did the script return or exit early there, or take another branch?",
            ),
            [self._ranks.index(rank) for rank in gone],
        )
