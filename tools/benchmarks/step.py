"""Training steps side by side: our DDP, torch's DDP over Gloo, and no synchronisation at all.

    mpiexec -n 2 python tools/benchmarks/step.py [--steps 40] [--json PATH]

All three train copies of one model in one process, taking turns, so that whatever the machine does meanwhile hits them alike.
Every rank computes with one thread. Printed are medians of a step (forward, backward, optimizer) with their quartiles, and the
communication left exposed: a step minus an unsynchronised step, ours divided by torch's.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from syncline.collectives import ProcessGroup, destroy_process_group, exchange_objects, init_process_group
from syncline.ddp import DistributedDataParallel

WARM_UP = 5


def mlp() -> torch.nn.Module:
    """Six layers of 1024: 24 MiB of gradients."""
    layers: list[torch.nn.Module] = []
    for _ in range(6):
        layers += [torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers)


def convolutional() -> torch.nn.Module:
    """A small residual-free CNN on 32 x 32 images, with batch normalisation."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 32, 3, padding=1),
        torch.nn.BatchNorm2d(32),
        torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, padding=1, stride=2),
        torch.nn.BatchNorm2d(64),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(64 * 16 * 16, 64),
    )


def many_small() -> torch.nn.Module:
    """500 parameters of 16 elements: what the reducer itself costs."""
    return torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(500)))


CASES: dict[str, tuple[Callable[[], torch.nn.Module], tuple[int, ...]]] = {
    "MLP 6 x 1024, batch 4": (mlp, (4, 1024)),
    "MLP 6 x 1024, batch 16": (mlp, (16, 1024)),
    "MLP 6 x 1024, batch 64": (mlp, (64, 1024)),
    "CNN 32 x 32, batch 4": (convolutional, (4, 3, 32, 32)),
    "500 tiny parameters": (many_small, (4, 4)),
}


def contenders(model: torch.nn.Module, group: ProcessGroup) -> dict[str, torch.nn.Module]:
    """Copies of one model, each under another kind of synchronisation."""
    return {
        "ours": DistributedDataParallel(copy.deepcopy(model), process_group=group),
        "ours, views": DistributedDataParallel(copy.deepcopy(model), process_group=group, gradient_as_bucket_view=True),
        "torch": torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model)),
        "none": copy.deepcopy(model),
    }


def measure(model: torch.nn.Module, shape: tuple[int, ...], group: ProcessGroup, steps: int) -> dict[str, list[float]]:
    """Milliseconds of each step of each contender; the slowest rank's."""
    modules = contenders(model, group)
    optimizers = {name: torch.optim.SGD(module.parameters(), lr=1e-3) for name, module in modules.items()}
    data = torch.randn(shape)
    taken_ms: dict[str, list[float]] = {name: [] for name in modules}
    for step in range(WARM_UP + steps):
        for name, module in modules.items():
            group.barrier()
            start = time.perf_counter()
            module(data).square().mean().backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            if step >= WARM_UP:
                taken_ms[name].append(1e3 * (time.perf_counter() - start))
    per_rank = exchange_objects(taken_ms, group=group)
    return {name: [max(step) for step in zip(*(entry[name] for entry in per_rank), strict=True)] for name in modules}


def row(case: str, taken_ms: dict[str, list[float]]) -> dict[str, object]:
    """Medians and quartiles of one case, in milliseconds."""
    medians = {name: statistics.median(values) for name, values in taken_ms.items()}
    quartiles = {name: [round(q, 3) for q in statistics.quantiles(values, n=4)] for name, values in taken_ms.items()}
    exposed = {name: medians[name] - medians["none"] for name in ("ours", "ours, views", "torch")}
    return {"case": case, "quartiles_ms": quartiles, "step_vs_torch": medians["ours"] / medians["torch"], "exposed_ms": exposed}


def main() -> None:
    """Run every case and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    group = init_process_group()
    folder = exchange_objects(tempfile.mkdtemp() if group.rank == 0 else None, group=group)[0]
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=group.rank, world_size=group.size)
    rows = []
    for case, (make, shape) in CASES.items():
        rows.append(row(case, measure(make(), shape, group, options.steps)))
        if group.rank == 0:
            print(f"{case}: {rows[-1]}", flush=True)
    if group.rank == 0 and options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    dist.destroy_process_group()
    destroy_process_group()


if __name__ == "__main__":
    main()
