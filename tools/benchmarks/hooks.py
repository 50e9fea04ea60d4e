"""Communication hooks side by side: ours and torch's, on torch's own DDP over Gloo.

    mpiexec -n 2 python tools/benchmarks/hooks.py [--steps 30] [--only TEXT] [--json PATH]

Each hook gets the same bucket: all gradients of a model. All take turns in one process, so that whatever the machine does
meanwhile hits them alike; every rank computes with one thread. Printed are milliseconds from the call of the hook until
backward returns (compression, communication and writing back; no backward), the slowest rank's, as medians with quartiles, and
the median of ours divided by torch's.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from syncline import hooks
from syncline.collectives import ProcessGroup, destroy_process_group, exchange_objects, init_process_group

WARM_UP = 4
START = 2  # steps before PowerSGD compresses; part of the warm-up
Shapes = Sequence[tuple[int, ...]]


def resnet18() -> Shapes:
    """The parameters of ResNet-18 for 10 classes: 43 MiB, 62 tensors."""

    def convolution(outputs: int, inputs: int, size: int) -> list[tuple[int, ...]]:
        return [(outputs, inputs, size, size), (outputs,), (outputs,)]

    shapes, inputs = convolution(64, 3, 3), 64
    for outputs in (64, 128, 256, 512):
        for _ in range(2):
            shapes += convolution(outputs, inputs, 3) + convolution(outputs, outputs, 3)
            if inputs != outputs:
                shapes += convolution(outputs, inputs, 1)
            inputs = outputs
    return [*shapes, (10, 512), (10,)]


def mlp() -> Shapes:
    """Six layers of 1024: 24 MiB, 12 tensors, six of one shape."""
    return [(1024, 1024), (1024,)] * 6


MODELS: dict[str, Callable[[], Shapes]] = {"ResNet-18": resnet18, "MLP 6 x 1024": mlp}


class Gradients(torch.nn.Module):
    """Parameters whose gradients are given: backward costs next to nothing."""

    def __init__(self, shapes: Shapes, rank: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(rank)
        self.parts = torch.nn.ParameterList(torch.zeros(shape) for shape in shapes)
        self.given = [torch.randn(shape, generator=generator) for shape in shapes]

    def forward(self) -> torch.Tensor:
        return torch.stack([(part * given).sum() for part, given in zip(self.parts, self.given, strict=True)]).sum()


def power_sgd(module: Any, name: str, **settings: Any) -> tuple[Any, Any]:
    state = module.PowerSGDState(dist.group.WORLD, start_powerSGD_iter=START, **settings)
    return getattr(module, name), state


def pairs() -> dict[str, tuple[tuple[Any, Any], tuple[Any, Any]]]:
    """By the hook's name: ours and torch's, each with a state."""
    group = dist.group.WORLD
    found = {
        "allreduce": ((hooks.allreduce_hook, group), (default_hooks.allreduce_hook, group)),
        "fp16": ((hooks.fp16_compress_hook, group), (default_hooks.fp16_compress_hook, group)),
    }
    for rank in (1, 2, 4):
        for together in (False, True):
            settings = {"matrix_approximation_rank": rank, "batch_tensors_with_same_shape": together}
            found[f"PowerSGD rank {rank}{', same shapes batched' if together else ''}"] = (
                power_sgd(hooks, "powerSGD_hook", **settings),
                power_sgd(torch_power_sgd, "powerSGD_hook", **settings),
            )
    return found


class Contender:
    """A hook on a DDP of its own, and how long it takes."""

    def __init__(self, hook: Any, state: Any, shapes: Shapes, group: ProcessGroup) -> None:
        # One bucket: the callbacks of torch's PowerSGD issue collectives in whatever order they run.
        numel = sum(math.prod(shape) for shape in shapes)
        self._ddp = torch.nn.parallel.DistributedDataParallel(Gradients(shapes, group.rank), bucket_cap_mb=numel / 2**17)
        self._ddp.register_comm_hook(state, lambda state, bucket: self._call(hook, state, bucket))
        self._called_at = 0.0

    def _call(self, hook: Any, state: Any, bucket: Any) -> Any:
        assert bucket.is_last(), "expected one bucket"
        self._called_at = time.perf_counter()
        return hook(state, bucket)

    def step_ms(self) -> float:
        """One backward."""
        self._ddp.zero_grad()
        self._ddp().backward()
        return 1e3 * (time.perf_counter() - self._called_at)


def measure(contenders: Sequence[Contender], group: ProcessGroup, steps: int) -> list[list[float]]:
    """Milliseconds of each step of each contender; the slowest rank's."""
    taken: list[list[float]] = [[] for _ in contenders]
    for step in range(WARM_UP + steps):
        for contender, times in zip(contenders, taken, strict=True):
            group.barrier()
            took_ms = contender.step_ms()
            if step >= WARM_UP:
                times.append(took_ms)
    per_rank = exchange_objects(taken, group=group)
    return [[max(step) for step in zip(*(rank[n] for rank in per_rank), strict=True)] for n in range(len(contenders))]


def row(model: str, hook: str, ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Medians and quartiles of one pair, in milliseconds."""
    quartiles = {"ours": statistics.quantiles(ours, n=4), "torch": statistics.quantiles(theirs, n=4)}
    ratio = statistics.median(ours) / statistics.median(theirs)
    return {"model": model, "hook": hook, "quartiles_ms": quartiles, "ours_vs_torch": ratio}


def line(entry: dict[str, Any]) -> str:
    """One line of the table."""
    cells = [f"{q[1]:6.1f} [{q[0]:6.1f} {q[2]:6.1f}]" for q in entry["quartiles_ms"].values()]
    return f"{entry['model']:<13} {entry['hook']:<34} {'  '.join(cells)}   {entry['ours_vs_torch']:.2f}"


def main() -> None:
    """Run every pair and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--only", default="", metavar="TEXT", help="hooks and models whose line holds it")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    group = init_process_group()
    folder = exchange_objects(tempfile.mkdtemp() if group.rank == 0 else None, group=group)[0]
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=group.rank, world_size=group.size)
    rows = []
    if group.rank == 0:
        print(f"{'model':<13} {'hook':<34} {'ours, ms [quartiles]':<22}  {'torch, ms [quartiles]':<22}   ratio", flush=True)
    for model, shapes in MODELS.items():
        for name, pair in pairs().items():
            if options.only not in f"{model} {name}":
                continue
            ours, theirs = measure([Contender(*one, shapes(), group) for one in pair], group, options.steps)
            rows.append(row(model, name, ours, theirs))
            if group.rank == 0:
                print(line(rows[-1]), flush=True)
    if group.rank == 0 and options.json:
        options.json.write_text(json.dumps(rows, indent=2))
    dist.destroy_process_group()
    destroy_process_group()


if __name__ == "__main__":
    main()
