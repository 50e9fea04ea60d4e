"""Which members of a group are lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from time import monotonic

from ..errors import RankLostError
from .process_identity import ProcessIdentity, ProcessState

LOOK_S = 0.2
"""How often the system is asked, at most."""
GRACE_S = 0.5
"""A process that has gone may have done its part of the collective that runs. That much later it would have ended."""
CAUSE_S = 1.0
"""How long a loss is looked for that would explain an error."""

#: Ranks that something else than the system's table of processes says are lost, such as a library. Must not block.
LostRanks = Callable[[], Sequence[int]]


class Liveness:
    """Looks whether the processes of a group's ranks are still there. Any thread may ask.

    It sees the processes of this node only, unless `lost_ranks` knows more. There is no lock: two threads that look at the
    same time see the same, and a loss is for ever.

    Args:
        members: for each rank of the group its process; ranks whose process is not known are left out.
        rank: this one.
        lost_ranks: what else says that ranks are lost.
    """

    def __init__(self, members: Mapping[int, ProcessIdentity], rank: int, lost_ranks: LostRanks = tuple) -> None:
        self._members = dict(members)
        self._others = {other: process for other, process in members.items() if other != rank and process.is_here()}
        self._lost_ranks = lost_ranks
        self._losses: dict[int, float] = {}
        self._next_look = 0.0

    def part(self, ranks: Sequence[int], rank: int, lost_ranks: LostRanks = tuple) -> Liveness:
        """That of a group of some of the ranks; `rank` is this one there."""
        members = {new: self._members[old] for new, old in enumerate(ranks) if old in self._members}
        return Liveness(members, rank, lost_ranks)

    def lost(self) -> tuple[int, ...]:
        """The ranks that are lost, ascending. Asks the system not more often than every `LOOK_S` seconds."""
        now = monotonic()
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self._look(now)
        return tuple(sorted(self._losses))

    def reason_to_give_up(self) -> RankLostError | None:
        """Why a collective that has not ended yet never will; None if it may."""
        lost = self.lost()
        if not lost or min(self._losses.values()) > monotonic() - GRACE_S:
            return None
        return self.error(lost)

    def transfer_reason_to_give_up(self, peers: Sequence[int]) -> RankLostError | None:
        """The same for a transfer with one of these ranks."""
        latest = monotonic() - GRACE_S
        lost = [rank for rank in self.lost() if rank in peers and self._losses[rank] <= latest]
        return self.error(lost) if lost and len(lost) == len(peers) else None

    def loss_behind(self, error: Exception) -> RankLostError | None:
        """The loss of a rank that is the cause of an error of the transport; None if there is none. Blocks for `CAUSE_S`.

        A connection breaks, or a library reports an error, a little earlier than the process that is the cause is gone.
        """
        if isinstance(error, RankLostError):
            return None
        end = monotonic() + CAUSE_S
        while not (lost := self.lost()) and monotonic() < end:
            time.sleep(LOOK_S / 4)
            self._next_look = 0.0
        return self.error(lost) if lost else None

    def error(self, lost: Sequence[int]) -> RankLostError:
        """What to raise for these ranks."""
        return RankLostError(
            f"{self.in_words(lost)} ended, or cannot be reached any more. Look there for what ended it: its own last message, "
            "the system's log (out of memory?), the launcher",
            lost,
        )

    def stopped(self) -> tuple[int, ...]:
        """The ranks of this node whose process is stopped: by a signal, a debugger or the batch system."""
        return tuple(rank for rank, process in self._others.items() if process.state() is ProcessState.STOPPED)

    def in_words(self, ranks: Sequence[int]) -> str:
        """Ranks with their processes."""
        known = [f"{rank} ({self._members[rank]})" if rank in self._members else str(rank) for rank in ranks]
        return f"rank(s) {', '.join(known)}"

    def _look(self, now: float) -> None:
        for rank, process in self._others.items():
            if rank not in self._losses and process.state() is ProcessState.GONE:
                self._losses[rank] = now
        for rank in self._lost_ranks():
            self._losses.setdefault(rank, now)
