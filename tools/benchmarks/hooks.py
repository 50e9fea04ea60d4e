"""Communication hooks side by side: ours and torch's, on torch's own DDP over Gloo.

    python3 tools/dev.py bench hooks [--parts mlp] [--only TEXT] [--json PATH] [--plot FOLDER]

Each hook gets the same bucket: all gradients of a model. Ours and torch's take turns, one pair after the other: compare the two
hooks of a pair, not different pairs. The measured time goes from the call of the hook until backward returns: compression,
communication and writing back, without backward. The parts are the models: mlp, 24 MiB in 12 tensors; resnet, 43 MiB in 62.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_power_sgd

from syncline import hooks
from syncline.collectives import ProcessGroup
from test_support.resnet18 import resnet18_shapes

from . import picture, session
from .contenders import NATIVE, OURS
from .report import Report
from .summary import Summary
from .timing import Phases, interleaved

START = 2  # steps before PowerSGD compresses; part of the warm-up
Shapes = Sequence[tuple[int, ...]]


def mlp() -> Shapes:
    """Six layers of 1024: six matrices of one shape."""
    return [(1024, 1024), (1024,)] * 6


QUICK: Shapes = [(16, 16), (16,)] * 2
MODELS: dict[str, tuple[str, Shapes]] = {"resnet": ("ResNet-18", resnet18_shapes()), "mlp": ("MLP 6 x 1024", mlp())}


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
    """By the hook's name: ours and torch's, each with its state."""
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
        # One bucket, because the callbacks of torch's PowerSGD issue collectives in the order in which they happen to run.
        numel = sum(math.prod(shape) for shape in shapes)
        self._ddp = torch.nn.parallel.DistributedDataParallel(Gradients(shapes, group.rank), bucket_cap_mb=numel / 2**17)
        self._ddp.register_comm_hook(state, lambda state, bucket: self._call(hook, state, bucket))
        self._called_at = 0.0

    def _call(self, hook: Any, state: Any, bucket: Any) -> Any:
        assert bucket.is_last(), "expected one bucket"
        self._called_at = time.perf_counter()
        return hook(state, bucket)

    def step(self) -> Phases:
        """One backward, from the hook on."""
        self._ddp.zero_grad()
        self._ddp().backward()
        return Phases.undivided(time.perf_counter() - self._called_at)


def main(arguments: Sequence[str] | None = None) -> int:
    """Every rank of the job calls it."""
    parser = session.parser(__doc__, list(PARTS))
    parser.add_argument("--only", default="", metavar="TEXT", help="hooks whose name holds it")
    return session.play_parsed("hooks", PARTS, session.parse(parser, arguments))


def _measure(part: str, options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    model, shapes = ("tiny", QUICK) if options.quick else MODELS[part]
    found = {name: _of_pair(pair, shapes, options.steps, group) for name, pair in pairs().items() if options.only in name}
    rows = [
        [name, pair[OURS].in_ms(), pair[NATIVE].in_ms(), f"{pair[OURS].median_s / pair[NATIVE].median_s:.2f}"]
        for name, pair in found.items()
    ]
    report.table(part, f"{model}, ms: median [quartiles]", ["hook", OURS, NATIVE, "ratio"], rows)
    figures = {name: {who: asdict(summary) for who, summary in pair.items()} for name, pair in found.items()}
    report.keep(part, {"model": model, "hooks": figures})
    picture.bars(report.picture(part), f"hooks, {model}, {group.size} ranks", found)


def _of_pair(
    pair: tuple[tuple[Any, Any], tuple[Any, Any]], shapes: Shapes, rounds: int, group: ProcessGroup
) -> dict[str, Summary]:
    steps = {name: Contender(*hook, shapes, group).step for name, hook in zip((OURS, NATIVE), pair, strict=True)}
    taken = interleaved(steps, group, rounds)
    return {name: Summary.of([step.total_s for step in taken[name]]) for name in steps}


PARTS: dict[str, session.Part] = {part: partial(_measure, part) for part in MODELS}

if __name__ == "__main__":
    sys.exit(main())
