"""Which process of which node a rank is, and whether that process still runs."""

from __future__ import annotations

import enum
import functools
import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

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
