"""Limits on memory, from files like the kernel's."""

from __future__ import annotations

from pathlib import Path

import pytest

from syncline.collectives.transports.shared_memory import memory_limit
from syncline.collectives.transports.shared_memory.memory_limit import HEADROOM_BYTES, Limit, Room, memory_limits, room_for_each

MIB = 2**20
UNLIMITED = 9223372036854771712


class Kernel:
    """A /proc, and the folders of control groups."""

    def __init__(self, folder: Path) -> None:
        self.proc = folder / "proc"
        self.groups = folder / "groups"
        self.write(self.proc / "meminfo", "MemTotal:  4096 kB\nMemAvailable:    1024 kB\nHugePages_Total:       0\n")

    def write(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def mounted(self, filesystem: str, root: str, options: str, own: str) -> None:
        self.write(
            self.proc / "self/mountinfo",
            "24 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw\n"
            f"35 24 0:32 {root} {self.groups} rw,relatime shared:9 master:2 - {filesystem} {filesystem} {options}\n",
        )
        self.write(self.proc / "self/cgroup", own)

    def second(self, group: str, limit: object, used: int, cached: int = 0) -> None:
        """A control group of the second version."""
        self.write(self.groups / group / "memory.max", f"{limit}\n")
        self.write(self.groups / group / "memory.current", f"{used}\n")
        self.write(self.groups / group / "memory.stat", f"anon 5\ninactive_file {cached - 1}\nactive_file 1\nshmem 7\n")

    def first(self, group: str, limit: object, used: int, cached: int = 0) -> None:
        """A control group of the first version."""
        self.write(self.groups / group / "memory.limit_in_bytes", f"{limit}\n")
        self.write(self.groups / group / "memory.usage_in_bytes", f"{used}\n")
        counted = f"inactive_file 3\nactive_file 3\ntotal_inactive_file {cached - 1}\ntotal_active_file 1\n"
        self.write(self.groups / group / "memory.stat", counted)

    def limits(self) -> dict[str, int]:
        found = memory_limits(self.proc)
        assert len({limit.identity for limit in found}) == len(found)
        return {limit.name.removeprefix(f"the limit of {self.groups}"): limit.left_bytes for limit in found}


@pytest.fixture
def kernel(tmp_path: Path) -> Kernel:
    return Kernel(tmp_path)


MACHINE = {"the memory of the machine": MIB}


def test_the_machine_alone(kernel: Kernel) -> None:
    assert kernel.limits() == MACHINE


def test_nothing_can_be_read(tmp_path: Path) -> None:
    assert memory_limits(tmp_path) == []
    assert room_for_each([[], []]) is None


def test_the_second_version_with_all_groups_around(kernel: Kernel) -> None:
    """The limit is above; the cache of files can be had back; the root of the tree has no limit."""
    kernel.mounted("cgroup2", "/", "rw,nsdelegate", "0::/slurm/job_7/step_0\n")
    kernel.second("slurm/job_7", 100, 70, cached=20)
    kernel.second("slurm/job_7/step_0", "max", 60)
    kernel.second("slurm/job_8", 1, 1)
    assert kernel.limits() == MACHINE | {"/slurm/job_7": 50}


def test_the_first_version(kernel: Kernel) -> None:
    kernel.mounted("cgroup", "/", "rw,memory", "9:name=systemd:/x\n4:cpu,memory:/slurm/job_7\n0::/\n")
    kernel.first("", UNLIMITED, 5)
    kernel.first("slurm", 1000, 990, cached=5)
    kernel.first("slurm/job_7", 100, 70, cached=20)
    assert kernel.limits() == MACHINE | {"/slurm": 15, "/slurm/job_7": 50}


@pytest.mark.parametrize("own", ["/docker/12/jobs", "/elsewhere"])
def test_a_container_sees_a_part_of_the_tree(kernel: Kernel, own: str) -> None:
    """What is mounted begins at the container's group; a path that is not in there cannot be followed."""
    kernel.mounted("cgroup", "/docker/12", "rw,memory", f"4:memory:{own}\n")
    kernel.first("", 100, 30, cached=10)
    kernel.first("jobs", 50, 30, cached=10)
    kernel.first("elsewhere", 10, 10)
    assert kernel.limits() == MACHINE | ({"": 80, "/jobs": 30} if own == "/docker/12/jobs" else {"": 80})


def test_another_controller_of_the_first_version_has_no_say(kernel: Kernel) -> None:
    kernel.mounted("cgroup", "/", "rw,cpu", "4:memory:/\n3:cpu:/\n")
    kernel.first("", 100, 30)
    assert kernel.limits() == MACHINE


def test_more_is_used_than_allowed(kernel: Kernel) -> None:
    kernel.mounted("cgroup2", "/", "rw", "0::/a\n")
    kernel.second("a", 100, 130, cached=10)
    assert kernel.limits() == MACHINE | {"/a": 0}


def limit(identity: int, left_mib: int) -> Limit:
    return Limit((1, identity), f"limit {identity}", left_mib * MIB)


HEADROOM_MIB = HEADROOM_BYTES // MIB


@pytest.mark.parametrize(
    ("limits", "each_mib", "name", "sharers"),
    [
        ([[limit(0, HEADROOM_MIB + 100)]], 100, "limit 0", 1),
        ([[limit(0, HEADROOM_MIB + 100)]] * 4, 25, "limit 0", 4),
        ([[limit(0, HEADROOM_MIB - 1)]] * 2, 0, "limit 0", 2),
        # The machine has 100 for two, but the second's own container only 30.
        ([[limit(0, HEADROOM_MIB + 100)], [limit(0, HEADROOM_MIB + 100), limit(1, HEADROOM_MIB + 30)]], 30, "limit 1", 1),
        # Each in a container of its own: that two together want more than one may have is no matter.
        ([[limit(1, HEADROOM_MIB + 60)], [limit(2, HEADROOM_MIB + 70)]], 60, "limit 1", 1),
        # Mounted twice, it is one limit for one process.
        ([[limit(0, HEADROOM_MIB + 100)] * 2] * 2, 50, "limit 0", 2),
        # Read at different times.
        ([[limit(0, HEADROOM_MIB + 100)], [limit(0, HEADROOM_MIB + 90)]], 45, "limit 0", 2),
    ],
)
def test_room_for_each(limits: list[list[Limit]], each_mib: int, name: str, sharers: int) -> None:
    room = room_for_each(limits)
    assert room is not None
    assert (room.each_bytes, room.limit.name, room.sharers) == (each_mib * MIB, name, sharers)


def test_this_machine_has_memory_left() -> None:
    room = room_for_each([memory_limits()])
    assert isinstance(room, Room)
    assert room.each_bytes > 0
    assert memory_limit.HEADROOM_BYTES > 0
