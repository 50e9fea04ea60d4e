"""Whether another process has ended, as far as this one can know for certain."""

from __future__ import annotations

import os
import socket
from pathlib import Path

_PROC = Path("/proc")
_ENDED_STATES = "ZXx"  # it waits for its parent to fetch its status, or is gone


def own_process() -> str:
    """This process in words that no other process has, now or later: where it runs, its number there, when it started."""
    return f"{_where()} {os.getpid()} {_started(os.getpid())}"


def has_ended(process: str) -> bool:
    """Whether the process of which `own_process` said that has ended. False also if that cannot be known here.

    It is known on Linux, for processes of the same machine and the same PID namespace. A process that is only stopped lives.
    """
    where, _, rest = process.partition(" ")
    number, _, started = rest.partition(" ")
    if where != _where() or not number.isdigit() or not started.isdigit():
        return False
    return _started(int(number)) != started


def _where() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink(_PROC / 'self/ns/pid')}"
    except OSError:
        return "unknown"


def _started(pid: int) -> str:
    """When a process started, in ticks since the machine did; empty if it has ended, or there is no /proc."""
    try:
        after_name = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if after_name[0] in _ENDED_STATES else after_name[19]
