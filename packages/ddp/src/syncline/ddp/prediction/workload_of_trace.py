"""Find the workload of a step in a trace: the median step of the rank that computes longest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from syncline.collectives import InvalidArgumentError

from ..tracing.events import BucketLayout, StepEvent
from ..tracing.timeline import RankTimeline, Timeline
from .replay import ReadyBucket, Workload, spread


def workload_of(timeline: Timeline) -> Workload:
    """Return the `Workload` of the rank that computes longest, because the other ranks wait for this rank.

    The clocks of different ranks need not be aligned.

    Raises:
        InvalidArgumentError: no rank has traced two successive steps.
    """
    found = [workload for rank in timeline.ranks if (workload := _of_rank(rank)) is not None]
    if not found:
        raise InvalidArgumentError(
            "expected at least two traced steps, one after the other, with the same buckets, on some rank, found none: trace "
            "more steps, such as SYNCLINE_TRACE_STEPS=10-20"
        )
    return max(found, key=lambda workload: workload.alone_s)


def _of_rank(rank: RankTimeline) -> Workload | None:
    # A step ends where the next step begins, so both steps must be traced.
    pairs = [(step, rank.steps[number + 1]) for number, step in rank.steps.items() if number + 1 in rank.steps]
    # Use only the steps with the newest layout of buckets. Among these, use only the steps that reduced the most buckets.
    layout = max((step.layout for step, _ in pairs if step.buckets), default=0)
    count = max((len(step.buckets) for step, _ in pairs if step.layout == layout), default=0)
    usual = [pair for pair in pairs if pair[0].layout == layout and len(pair[0].buckets) == count]
    if not count:
        return None
    return Workload(
        _buckets([step for step, _ in usual], rank.layouts[layout]),
        backward_s=median(step.last_gradient - step.forward_started for step, _ in usual),
        rest_s=median(following.forward_started - _communicated(step) for step, following in usual),
    )


def _buckets(steps: Sequence[StepEvent], layout: Sequence[BucketLayout]) -> tuple[ReadyBucket, ...]:
    since_s = median(step.backward_started - step.forward_started for step in steps)
    found = []
    for place, event in enumerate(steps[0].buckets):
        until_s = median(step.buckets[place].started - step.forward_started for step in steps)
        shapes = layout[event.number].shapes
        numels = [math.prod(shape) for shape in shapes]
        nbytes = [event.nbytes * numel / max(1, sum(numels)) for numel in numels]
        found.append(ReadyBucket(spread(shapes, nbytes, since_s, until_s), until_s))
        since_s = until_s
    return tuple(found)


def _communicated(step: StepEvent) -> float:
    # The copy from buckets to gradients, and the optimizer, come after this time.
    return min(step.finished, max([step.finalize_started, *(bucket.finished for bucket in step.buckets)]))
