"""One rank of a soak: `soak_job.py SECONDS SEED`. Three threads issue random collectives, each on a group of its own.

Rank 0 prints a line now and then: the largest figures of all ranks, in MiB, and how many calls the threads have made.
"""

from __future__ import annotations

import ctypes
import random
import sys
import threading
import time
from pathlib import Path

import torch

from syncline import collectives as sc
from test_support.random_collectives import issue

THREADS = 3
_AGREE_EVERY = 20
_LINES = 12
_SIZES = (1, 100, 5_000, 40_000, 300_000, 2_000_000)
_COLUMNS = ("resident", "private", "shared", "in use", "free")


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _names = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_ = [(name, ctypes.c_size_t) for name in _names]


def memory_mib() -> list[float]:
    """What the system counts, and what the allocator of C has handed out, and keeps for later; see `_COLUMNS`."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    status = {words[0]: float(words[1]) / 1024 for words in lines if words[-1] == "kB"}
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = _MallInfo
    found = ask()
    heap = [(found.uordblks + found.hblkhd) / 2**20, found.fordblks / 2**20]
    return [status["VmRSS:"], status["RssAnon:"], status["RssShmem:"], *heap]


class Load(threading.Thread):
    """Issues collectives on one group until the ranks agree that the time is over."""

    def __init__(self, group: sc.ProcessGroup, seed: int, end_s: float) -> None:
        super().__init__(daemon=True)
        self._group = group
        self._draw = random.Random(seed)
        self._end_s = end_s
        self.calls = 0

    def run(self) -> None:
        """As the class says."""
        is_over = torch.zeros(1)
        while not is_over.item():
            for _ in range(_AGREE_EVERY):
                dtype = self._draw.choice((torch.float32, torch.float64, torch.bfloat16))
                issue(self._draw, self._group, torch.ones(self._draw.choice(_SIZES), dtype=dtype), works=3)
                self.calls += 1
            is_over.fill_(time.monotonic() > self._end_s)
            self._group.all_reduce(is_over, sc.ReduceOp.MAX)


def main(seconds: float, seed: int) -> None:
    """Start the threads, and measure until they are done."""
    world = sc.init_process_group("mpi", timeout=60.0)
    groups = [sc.new_group(list(range(world.size))) for _ in range(THREADS)]
    began_s = time.monotonic()
    loads = [
        Load(group, seed + number, began_s + seconds)
        for number, group in enumerate(groups)
        if isinstance(group, sc.ProcessGroup)  # every rank is a member of each
    ]
    for load in loads:
        load.start()
    if world.rank == 0:
        print(f"{'s':>5} {'calls':>8} " + " ".join(f"{column:>9}" for column in _COLUMNS), flush=True)
    for _ in range(_LINES):
        time.sleep(seconds / _LINES)
        largest = torch.tensor(memory_mib())
        world.all_reduce(largest, sc.ReduceOp.MAX)
        if world.rank == 0:
            calls = sum(load.calls for load in loads)
            figures = " ".join(f"{figure:9.0f}" for figure in largest.tolist())
            print(f"{time.monotonic() - began_s:5.0f} {calls:8} {figures}", flush=True)
    for load in loads:
        load.join()
    sc.destroy_process_group()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]))
