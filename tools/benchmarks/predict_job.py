"""The program of the ranks on the emulated hosts; `predict` starts it."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import torch

from syncline.collectives import ProcessGroup, destroy_process_group, exchange_objects, init_process_group
from syncline.ddp import DistributedDataParallel

from .other_load import idle_s
from .sleeping import SleepingModel

_LAYERS, _LAYER_BYTES, _FORWARD_S, _OPTIMIZER_S = 8, 1 << 20, 0.003, 0.010
BUCKET_BYTES = 2 << 20
_TRIALS = 10
_FIRST_STEPS = 4  # in these steps buckets are rebuilt and connections are made


def main(arguments: Sequence[str] | None = None) -> int:
    """Every rank of the job calls it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--backward-ms", type=float, required=True)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--trace", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    group = init_process_group()
    model = DistributedDataParallel(
        SleepingModel(_LAYERS, _LAYER_BYTES, _FORWARD_S, 1e-3 * options.backward_ms),
        bucket_cap_mb=BUCKET_BYTES / 2**20,
        gradient_as_bucket_view=True,
    )
    _train(model, _FIRST_STEPS)
    with nullcontext() if options.trace is None else model.trace(options.trace):
        times = _train(model, options.steps)
    found = exchange_objects((statistics.median(times), *_all_reduce(group)), group=group)
    if group.rank == 0:
        step_s, all_reduce_s, idle_cores = map(max, zip(*found, strict=True))
        kept = {"step_s": step_s, "all_reduce_s": all_reduce_s, "idle_cores": idle_cores}
        options.json.write_text(json.dumps(kept))
    destroy_process_group()
    return 0


def _all_reduce(group: ProcessGroup) -> tuple[float, float]:
    """Median seconds of an all-reduce of a bucket's size, and how many cores of the machine were idle meanwhile."""
    tensor = group.allocate(BUCKET_BYTES // 4, torch.float32, torch.device("cpu")).zero_()
    times, idle_before_s, began_s = [], idle_s(), time.perf_counter()
    for _ in range(_TRIALS):
        group.barrier()
        began = time.perf_counter()
        group.all_reduce(tensor)
        times.append(time.perf_counter() - began)
    return statistics.median(times), (idle_s() - idle_before_s) / (time.perf_counter() - began_s)


def _train(model: torch.nn.Module, steps: int) -> list[float]:
    """Seconds from each forward to the next."""
    value = torch.zeros((), requires_grad=True)
    began = []
    for _ in range(steps + 1):
        began.append(time.perf_counter())
        model(value).backward()
        time.sleep(_OPTIMIZER_S)
    return [after - before for before, after in pairwise(began)]


if __name__ == "__main__":
    sys.exit(main())
