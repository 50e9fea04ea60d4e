"""Which members of a group are lost; a process, as others of its node find it again; and the run that it is a rank of."""

from __future__ import annotations

import enum
import functools
import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic

from ..errors import RankLostError, with_details

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class ProcessState(enum.Enum):
    """What the system says of a process."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"


# The letters of /proc/PID/stat. Zombies and the dead have no memory and no connections any more.
_GONE = frozenset("ZXx")
_STOPPED = frozenset("Tt")


@dataclass(frozen=True)
class ProcessIdentity:
    """A process that other processes of its node can find again.

    Attributes:
        node: the same for all processes that see one another's numbers: one host name, one boot of a kernel, one PID namespace.
        host: its name, for messages.
        pid: its number.
        started: when it started, in the kernel's clock ticks; another process that is given the number later differs in it.
    """

    node: str
    host: str
    pid: int
    started: int

    def is_here(self) -> bool:
        """Whether this process sees that one's number."""
        return self.node == _own_node()

    def state(self) -> ProcessState | None:
        """What the system says of it; None where this process cannot know: on another node."""
        if not self.is_here():
            return None
        found = _stat(self.pid)
        if found is None or found[1] != self.started or found[0] in _GONE:
            return ProcessState.GONE
        return ProcessState.STOPPED if found[0] in _STOPPED else ProcessState.RUNNING

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def to_text(self) -> str:
        """One line that `parse` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity | None:
        """The process of which `to_text` said that; None if the text is anything else."""
        try:
            said = json.loads(text)
            return cls(str(said["node"]), str(said["host"]), int(said["pid"]), int(said["started"]))
        except (KeyError, TypeError, ValueError):
            return None


def has_ended(process: ProcessIdentity | None) -> bool:
    """Whether a process has certainly ended. False if that cannot be known here, and of a process that is only stopped."""
    return process is not None and process.state() is ProcessState.GONE


def own_identity() -> ProcessIdentity | None:
    """That of this process; None where the system does not tell (not Linux, or no /proc)."""
    found, node = _stat(os.getpid()), _own_node()
    return None if found is None or not node else ProcessIdentity(node, socket.gethostname(), os.getpid(), found[1])


@functools.cache
def _own_node() -> str:
    try:
        return f"{socket.gethostname()}/{_BOOT_ID.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """A process's state and when it started; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold blanks, brackets and bytes that are no text
    return fields[0], int(fields[19])


@dataclass(frozen=True)
class Run:
    """The run that this process is a rank of.

    Attributes:
        name: alike on all ranks, another one in each run.
        rank: this one.
        size: of the first group.
        pid: of the process; a fork is no rank.
    """

    name: str
    rank: int
    size: int
    pid: int

    def who(self) -> str:
        """This rank, as messages call it."""
        return f"rank {self.rank} of {self.size} (host {socket.gethostname()}, pid {self.pid})"


_run: Run | None = None


def note_run(name: str, rank: int, size: int) -> None:
    """A group has started. The first one of several ranks names the run; it is that of all ranks, later ones may be of some."""
    global _run
    if size > 1 and current_run() is None:
        _run = Run(name, rank, size, os.getpid())


def current_run() -> Run | None:
    """The run that this process is a rank of, if a group of several ranks has started in it."""
    return _run if _run is not None and _run.pid == os.getpid() else None


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
            with_details(
                f"{self.in_words(lost)} ended, or cannot be reached any more; look there for what ended it",
                "Its own last message, the system's log (out of memory?) or the launcher may say why.",
            ),
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
