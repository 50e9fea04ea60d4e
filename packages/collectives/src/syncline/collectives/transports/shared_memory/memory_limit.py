"""Find out how much memory the processes of a node can still allocate before the kernel kills one of them.

Slurm and containers put a job into a control group. If a process exceeds the limit of its control group, the kernel kills the
process (SIGKILL) without an error.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

# These bytes stay free. Otherwise the next page that any process touches would exceed the limit.
HEADROOM_BYTES = 32 << 20
_UNLIMITED = 1 << 62  # if there is no limit, version 1 of control groups writes a larger number, and version 2 writes "max"


class Limit(NamedTuple):
    """A limit on the memory of one or more processes.

    Attributes:
        identity: identifies the limit. Processes under the same limit have the same identity.
        name: the limit's name in messages.
        left_bytes: how many bytes are left until the limit, including file cache that the kernel can reclaim.
    """

    identity: tuple[int, int]
    name: str
    left_bytes: int


class Room(NamedTuple):
    """The memory that each process of a node can allocate.

    Attributes:
        each_bytes: bytes for each process, if all processes allocate the same amount.
        limit: the limit that is reached first.
        sharers: how many of the processes are under this limit.
    """

    each_bytes: int
    limit: Limit
    sharers: int


def room_for_each(limits: Sequence[Sequence[Limit]]) -> Room | None:
    """From the limits of each process of a node, return how much memory each can allocate; None if no limit is known."""
    known = [limit for own in limits for limit in own]
    sharers = Counter(identity for own in limits for identity in {limit.identity for limit in own})
    rooms = (
        Room(max(0, limit.left_bytes - HEADROOM_BYTES) // sharers[limit.identity], limit, sharers[limit.identity])
        for limit in known
    )
    return min(rooms, key=lambda room: room.each_bytes, default=None)


def memory_limits(proc: Path = Path("/proc")) -> list[Limit]:
    """Return all memory limits that this process has and can read. `proc` is the path of the proc file system."""
    available = _fields(proc / "meminfo").get("MemAvailable:")
    machine = [] if available is None else [Limit((0, 0), "the memory of the machine", available * 1024)]
    return machine + [limit for kind, folder in _groups(proc) if (limit := _limit(folder, kind)) is not None]


class _Kind(NamedTuple):
    filesystem: str
    controller: str  # as in /proc/self/cgroup
    limit: str
    usage: str
    cache: tuple[str, str]  # two numbers in memory.stat; they include the groups inside this group


_KINDS = (
    _Kind("cgroup2", "", "memory.max", "memory.current", ("inactive_file", "active_file")),
    _Kind(
        "cgroup",
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


@functools.cache
def _groups(proc: Path) -> tuple[tuple[_Kind, Path], ...]:
    # Read once, because launchers choose the group before a process starts.
    return tuple((kind, folder) for kind in _KINDS for folder in _folders(kind, proc))


def _folders(kind: _Kind, proc: Path) -> Iterator[Path]:
    own = _own_group(kind, proc)
    for line in _lines(proc / "self/mountinfo"):
        mount, _, source = line.partition(" - ")
        filesystem, _, options = (*source.split(), "", "", "")[:3]
        if own is None or filesystem != kind.filesystem or (kind.controller and kind.controller not in options.split(",")):
            continue
        root, mounted_at = mount.split()[3:5]
        # In some containers the mount does not contain the group's path. Then only the mounted folder itself is known.
        inside = own.relative_to(root) if own.is_relative_to(root) else PurePosixPath()
        folder = Path(mounted_at)
        yield folder
        for part in inside.parts:
            folder /= part
            yield folder


def _own_group(kind: _Kind, proc: Path) -> PurePosixPath | None:
    for line in _lines(proc / "self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if kind.controller in controllers.split(","):
            return PurePosixPath(path)
    return None


def _limit(folder: Path, kind: _Kind) -> Limit | None:
    try:
        most = int((folder / kind.limit).read_text())
        if most >= _UNLIMITED:
            return None
        used, status = int((folder / kind.usage).read_text()), folder.stat()
    except (OSError, ValueError):  # the top group has no such file; "max" is not a number, and means "no limit"
        return None
    statistics = _fields(folder / "memory.stat")
    # The kernel drops file cache before it kills a process.
    cached = sum(statistics.get(name, 0) for name in kind.cache)
    return Limit((status.st_dev, status.st_ino), f"the limit of {folder}", max(0, most - used + cached))


def _fields(path: Path) -> dict[str, int]:
    rows = (line.split() for line in _lines(path))
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="surrogateescape").splitlines()
    except OSError:
        # The system has no such file, or hides it. Then no limit is known from this file.
        return []
