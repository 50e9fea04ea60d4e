"""How many cores other programs used during a measurement, and how many were idle; Linux."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessorTimes:
    """Times at one moment, in seconds.

    Attributes:
        passed_s: the clock.
        all_s: processor time of all processes on the machine.
        own_s: processor time of the processes that this one has started and waited for, and of their children.
    """

    passed_s: float
    all_s: float
    own_s: float

    @classmethod
    def now(cls) -> ProcessorTimes:
        """Read from the kernel."""
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        ticks = computed_ticks(Path("/proc/stat").read_text())
        return cls(time.monotonic(), ticks / os.sysconf("SC_CLK_TCK"), children.ru_utime + children.ru_stime)


def idle_s() -> float:
    """Seconds for which this machine's cores have been idle since its start, all together; to a hundredth."""
    return idle_ticks(Path("/proc/stat").read_text()) / os.sysconf("SC_CLK_TCK")


def idle_ticks(stat: str) -> int:
    """Idle time and wait for disks, from the first line of /proc/stat."""
    return sum(map(int, stat.split("\n", 1)[0].split()[4:6]))


def computed_ticks(stat: str) -> int:
    """User, nice and system time, from the first line of /proc/stat; without interrupts, which the benchmark's wires cause."""
    return sum(map(int, stat.split("\n", 1)[0].split()[1:4]))


def cores_of_others(before: ProcessorTimes, after: ProcessorTimes) -> float:
    """How many cores were busy, on average, with processes that this one has not started. A pure function."""
    others_s = (after.all_s - before.all_s) - (after.own_s - before.own_s)
    return max(0.0, others_s / (after.passed_s - before.passed_s))


def told(cores: Sequence[float]) -> str:
    """In words."""
    return f"other programs kept {min(cores):.1f} to {max(cores):.1f} cores busy meanwhile"
