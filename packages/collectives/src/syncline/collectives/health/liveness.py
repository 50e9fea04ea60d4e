"""Find out which members of a group are lost. The module also identifies processes, and stores the current run."""

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
    """The state of a process, as the operating system reports it."""

    RUNNING = "running"
    STOPPED = "stopped"
    GONE = "gone"


# Letters of the state in /proc/PID/stat. Zombies and dead processes have no memory and no connections any more.
_GONE = frozenset("ZXx")
_STOPPED = frozenset("Tt")


@dataclass(frozen=True)
class ProcessIdentity:
    """Identifies a process, so that other processes of the same node can find out whether it still runs.

    Attributes:
        node: the host name, the kernel's boot id and the PID namespace as one text. Processes with the same text can see each
            other's process id.
        host: the host's name, for error messages.
        pid: the process id.
        started: the start time in the kernel's clock ticks. Another process that gets the same id has another start time.
    """

    node: str
    host: str
    pid: int
    started: int

    def is_here(self) -> bool:
        """Whether the identified process is on the same node and in the same PID namespace as the calling process."""
        return self.node == _own_node()

    def state(self) -> ProcessState | None:
        """Return the state of the process. None if the state is not known, for example if the process is on another node."""
        # The process id means nothing on another node, where it may belong to another process.
        if not self.is_here():
            return None
        try:
            found = _stat(self.pid)
        # This process cannot look, for example because it has no file descriptor left. The other process may still run.
        except OSError:
            return None
        # The process is gone or a zombie, or another process got the same id later.
        if found is None or found[1] != self.started or found[0] in _GONE:
            return ProcessState.GONE
        return ProcessState.STOPPED if found[0] in _STOPPED else ProcessState.RUNNING

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host}"

    def to_text(self) -> str:
        """Return the identity as one line of text, which `parse` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> ProcessIdentity | None:
        """Read a text from `to_text`. Return None for any other text."""
        try:
            said = json.loads(text)
            return cls(str(said["node"]), str(said["host"]), int(said["pid"]), int(said["started"]))
        # The text comes from another rank or a file, so it may be anything.
        except (KeyError, TypeError, ValueError):
            return None


def has_ended(process: ProcessIdentity | None) -> bool:
    """Whether the process has certainly ended. False if the process is stopped or unknown."""
    return process is not None and process.state() is ProcessState.GONE


def own_identity() -> ProcessIdentity | None:
    """Return the identity of this process. None if there is no /proc, or if /proc belongs to another PID namespace."""
    try:
        found, node = _stat(os.getpid()), _own_node()
    except OSError:
        return None
    return None if found is None or not node else ProcessIdentity(node, socket.gethostname(), os.getpid(), found[1])


@functools.cache
def _own_node() -> str:
    """Return the text for `ProcessIdentity.node`, or "" if this process cannot look at processes."""
    try:
        # In a new PID namespace without a /proc of its own, /proc shows other processes under the numbers of this namespace.
        if os.readlink("/proc/self") != str(os.getpid()):
            return ""
        return f"{socket.gethostname()}/{_BOOT_ID.read_text().strip()}/{os.readlink('/proc/self/ns/pid')}"
    # The system is not Linux, or has no /proc.
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """Return the state and the start time of a process; None if the process has ended, or if there is no /proc.

    Raises:
        OSError: the file could not be read for another reason.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the process name before may contain blanks, brackets and other bytes
    return fields[0], int(fields[19])


@dataclass(frozen=True)
class Run:
    """The current run of the job, and this process's rank in the run.

    `size` is the number of ranks in the first group. `pid` is the rank's process id; a forked child has another process id.
    """

    name: str
    rank: int
    size: int
    pid: int

    def who(self) -> str:
        """Describe this rank for messages to the user, with its host and process id."""
        return rank_here(self.rank, self.size, self.pid)


def rank_here(rank: int, size: int, pid: int) -> str:
    """Describe this process as a rank, for messages that it prints: "rank 1 of 4 (host node7, pid 4242)"."""
    return f"rank {rank} of {size} (host {socket.gethostname()}, pid {pid})"


_run: Run | None = None


def note_run(name: str, rank: int, size: int) -> None:
    """Set the run of this process. Each group calls this function when it starts.

    Only the first group with more than one rank has an effect, because this group contains all ranks of the job.
    """
    global _run
    if size > 1 and current_run() is None:
        _run = Run(name, rank, size, os.getpid())


def current_run() -> Run | None:
    """Return the run of this process. None in a forked child, or if no group with two or more ranks has started."""
    # A forked child has the parent's value, but is not the rank.
    return _run if _run is not None and _run.pid == os.getpid() else None


