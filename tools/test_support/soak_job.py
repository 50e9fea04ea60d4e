"""One rank of a soak: `soak_job.py SECONDS SEED`. Three threads issue random collectives, each on a group of its own.

Rank 0 regularly prints a line: the largest figures of all ranks, in MiB, and how many calls the threads have made. At the end
    the
growth is compared with the bound, which was printed at the beginning. A rank above it fails. See Note [The bound of the soak]
in `soak_memory`. Resident memory is compared only if the allocator has a fixed threshold.
"""

from __future__ import annotations

import ctypes
import math
import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from syncline import collectives as sc
from test_support import soak_memory
from test_support.random_collectives import issue

THREADS = 3
_AGREE_EVERY = 20
_LINES = 12
_SIZES = (1, 100, 5_000, 40_000, 300_000, 2_000_000)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16)
_COLUMNS = ("resident", "private", "shared", "in use", "free", "peak")
_RESIDENT, _IN_USE, _PEAK = 0, 3, 5
_LOOK_S = 0.25


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def memory_mib() -> list[float]:
    """The system's count; memory that C's allocator has handed out, and that it keeps; the system's largest; see `_COLUMNS`."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    status = {words[0]: float(words[1]) / 1024 for words in lines if words[-1] == "kB"}
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _MallInfo
    found = ask()
    heap = [(found.uordblks + found.hblkhd) / 2**20, found.fordblks / 2**20]
    return [status["VmRSS:"], status["RssAnon:"], status["RssShmem:"], *heap, status["VmHWM:"]]


class Load(threading.Thread):
    """Issues collectives on one group until the ranks agree that the time is over."""

    def __init__(self, group: sc.ProcessGroup, seed: int, end_s: float) -> None:
        super().__init__(daemon=True)
        self._group = group
        self._draw = random.Random(seed)
        self._end_s = end_s
        self.calls = 0

    def run(self) -> None:
        """Issue collectives until the end."""
        is_over = torch.zeros(1)
        while not is_over.item():
            for _ in range(_AGREE_EVERY):
                dtype = self._draw.choice(_DTYPES)
                issue(self._draw, self._group, torch.ones(self._draw.choice(_SIZES), dtype=dtype), works=3)
                self.calls += 1
            is_over.fill_(time.monotonic() > self._end_s)
            self._group.all_reduce(is_over, sc.ReduceOp.MAX)


class Memory:
    """This rank's growth of memory since the object was made."""

    def __init__(self) -> None:
        self._before = memory_mib()
        self._most_in_use = 0.0

    def look(self) -> None:
        """Look often: memory that is handed out has no high-water mark."""
        self._most_in_use = max(self._most_in_use, memory_mib()[_IN_USE])

    def growth_mib(self) -> tuple[float, float]:
        """The largest growth of resident memory, and of memory that is handed out."""
        return memory_mib()[_PEAK] - self._before[_RESIDENT], self._most_in_use - self._before[_IN_USE]


def measure(world: sc.ProcessGroup, loads: Sequence[Load], seconds: float) -> Memory:
    """Look at memory until the time is over; rank 0 prints some lines."""
    memory, began_s = Memory(), time.monotonic()
    for line in range(1, _LINES + 1):
        while time.monotonic() < began_s + line * seconds / _LINES:
            time.sleep(min(_LOOK_S, seconds / _LINES))
            memory.look()
        largest = torch.tensor(memory_mib())
        world.all_reduce(largest, sc.ReduceOp.MAX)
        if world.rank == 0:
            calls = sum(load.calls for load in loads)
            figures = " ".join(f"{figure:9.0f}" for figure in largest.tolist())
            print(f"{time.monotonic() - began_s:5.0f} {calls:8} {figures}", flush=True)
    return memory


def verdict(world: sc.ProcessGroup, memory: Memory, planned: soak_memory.Load) -> bool:
    """Whether no rank grew above the bound; rank 0 prints the figures."""
    growth = torch.tensor(memory.growth_mib(), dtype=torch.float64)
    world.all_reduce(growth, sc.ReduceOp.MAX)
    resident, in_use = growth.tolist()
    resident_bound, in_use_bound = _bounds_mib(planned)
    is_within: bool = in_use <= in_use_bound and resident <= resident_bound
    if world.rank == 0:
        print(f"largest growth: resident {resident:.0f}, in use {in_use:.0f}: {'within' if is_within else 'ABOVE'} the bound")
    return is_within


def _bounds_mib(planned: soak_memory.Load) -> tuple[float, float]:
    """Bounds for resident memory, infinite if the allocator has none, and for memory that is handed out."""
    threshold_bytes, in_use = _threshold_bytes(), sum(soak_memory.handed_out_parts(planned).values()) / 2**20
    if threshold_bytes is None:
        return math.inf, in_use
    return sum(soak_memory.resident_parts(planned, threshold_bytes).values()) / 2**20, in_use


def _threshold_bytes() -> int | None:
    """The size from which on the allocator gives freed blocks back; None if it decides itself."""
    given = {os.environ.get(name) for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")}
    return None if None in given else max(map(int, filter(None, given)))


def _print_bounds(planned: soak_memory.Load) -> None:
    threshold_bytes = _threshold_bytes()
    if threshold_bytes is None:
        print("bound of the growth: resident none, for the allocator states none")
    else:
        print(f"bound of the growth: resident {soak_memory.in_words(soak_memory.resident_parts(planned, threshold_bytes))}")
    print(f"bound of the growth: in use {soak_memory.in_words(soak_memory.handed_out_parts(planned))}")


def main(seconds: float, seed: int) -> bool:
    """Start the threads, and measure until they are done; returns whether memory stayed within the bound."""
    world = sc.init_process_group("mpi", timeout=60.0)
    groups = [sc.new_group(list(range(world.size))) for _ in range(THREADS)]
    end_s = time.monotonic() + seconds
    loads = [
        Load(group, seed + number, end_s)
        for number, group in enumerate(groups)
        if isinstance(group, sc.ProcessGroup)  # true for all: every rank is a member of each group
    ]
    largest_bytes = max(_SIZES) * max(dtype.itemsize for dtype in _DTYPES)
    planned = soak_memory.Load(world.size, THREADS, THREADS + 1, largest_bytes)
    if world.rank == 0:
        _print_bounds(planned)
        print(f"{'s':>5} {'calls':>8} " + " ".join(f"{column:>9}" for column in _COLUMNS), flush=True)
    for load in loads:
        load.start()
    memory = measure(world, loads, seconds)
    for load in loads:
        load.join()
    is_within = verdict(world, memory, planned)
    sc.destroy_process_group()
    return is_within


if __name__ == "__main__":
    sys.exit(0 if main(float(sys.argv[1]), int(sys.argv[2])) else 1)
