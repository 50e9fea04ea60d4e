"""The timeline: a picture of one step on every rank."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from syncline.collectives import ProcessGroup, exchange_objects
from syncline.ddp import DistributedDataParallel
from syncline.reducer import IterationStatistics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RECORDED_STEPS = 9


@dataclass(frozen=True)
class StepTimes:
    """One step of one rank; all times are seconds of that rank's `time.perf_counter()`.

    Attributes:
        forward_ended: the model returned.
        backward_called: `loss.backward()` was called.
        iteration: what the reducer saw.
    """

    forward_ended: float
    backward_called: float
    iteration: IterationStatistics

    @property
    def duration_s(self) -> float:
        """From the start of forward to the last gradient written back."""
        return self.iteration.finished - self.iteration.forward_started

    def ms(self, moment: float) -> float:
        """Milliseconds since this rank's forward started."""
        return 1e3 * (moment - self.iteration.forward_started)


def record(
    model: DistributedDataParallel, images: torch.Tensor, labels: torch.Tensor, *, group: ProcessGroup
) -> list[StepTimes]:
    """Run some forwards and backwards, and return a typical one, of all ranks. A collective; changes no parameter.

    All ranks start each of them together. Typical is the one of median duration, counted on its slowest rank.
    """
    own = [_one_step(model, images, labels, group) for _ in range(RECORDED_STEPS)]
    steps: list[tuple[StepTimes, ...]] = list(zip(*exchange_objects(own, group=group), strict=True))
    steps.sort(key=lambda ranks: max(step.duration_s for step in ranks))
    return list(steps[len(steps) // 2])


def _one_step(model: DistributedDataParallel, images: torch.Tensor, labels: torch.Tensor, group: ProcessGroup) -> StepTimes:
    model.zero_grad()
    group.barrier()
    scores = model(images)
    forward_ended = time.perf_counter()
    loss = F.cross_entropy(scores, labels)
    backward_called = time.perf_counter()
    loss.backward()
    return StepTimes(forward_ended, backward_called, model.iteration_statistics())


# ---- the picture ----

FORWARD, BACKWARD, WAITING, WRITING, FLIGHT = "#4C78A8", "#F2A65A", "#D62728", "#B0B0B0", "#6AA56A"
LEGEND = ("forward", "backward", "waiting", "writing back", "ready", "started to finished")
BAR = 0.62


def draw(ranks: Sequence[StepTimes], path: Path) -> None:
    """Write the picture: for each rank a row of computing, and below it one row for each bucket.

    Args:
        ranks: one step, by rank.
        path: where to; a PNG, whatever its name.
    """
    # Only the rank that draws imports it: it is slow, and builds a cache of fonts when it runs for the first time.
    from matplotlib.figure import Figure

    rows = sum(1 + len(step.iteration.buckets) for step in ranks)
    figure = Figure(figsize=(11, 1.7 + 0.34 * rows), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    labels: list[str] = []
    for rank, step in enumerate(ranks):
        _draw_rank(axes, step, len(labels))
        labels += _labels(rank, step)
        axes.axhline(len(labels) - 0.5, color="0.75", linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.set_xlim(0, 1.16 * max(step.ms(step.iteration.finished) for step in ranks))
    axes.set_xlabel("milliseconds since the rank's own forward started")
    axes.set_title(f"One training step on {len(ranks)} rank{'' if len(ranks) == 1 else 's'}", loc="left", fontweight="bold")
    axes.grid(axis="x", color="0.9", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    shown = [(handles[label], label) for label in LEGEND if label in handles]
    figure.legend(*zip(*shown, strict=True), loc="outside lower center", ncols=len(shown), frameon=False)
    figure.savefig(path, format="png")


def _labels(rank: int, step: StepTimes) -> list[str]:
    buckets = [f"bucket {number} ({bucket.nbytes / 1024:,.0f} KiB)" for number, bucket in enumerate(step.iteration.buckets)]
    return [f"rank {rank}: computing", *buckets]


def _draw_rank(axes: Axes, step: StepTimes, row: int) -> None:
    seen = step.iteration
    _bar(axes, row, 0.0, step.ms(step.forward_ended), FORWARD, "forward")
    _bar(axes, row, step.ms(step.backward_called), step.ms(seen.last_gradient), BACKWARD, "backward")
    if seen.buckets:
        waiting_began = step.ms(seen.buckets[-1].started)
        waiting_ended = waiting_began + 1e3 * seen.waited_s
        _bar(axes, row, waiting_began, waiting_ended, WAITING, "waiting")
        _bar(axes, row, waiting_ended, step.ms(seen.finished), WRITING, "writing back")
    _note(axes, row, step.ms(seen.finished), f"waited {1e3 * seen.waited_s:.2f} ms")
    for below, bucket in enumerate(seen.buckets, start=1):
        ready, started = step.ms(bucket.ready), step.ms(bucket.started)
        finished = step.ms(seen.finished if bucket.finished is None else bucket.finished)
        _bar(axes, row + below, started, finished, FLIGHT, "started to finished")
        axes.plot([ready], [row + below], marker="|", markersize=13, color="black", linestyle="", label="ready")
        _note(axes, row + below, finished, f"{finished - started:.2f} ms")


def _bar(axes: Axes, row: int, begin_ms: float, end_ms: float, color: str, label: str) -> None:
    axes.barh(row, end_ms - begin_ms, left=begin_ms, height=BAR, color=color, label=label)


def _note(axes: Axes, row: int, at_ms: float, text: str) -> None:
    axes.annotate(text, (at_ms, row), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