LOOK_S = 0.2
"""The shortest time between two looks at the states of processes, in seconds."""
GRACE_S = 0.5
"""Seconds that a collective gets to end after a member is gone, because the member may have done its part before its end."""
CAUSE_S = 1.0
"""How long to look for a loss that would explain an error, in seconds."""

#: Returns ranks that are lost according to another source than the system's processes, such as a library. Must not block.
LostRanks = Callable[[], Sequence[int]]


class Liveness:
    """Finds out whether the processes of a group's ranks still exist. Any thread may call the methods.

    Args:
        members: the known processes of the ranks. This object can look only at processes of this node.
        rank: this rank.
        lost_ranks: returns ranks that another source, such as the library, reports as lost. The function must not block.
    """

    def __init__(self, members: Mapping[int, ProcessIdentity], rank: int, lost_ranks: LostRanks = tuple) -> None:
        self._members = dict(members)
        self._others = {other: process for other, process in members.items() if other != rank and process.is_here()}
        self._lost_ranks = lost_ranks
        self._losses: dict[int, float] = {}
        self._next_look = 0.0

    def part(self, ranks: Sequence[int], rank: int, lost_ranks: LostRanks = tuple) -> Liveness:
        """Return the `Liveness` of a group of some of the ranks. `rank` is this process's rank in the new group."""
        members = {new: self._members[old] for new, old in enumerate(ranks) if old in self._members}
        return Liveness(members, rank, lost_ranks)

    def lost(self) -> tuple[int, ...]:
        """Return the lost ranks, in ascending order. Look at the processes at most every 0.2 seconds."""
        now = monotonic()
        # Every waiting thread asks often, and each question reads a file for each process.
        if now >= self._next_look:
            self._next_look = now + LOOK_S
            self._look(now)
        return tuple(sorted(self._losses))

    def reason_to_give_up(self) -> RankLostError | None:
        """Return an error if a running collective will never end, because a rank is lost; else None."""
        lost = self.lost()
        # Too early: the lost rank may have sent its part before it ended, and the collective may still finish.
        if not lost or min(self._losses.values()) > monotonic() - GRACE_S:
            return None
        return self.error(lost)

    def transfer_reason_to_give_up(self, peers: Sequence[int]) -> RankLostError | None:
        """Return an error if a transfer with `peers` will never end, because all of them are lost; else None."""
        latest = monotonic() - GRACE_S
        lost = [rank for rank in self.lost() if rank in peers and self._losses[rank] <= latest]
        # A receive from any rank goes on while one of the possible senders is left.
        return self.error(lost) if lost and len(lost) == len(peers) else None

    def loss_behind(self, error: Exception) -> RankLostError | None:
        """Return an error that names the lost rank behind `error`, an error of the transport. Wait at most one second.

        None if no rank is lost, or if `error` already is a `RankLostError`.
        """
        # The transport has already found the lost rank.
        if isinstance(error, RankLostError):
            return None
        end = monotonic() + CAUSE_S
        while not (lost := self.lost()) and monotonic() < end:
            time.sleep(LOOK_S / 4)
            # Look again although `LOOK_S` is not over.
            self._next_look = 0.0
        return self.error(lost) if lost else None

    def error(self, lost: Sequence[int]) -> RankLostError:
        """Return the error for these lost ranks."""
        return RankLostError(
            with_details(
                f"{self.in_words(lost)} ended, or cannot be reached any more; look there for what ended it",
                "Its own last message, the system's log (out of memory?) or the launcher may say why.",
            ),
            lost,
        )

    def stopped(self) -> tuple[int, ...]:
        """Return the ranks of this node whose process a signal, a debugger or the batch system has stopped."""
        return tuple(rank for rank, process in self._others.items() if process.state() is ProcessState.STOPPED)

    def in_words(self, ranks: Sequence[int]) -> str:
        """Return a text with these ranks and their processes."""
        known = [f"{rank} ({self._members[rank]})" if rank in self._members else str(rank) for rank in ranks]
        return f"rank(s) {', '.join(known)}"

    def _look(self, now: float) -> None:
        # No lock is needed: a lost rank never comes back, so two threads that look at the same time find the same ranks.
        for rank, process in self._others.items():
            if rank not in self._losses and process.state() is ProcessState.GONE:
                self._losses[rank] = now
        # The library may know of lost ranks on other nodes. This process cannot see the processes of other nodes.
        for rank in self._lost_ranks():
            self._losses.setdefault(rank, now)
