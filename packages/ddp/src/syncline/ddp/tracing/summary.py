"""Summarise how the ranks spend the time of traced steps, and for which rank the other ranks wait."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .events import StepEvent
from .timeline import Timeline


@dataclass(frozen=True)
class StepSummary:
    """One step over all ranks. Times are in seconds.

    Attributes:
        duration_s: the time from the first start of a forward to the last end of a step. A rank's step ends when its last
            optimizer has stepped and all buckets are reduced.
        compute_s: the time from the forward's start to the last gradient, as the mean over the ranks.
        exposed_s: the time in which backward waited for buckets, as the mean over the ranks.
        last_rank: the rank whose last gradient came last.
        late_s: the time from the median of the other ranks' last gradients to the last gradient of `last_rank`. 0 in a group of
            one rank.
        caused_s: the time in which other ranks waited for `last_rank`, summed over these ranks.
        bucket_bytes: the size of each bucket on one rank.
        reducing_s: the time in which at least one bucket was being reduced. A reduction begins when the last rank starts it.
    """

    number: int
    duration_s: float
    compute_s: float
    exposed_s: float
    last_rank: int
    late_s: float
    caused_s: float
    bucket_bytes: tuple[int, ...]
    reducing_s: float

    @property
    def nbytes(self) -> int:
        """The size of all buckets on one rank."""
        return sum(self.bucket_bytes)

    @property
    def bandwidth(self) -> float:
        """`nbytes` divided by `reducing_s`, in bytes per second. 0 if nothing was reduced."""
        return self.nbytes / self.reducing_s if self.reducing_s > 0 else 0.0


@dataclass(frozen=True)
class RankSummary:
    """One rank over all steps. Times are in seconds.

    Attributes:
        compute_s: the time from the forward's start to the last gradient, as the median over the steps.
        exposed_s: the time in which backward waited for buckets, as the median over the steps.
        times_last: the number of steps in which this rank's last gradient came last.
        late_s: the median of `StepSummary.late_s` over the steps that `times_last` counts. 0 if there are none.
        caused_s: the time in which other ranks waited for this rank, summed over ranks and steps.
    """

    rank: int
    compute_s: float
    exposed_s: float
    times_last: int
    late_s: float
    caused_s: float


def summarize_steps(timeline: Timeline) -> list[StepSummary]:
    """Return a summary of each step that all ranks have traced."""
    ranks = [one.header.rank for one in timeline.ranks]
    return [_step(number, timeline.of_step(number), ranks) for number in timeline.steps]


def summarize_ranks(timeline: Timeline, steps: Sequence[StepSummary]) -> list[RankSummary]:
    """Return a summary of each rank over at least one step."""
    found = []
    for one in timeline.ranks:
        own = [one.steps[step.number] for step in steps]
        last = [step for step in steps if step.last_rank == one.header.rank]
        found.append(
            RankSummary(
                one.header.rank,
                statistics.median(map(compute_of, own)),
                statistics.median(step.waited_s for step in own),
                len(last),
                statistics.median([step.late_s for step in last] or [0.0]),
                sum(step.caused_s for step in last),
            )
        )
    return found


def compute_of(step: StepEvent) -> float:
    """Return the seconds from the forward's start to the last gradient, on one rank."""
    return step.last_gradient - step.forward_started


def _step(number: int, on_ranks: Sequence[StepEvent], ranks: Sequence[int]) -> StepSummary:
    ready = [step.last_gradient for step in on_ranks]
    last = max(range(len(ready)), key=ready.__getitem__)
    others = [index for index in range(len(ready)) if index != last]
    end = max(max([step.finished, *(one.finished for one in step.optimizers)]) for step in on_ranks)
    return StepSummary(
        number=number,
        duration_s=end - min(step.forward_started for step in on_ranks),
        compute_s=statistics.fmean(map(compute_of, on_ranks)),
        exposed_s=statistics.fmean(step.waited_s for step in on_ranks),
        last_rank=ranks[last],
        late_s=ready[last] - statistics.median(ready[index] for index in others) if others else 0.0,
        caused_s=sum(max(0.0, min(ready[last], on_ranks[index].finished) - ready[index]) for index in others),
        bucket_bytes=tuple(bucket.nbytes for bucket in on_ranks[0].buckets),
        reducing_s=covered(_reductions(on_ranks)),
    )


def _reductions(on_ranks: Sequence[StepEvent]) -> list[tuple[float, float]]:
    by_bucket: dict[int, list[tuple[float, float]]] = {}
    for step in on_ranks:
        for bucket in step.buckets:
            by_bucket.setdefault(bucket.number, []).append((bucket.started, bucket.finished))
    return [(max(start for start, _ in spans), max(end for _, end in spans)) for spans in by_bucket.values()]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return the total length of spans (pairs of start and end). A time in several spans counts once."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total
