"""The trainings of the ranks on the emulated hosts; `slow_links` starts them."""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from syncline.collectives import ProcessGroup, exchange_objects
from syncline.ddp import DistributedDataParallel
from syncline.hooks import (
    DiLoCoOptimizer,
    Int8,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    PowerSGDState,
    bf16_compress_hook,
    post_localSGD_hook,
    powerSGD_hook,
)

from . import picture, session
from .emulated_hosts import DEVICE
from .report import Report
from .slow_links_tasks import TASKS, Task
from .wire import device_sent_bytes

SYNC_EVERY = 50
Trainee = tuple[torch.nn.Module, torch.optim.Optimizer, Callable[[], None]]
"""What is called with the inputs, its optimizer, and what makes replicas equal at the end."""


def _nothing() -> None:
    """Do nothing: replicas are equal already."""


def _ddp(_: Task, model: torch.nn.Module, optim: torch.optim.Optimizer, group: ProcessGroup) -> Trainee:
    return DistributedDataParallel(model, process_group=group), optim, _nothing


def _bf16(_: Task, model: torch.nn.Module, optim: torch.optim.Optimizer, group: ProcessGroup) -> Trainee:
    ddp = DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(None, bf16_compress_hook)
    return ddp, optim, _nothing


def _power_sgd(_: Task, model: torch.nn.Module, optim: torch.optim.Optimizer, group: ProcessGroup) -> Trainee:
    ddp = DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=10), powerSGD_hook)
    return ddp, optim, _nothing


def _local_sgd(_: Task, model: torch.nn.Module, optim: torch.optim.Optimizer, group: ProcessGroup) -> Trainee:
    ddp = DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(PostLocalSGDState(None, None, 0, post_local_gradient_allreduce=False), post_localSGD_hook)
    averager = PeriodicModelAverager(SYNC_EVERY, process_group=group)

    def synchronize() -> None:
        PeriodicModelAverager(1, process_group=group).average_parameters(model.parameters())

    return ddp, PostLocalSGDOptimizer(optim, averager), synchronize


def _diloco(task: Task, model: torch.nn.Module, optim: torch.optim.Optimizer, group: ProcessGroup) -> Trainee:
    outer = _outer_optimizer(task, model, optim, group)

    def synchronize() -> None:
        if outer.steps % SYNC_EVERY:
            outer.synchronize()

    return model, outer, synchronize


def _streaming(task: Task, model: torch.nn.Module, optim: torch.optim.Optimizer, group: ProcessGroup) -> Trainee:
    outer = _outer_optimizer(task, model, optim, group, fragments=5, overlap_steps=5, mixing=0.5, compressor=Int8())
    return model, outer, outer.synchronize


def _outer_optimizer(
    task: Task, model: torch.nn.Module, optim: torch.optim.Optimizer, group: ProcessGroup, **stream: Any
) -> DiLoCoOptimizer:
    return DiLoCoOptimizer(
        optim,
        model.named_parameters(),
        group,
        sync_every=SYNC_EVERY,
        outer_lr=task.outer_lr,
        outer_momentum=task.outer_momentum,
        **stream,
    )


CONTENDERS: dict[str, Callable[[Task, torch.nn.Module, torch.optim.Optimizer, ProcessGroup], Trainee]] = {
    "ddp": _ddp,
    "ddp-bf16": _bf16,
    "power-sgd": _power_sgd,
    "local-sgd": _local_sgd,
    "diloco": _diloco,
    "streaming-diloco-int8": _streaming,
}


@dataclass(frozen=True)
class Training:
    """The result of one training.

    Attributes:
        seconds: for all steps, on the slowest rank.
        sent_bytes: bytes over the wire, from the host that sent most.
        most_in_a_step_bytes: the same for the step in which it sent most; bytes after the last step do not count.
        loss: on samples outside of the training, with rank 0's model.
        train_losses: the mean over the ranks, for each step.
    """

    seconds: float
    sent_bytes: int
    most_in_a_step_bytes: int
    loss: float
    train_losses: list[float]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options that driver and ranks share."""
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), help="default: all")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS), help="default: all")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write all figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw a picture of each task into this folder")
    parser.add_argument("--quick", action="store_true", help="a few steps: shows that it runs; the figures mean nothing")


def main(arguments: Sequence[str] | None = None) -> int:
    """Every rank of the job calls it."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    options = session.parse(parser, arguments)
    with session.groups() as group:
        report = Report("slow-links", options, group)
        for name in options.tasks:
            _compare(TASKS[name](options.quick), options, group, report)
    return 0


def _compare(task: Task, options: argparse.Namespace, group: ProcessGroup, report: Report) -> None:
    found: dict[str, Training] = {}
    for name in options.contenders:
        found[name] = _train(task, name, group)
        report.keep(task.name, {contender: asdict(training) for contender, training in found.items()})
    first = next(iter(found.values()))
    rows = [
        [
            name,
            f"{training.seconds:.1f}",
            f"{training.sent_bytes / 2**20:.2f}",
            f"{first.sent_bytes / training.sent_bytes:.1f}",
            f"{training.most_in_a_step_bytes / 2**10:.0f}",
            f"{training.loss:.4f}",
            f"{100 * (training.loss / first.loss - 1):+.1f} %",
        ]
        for name, training in found.items()
    ]
    head = [
        "contender",
        "time [s]",
        "sent [MiB]",
        "times fewer",
        "most in a step [KiB]",
        "loss",
        f"against {next(iter(found))}",
    ]
    report.table(task.name, f"{task.steps} steps, {task.parameter_bytes() / 2**10:.0f} KiB of parameters", head, rows)
    title = f"{task.name}: {group.size} hosts"
    curves = {name: _smoothed(training.train_losses) for name, training in found.items()}
    picture.curves(report.picture(task.name), title, ("step", "training loss, mean over 20 steps"), curves)


def _smoothed(losses: Sequence[float], width: int = 20) -> list[float]:
    return [statistics.fmean(losses[max(0, end - width) : end]) for end in range(1, len(losses) + 1)]


def _train(task: Task, name: str, group: ProcessGroup) -> Training:
    torch.manual_seed(0)
    model = task.model()
    optim = torch.optim.AdamW(model.parameters(), lr=task.lr)
    module, optimizer, synchronize = CONTENDERS[name](task, model, optim, group)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, task.steps)  # as in DiLoCo's papers
    group.barrier()  # now all ranks have the first rank's parameters
    losses, sent = [], [device_sent_bytes(DEVICE)]
    started = time.perf_counter()
    for inputs, targets in itertools.islice(_batches(task, group), task.steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(module(inputs).flatten(0, -2), targets.flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        sent.append(device_sent_bytes(DEVICE))
    synchronize()
    seconds = time.perf_counter() - started
    group.barrier()
    sent.append(device_sent_bytes(DEVICE))
    steps = [after - before for before, after in itertools.pairwise(sent[:-1])]
    everyone = exchange_objects((seconds, sent[-1] - sent[0], max(steps), task.validation_loss(model), losses), group=group)
    return Training(
        seconds=max(rank[0] for rank in everyone),
        sent_bytes=max(rank[1] for rank in everyone),
        most_in_a_step_bytes=max(rank[2] for rank in everyone),
        loss=everyone[0][3],
        train_losses=[statistics.fmean(step) for step in zip(*(rank[4] for rank in everyone), strict=True)],
    )


def _batches(task: Task, group: ProcessGroup) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches: the same at the same step for every contender."""
    for step in itertools.count():
        yield task.batch(torch.Generator().manual_seed(group.size * step + group.rank))


if __name__ == "__main__":
    sys.exit(main())
