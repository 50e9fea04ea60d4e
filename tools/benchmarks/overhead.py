"""What a reducer costs for each parameter, without any communication: ours and torch's side by side.

    python tools/benchmarks/overhead.py [--parameters 500] [--steps 60] [--json PATH]

One process, one rank, one thread; a hook that does nothing. All contenders train copies of one model of many tiny parameters,
taking turns step by step, so that whatever the machine does meanwhile hits them alike. A contender's cost is the processor time
of its step (forward, backward, zero_grad) minus that of the bare module in the same round, divided by the number of parameters;
printed are medians in microseconds with their quartiles, and the ratio of ours to torch's.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from syncline.collectives import ProcessGroup, destroy_process_group, init_process_group
from syncline.ddp import DistributedDataParallel
from syncline.hooks import noop_hook

WARM_UP = 5
GRAPHS: dict[str, dict[str, bool]] = {
    "dynamic": {},
    "static": {"static_graph": True},
    "find-unused": {"find_unused_parameters": True},
}


class ManySmall(torch.nn.Module):
    """Many parameters of 16 elements, with which next to nothing is computed."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.pieces = torch.nn.ParameterList(torch.randn(16) for _ in range(count))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.pieces)).sum() * inputs


def contenders(model: torch.nn.Module, group: ProcessGroup, options: dict[str, bool]) -> dict[str, Any]:
    """Copies of one model, each under another kind of reducer."""
    found: dict[str, Any] = {
        "torch": torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model), **options),  # type: ignore[arg-type]
        "ours": DistributedDataParallel(copy.deepcopy(model), process_group=group, **options),  # type: ignore[arg-type]
    }
    for wrapped in found.values():
        wrapped.register_comm_hook(None, noop_hook)
    return {**found, "none": copy.deepcopy(model)}


def measure(model: torch.nn.Module, group: ProcessGroup, options: dict[str, bool], steps: int) -> dict[str, list[float]]:
    """Microseconds of each step of each contender."""
    modules = contenders(model, group, options)
    data = torch.tensor(2.0)
    taken_us: dict[str, list[float]] = {name: [] for name in modules}
    for step in range(WARM_UP + steps):
        for name, module in modules.items():
            start = time.thread_time()
            module(data).backward()
            module.zero_grad()
            if step >= WARM_UP:
                taken_us[name].append(1e6 * (time.thread_time() - start))
    return taken_us


def row(case: str, taken_us: dict[str, list[float]], count: int) -> dict[str, object]:
    """Costs for each parameter, in microseconds, and how ours compare."""
    costs = {
        name: [(step - bare) / count for step, bare in zip(taken_us[name], taken_us["none"], strict=True)]
        for name in ("torch", "ours")
    }
    quartiles = {name: [round(q, 2) for q in statistics.quantiles(values, n=4)] for name, values in costs.items()}
    ratio = statistics.median(costs["ours"]) / statistics.median(costs["torch"])
    return {"case": case, "us_per_parameter": quartiles, "ours_vs_torch": round(ratio, 2)}


def line(found: dict[str, Any]) -> str:
    """A row of the table: medians, with quartiles in brackets."""
    cells = ["{1:7.2f} ({0:.2f} to {2:.2f})".format(*found["us_per_parameter"][name]) for name in ("torch", "ours")]
    return f"{found['case']:22}{cells[0]:>26}{cells[1]:>26}{found['ours_vs_torch']:>8.2f}"


def main() -> None:
    """Run every case and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=500)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = init_process_group("in_process", world_size=1)
    model = ManySmall(options.parameters)
    rows = []
    print(f"{'us per parameter':22}{'torch':>26}{'ours':>26}{'ratio':>8}")
    for graph, arguments in GRAPHS.items():
        for as_view in (False, True):
            case = f"{graph}{', views' if as_view else ''}"
            taken_us = measure(model, group, {**arguments, "gradient_as_bucket_view": as_view}, options.steps)
            rows.append(row(case, taken_us, options.parameters))
            print(line(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    destroy_process_group()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
