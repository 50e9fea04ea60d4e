"""The additional cost of torch.distributed's functions: `torch.distributed.all_reduce` and our `all_reduce`, side by side.

    PYTHONPATH=tools mpiexec -n 2 python -m benchmarks.torch_backend [--rounds 2000] [--json PATH]

Both run over backend "mpi", and take turns call by call, so that disturbances of the machine hit both alike. It prints the
medians of a call with their quartiles, and the difference of the medians, in microseconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import syncline.collectives.torch_backend  # noqa: F401 - registers
from syncline.collectives import as_process_group, destroy_process_group, init_process_group

from .timing import order_of_round

WARM_UP = 200
NUMELS = (1, 256, 16_384)


def contenders(numel: int) -> dict[str, Callable[[], object]]:
    """One call of each contender, on its own group and tensor."""
    group = init_process_group("mpi")
    theirs, mine, below = torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)
    under = as_process_group(dist.distributed_c10d._get_default_group())
    return {
        "ours": lambda: group.all_reduce(mine),
        "ours, as torch's": lambda: under.all_reduce(below),
        "torch.distributed": lambda: dist.all_reduce(theirs),
        "ours, waited for": lambda: group.all_reduce(mine, async_op=True).wait(),
        "torch.distributed, waited for": lambda: dist.all_reduce(theirs, async_op=True).wait(),
    }


def measure(numel: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each call of each contender."""
    calls = contenders(numel)
    taken_us: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(WARM_UP + rounds):
        for name in order_of_round(turn, calls):
            start = time.perf_counter()
            calls[name]()
            if turn >= WARM_UP:
                taken_us[name].append(1e6 * (time.perf_counter() - start))
    destroy_process_group()
    return taken_us


def row(numel: int, taken_us: dict[str, list[float]]) -> dict[str, object]:
    """Medians and quartiles, and the additional time of torch's functions."""
    medians = {name: statistics.median(values) for name, values in taken_us.items()}
    return {
        "numel": numel,
        "quartiles_us": {name: [round(q, 1) for q in statistics.quantiles(values, n=4)] for name, values in taken_us.items()},
        "added_us": round(medians["torch.distributed"] - medians["ours"], 1),
        "added_waited_for_us": round(medians["torch.distributed, waited for"] - medians["ours, waited for"], 1),
    }


def main() -> None:
    """Measure each size and print it on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("syncline-mpi", init_method="mpi://")
    rows = [row(numel, measure(numel, options.rounds)) for numel in NUMELS]
    if dist.get_rank() == 0:
        for entry in rows:
            print(entry, flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
