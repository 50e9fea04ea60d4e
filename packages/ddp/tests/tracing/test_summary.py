"""Where the time went: tables without ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from syncline.ddp.tracing.events import BucketEvent, BucketLayout, OptimizerEvent, StepEvent
from syncline.ddp.tracing.part import Header, Part
from syncline.ddp.tracing.summary import covered, summarize_ranks, summarize_steps
from syncline.ddp.tracing.timeline import Timeline, merge


def a_step(number: int, gradient_at: float) -> StepEvent:
    """From `10 * number`; the last gradient so many seconds later, and both buckets reduced at 6."""
    began = 10.0 * number
    buckets = (
        BucketEvent(0, 300, began + 1.0, began + gradient_at - 1.0, began + 5.0),
        BucketEvent(1, 100, began + gradient_at, began + gradient_at, began + 6.0),
    )
    optimizers = (OptimizerEvent("SGD", began + 6.0, began + 7.0),)
    end = began + 6.0
    times = (began, began + 0.5, began + 0.5, began + gradient_at, began + gradient_at, end)
    return StepEvent(number, 0, *times, end - began - gradient_at, buckets, optimizers)


def a_timeline(*gradients: tuple[float, ...]) -> Timeline:
    """For each rank when, in each step, its last gradient came."""
    layout = (BucketLayout(300, ("a",)), BucketLayout(100, ("b",)))
    parts = [
        Part(
            Header(rank, len(gradients), "here", rank, "a group", 0.0, "run"),
            (),
            (layout,),
            tuple(a_step(number, at) for number, at in enumerate(times, start=1)),
        )
        for rank, times in enumerate(gradients)
    ]
    return merge(parts)


@pytest.mark.parametrize(
    ("spans", "length"),
    [
        ([], 0.0),
        ([(1.0, 2.0)], 1.0),
        ([(3.0, 4.0), (1.0, 2.0)], 2.0),
        ([(1.0, 3.0), (2.0, 4.0)], 3.0),
        ([(1.0, 9.0), (2.0, 4.0)], 8.0),
        ([(2.0, 1.0)], 0.0),
    ],
)
def test_what_spans_cover(spans: list[tuple[float, float]], length: float) -> None:
    assert covered(spans) == length


def test_a_step_of_three_ranks() -> None:
    (step,) = summarize_steps(a_timeline((2.0,), (5.0,), (3.0,)))
    assert (step.number, step.duration_s, step.nbytes, step.last_rank) == (1, 7.0, 400, 1)
    assert step.compute_s == pytest.approx(10.0 / 3)
    assert step.exposed_s == pytest.approx((4.0 + 1.0 + 3.0) / 3)
    assert step.late_s == 2.5
    assert step.caused_s == 3.0 + 2.0
    assert step.reducing_s == 2.0  # the first from 4 to 5, the second from 5 to 6
    assert step.bandwidth == 200.0


def test_nobody_waits_for_a_single_rank() -> None:
    (step,) = summarize_steps(a_timeline((2.0,)))
    assert (step.last_rank, step.late_s, step.caused_s) == (0, 0.0, 0.0)


def test_no_bucket_is_no_bandwidth() -> None:
    timeline = a_timeline((2.0,))
    (rank,) = timeline.ranks
    bare = replace(rank, steps={1: replace(rank.steps[1], buckets=())})
    (step,) = summarize_steps(replace(timeline, ranks=(bare,)))
    assert (step.nbytes, step.bandwidth) == (0, 0.0)


def test_ranks_over_the_steps() -> None:
    timeline = a_timeline((2.0, 5.0, 2.0), (4.0, 3.0, 6.0))
    first, second = summarize_ranks(timeline, summarize_steps(timeline))
    assert (first.rank, first.times_last, first.late_s, first.caused_s) == (0, 1, 2.0, 2.0)
    assert (second.rank, second.times_last, second.late_s, second.caused_s) == (1, 2, 3.0, 6.0)
    assert (first.compute_s, second.compute_s) == (2.0, 4.0)
    assert (first.exposed_s, second.exposed_s) == (4.0, 2.0)
