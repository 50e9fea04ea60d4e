"""The model of a step on other numbers of ranks: tables without ranks."""

from __future__ import annotations

import pytest

from syncline.ddp.prediction.cost_model import CostModel, Link, ring_s
from syncline.ddp.prediction.replay import Prediction, ReadyBucket, Workload, rebucket, replay

SLOW = Link(latency_s=1.0, bandwidth=10.0)
FAST = Link(latency_s=0.5, bandwidth=100.0)


@pytest.mark.parametrize(("size", "seconds"), [(1, 0.0), (2, 2 * (1 + 5.0)), (5, 8 * (1 + 2.0)), (10, 18 * (1 + 1.0))])
def test_a_ring(size: int, seconds: float) -> None:
    assert ring_s(size, 100.0, SLOW) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("per_node", "ranks", "seconds"),
    [
        (1, 1, 0.0),
        (1, 5, 24.0),
        (4, 1, 0.0),
        (4, 4, 2 * (0.5 + 1.0)),
        (4, 8, 3.0 + 12.0),
        (4, 5, 3.0 + 12.0),  # a node that is not full counts as one
    ],
)
def test_two_levels(per_node: int, ranks: int, seconds: float) -> None:
    assert CostModel(SLOW, FAST, per_node).all_reduce_s(ranks, 100.0) == pytest.approx(seconds)


def test_twice_the_bytes_never_take_more_than_twice_the_time() -> None:
    model = CostModel(SLOW, FAST, 4)
    for ranks in (1, 2, 7, 64, 1024):
        once, twice = model.all_reduce_s(ranks, 1e6), model.all_reduce_s(ranks, 2e6)
        assert once <= twice <= 2 * once


@pytest.mark.parametrize(
    ("ready", "seconds", "expected"),
    [
        ([], 1.0, Prediction(12.0, 0.0)),
        ([2.0, 10.0], 0.0, Prediction(12.0, 0.0)),
        ([2.0, 10.0], 3.0, Prediction(15.0, 3.0)),  # the first is hidden
        ([8.0, 9.0, 10.0], 3.0, Prediction(19.0, 7.0)),  # one after the other
        ([2.0, 3.0], 2.0, Prediction(12.0, 0.0)),  # all hidden
    ],
)
def test_replay(ready: list[float], seconds: float, expected: Prediction) -> None:
    workload = Workload(tuple(ReadyBucket(1.0, at) for at in ready), backward_s=10.0, rest_s=2.0)
    assert replay(workload, lambda _: seconds) == expected


@pytest.mark.parametrize(
    ("cap", "expected"),
    [
        (100.0, [(100.0, 6.0), (100.0, 10.0)]),
        (200.0, [(200.0, 10.0)]),
        (1000.0, [(200.0, 10.0)]),
        (50.0, [(50.0, 4.0), (50.0, 6.0), (50.0, 8.0), (50.0, 10.0)]),
        (150.0, [(150.0, 8.0), (50.0, 10.0)]),
    ],
)
def test_other_bucket_sizes(cap: float, expected: list[tuple[float, float]]) -> None:
    traced = (ReadyBucket(100.0, 6.0), ReadyBucket(100.0, 10.0))
    found = rebucket(traced, 2.0, cap)
    assert [(bucket.nbytes, bucket.ready_s) for bucket in found] == expected


def test_larger_buckets_pay_on_a_network_of_high_latency_and_smaller_ones_overlap_more() -> None:
    traced = (ReadyBucket(100.0, 6.0), ReadyBucket(100.0, 10.0))

    def step_s(cap: float, link: Link) -> float:
        workload = Workload(rebucket(traced, 2.0, cap), backward_s=10.0, rest_s=0.0)
        return replay(workload, lambda nbytes: ring_s(4, nbytes, link)).step_s

    assert step_s(200.0, Link(5.0, 1e6)) < step_s(25.0, Link(5.0, 1e6))
    assert step_s(200.0, Link(1e-6, 100.0)) > step_s(25.0, Link(1e-6, 100.0))
