"""Synchronising only every n-th iteration: what it saves, and what it does to training on handwritten digits."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from syncline.collectives import ProcessGroup, ReduceOp

from .cases import Case
from .contenders import Wrap
from .timing import Phases

EVERY = (1, 2, 4, 8)
WINDOW = max(EVERY)


def synchronizes(iteration: int, every: int) -> bool:
    """Whether the iteration, counted from 0, ends a run of `every`. A pure function."""
    return (iteration + 1) % every == 0


class SkippingTrainer:
    """Gradients add up locally; every n-th backward reduces them, and the optimizer steps.

    Args:
        ddp: ours or torch's, or a module that nothing synchronises.
        every: n.
        learning_rate: of plain SGD.
    """

    def __init__(self, ddp: Any, every: int, learning_rate: float = 1e-3) -> None:
        self._ddp = ddp
        self._no_sync = getattr(ddp, "no_sync", nullcontext)
        self._every = every
        self._optimizer = torch.optim.SGD(ddp.parameters(), lr=learning_rate)
        self._iteration = 0

    def iterate(self, case: Case, batch: torch.Tensor) -> torch.Tensor:
        """One forward and backward; returns the loss."""
        is_last = synchronizes(self._iteration, self._every)
        self._iteration += 1
        with nullcontext() if is_last else self._no_sync():
            loss = case.loss(self._ddp(batch), batch)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
        if is_last:
            self._optimizer.step()
            self._optimizer.zero_grad()
        return loss.detach()


class WindowOfSteps:
    """As many iterations as every n divides, as one step of a benchmark."""

    def __init__(self, wrap: Wrap, case: Case, model: nn.Module, batch: torch.Tensor, every: int) -> None:
        self._trainer = SkippingTrainer(wrap(model), every)
        self._case = case
        self._batch = batch

    def step(self) -> Phases:
        """The mean iteration."""
        started = time.perf_counter()
        for _ in range(WINDOW):
            self._trainer.iterate(self._case, self._batch)
        return Phases.undivided((time.perf_counter() - started) / WINDOW)


def losses(wrap: Wrap, group: ProcessGroup, iterations: int, every: int, batch_size: int, learning_rate: float) -> list[float]:
    """Train a small network on digits; the mean loss of the ranks' batches in each iteration. A collective.

    Each rank has its own part of the images. Seeds are the same for every n, so that only n differs.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    trainer = SkippingTrainer(wrap(model), every, learning_rate)
    batches = _batches(group.rank, group.size, batch_size)
    own = [_iterate(trainer, *next(batches)) for _ in range(iterations)]
    everyone = torch.stack(own)
    group.all_reduce(everyone, ReduceOp.AVG)
    mean: list[float] = everyone.tolist()
    return mean


def smoothed(values: Sequence[float], weight: float = 0.1) -> list[float]:
    """An exponential mean, which begins at the first value. A pure function."""
    means = [values[0]]
    for value in values[1:]:
        means.append((1 - weight) * means[-1] + weight * value)
    return means


def _iterate(trainer: SkippingTrainer, images: torch.Tensor, digits: torch.Tensor) -> torch.Tensor:
    case = Case("digits", nn.Module, lambda: images, lambda scores, _: F.cross_entropy(scores, digits))
    return trainer.iterate(case, images)


def _batches(rank: int, ranks: int, batch_size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = (part[rank::ranks] for part in _digits())
    generator = torch.Generator().manual_seed(rank)
    while True:
        chosen = torch.randint(len(images), (batch_size,), generator=generator)
        yield images[chosen], labels[chosen]


@functools.cache
def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    from sklearn.datasets import load_digits

    pixels, digits = load_digits(return_X_y=True)
    return torch.from_numpy(pixels).float() / 16, torch.from_numpy(digits).long()
