"""The model of a step on other numbers of ranks: tables without ranks."""

from __future__ import annotations

import pytest

from syncline.ddp.prediction.compression import BF16, NONE, POWER_SGD, compressions
from syncline.ddp.prediction.cost_model import CostModel, Link, between_s
from syncline.ddp.prediction.forecast import AS_TRACED, MIB, Choice, advice, forecast
from syncline.ddp.prediction.replay import Gradient, Prediction, ReadyBucket, Workload, rebucket, replay, spread

SLOW = Link(latency_s=1.0, bandwidth=10.0)
FAST = Link(latency_s=0.5, bandwidth=100.0)


def a_bucket(nbytes: float, ready_s: float) -> ReadyBucket:
    return ReadyBucket((Gradient((1,), nbytes, ready_s),), ready_s)


@pytest.mark.parametrize(("size", "seconds"), [(1, 0.0), (2, 2 * (1 + 5.0)), (5, 8 * (1 + 2.0)), (10, 18 * (1 + 1.0))])
def test_a_ring(size: int, seconds: float) -> None:
    assert between_s(size, 100.0, SLOW) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("size", "seconds"),
    [
        (1, 0.0),
        (2, 2 + 10.0),
        (8, 6 + 17.5),  # three halvings, three doublings, and the bytes of a ring
        (5, 6 + 15.0 + 20.0),  # one rank joins another before, and gets the result afterwards
        (16, 8 + 18.75),
    ],
)
def test_halving_and_doubling(size: int, seconds: float) -> None:
    assert between_s(size, 100.0, SLOW, ring_bytes=101.0) == pytest.approx(seconds)


def test_parts_below_ring_bytes_are_not_reduced_in_a_ring() -> None:
    assert between_s(16, 16 * 10.0, SLOW, ring_bytes=10.0) == between_s(16, 160.0, SLOW)
    assert between_s(16, 16 * 9.9, SLOW, ring_bytes=10.0) < between_s(16, 16 * 9.9, SLOW)


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
    workload = Workload(tuple(a_bucket(1.0, at) for at in ready), backward_s=10.0, rest_s=2.0)
    assert replay(workload, lambda _: seconds) == expected


def test_gradients_of_a_bucket_come_evenly_byte_by_byte() -> None:
    found = spread([(1,), (3,)], [4.0, 12.0], 2.0, 10.0)
    assert found == (Gradient((1,), 4.0, 4.0), Gradient((3,), 12.0, 10.0))
    assert spread([(0,)], [0.0], 2.0, 10.0) == (Gradient((0,), 0.0, 10.0),)


@pytest.mark.parametrize(
    ("caps", "expected"),
    [
        ([100], [(100.0, 6.0), (100.0, 10.0)]),
        ([200], [(200.0, 10.0)]),
        ([1000], [(200.0, 10.0)]),
        ([50], [(50.0, 4.0), (50.0, 6.0), (50.0, 8.0), (50.0, 10.0)]),
        ([50, 1000], [(50.0, 4.0), (150.0, 10.0)]),
        ([60], [(100.0, 6.0), (100.0, 10.0)]),  # the gradient that reaches the size closes the bucket
    ],
)
def test_other_bucket_sizes(caps: list[int], expected: list[tuple[float, float]]) -> None:
    found = rebucket(evenly(), caps)
    assert [(bucket.nbytes, bucket.ready_s) for bucket in found.buckets] == expected
    assert (found.backward_s, found.rest_s) == (10.0, 0.0)


def evenly() -> Workload:
    """Four gradients of 50 bytes in two buckets, from second 2 on."""
    buckets = [ReadyBucket(spread([(5,), (10,)], [50.0, 50.0], since, since + 4), since + 4) for since in (2.0, 6.0)]
    return Workload(tuple(buckets), backward_s=10.0, rest_s=0.0)


def test_larger_buckets_pay_on_a_network_of_high_latency_and_smaller_ones_overlap_more() -> None:
    def step_s(cap: int, link: Link) -> float:
        return replay(rebucket(evenly(), [cap]), lambda bucket: between_s(4, bucket.nbytes, link)).step_s

    assert step_s(200, Link(5.0, 1e6)) < step_s(25, Link(5.0, 1e6))
    assert step_s(200, Link(1e-6, 100.0)) > step_s(25, Link(1e-6, 100.0))


# ---- compression ----


def test_bytes_of_each_compression() -> None:
    gradients = (Gradient((64, 8, 16), 4.0 * 64 * 128, 1.0), Gradient((64,), 256.0, 2.0), Gradient((3, 3), 36.0, 3.0))
    bucket = ReadyBucket(gradients, 3.0)
    none, bf16, power_sgd = compressions({BF16: 1e9, POWER_SGD: 1e9})
    assert none.messages(bucket) == [bucket.nbytes]
    assert bf16.messages(bucket) == [bucket.nbytes / 2]
    # The vector and the small matrix as they are, with the left factor of rank 4; then the right factor, in float32.
    assert power_sgd.messages(bucket) == [256.0 + 36.0 + 4.0 * 4 * 64, 4.0 * 4 * 128]


def test_computing_comes_before_the_messages() -> None:
    (_, bf16, _) = compressions({BF16: 50.0, POWER_SGD: 1.0})
    bucket = ReadyBucket((Gradient((25,), 100.0, 0.0),), 0.0)
    assert bf16.reduce_s(bucket, lambda nbytes: nbytes / 10) == pytest.approx(2.0 + 5.0)
    assert NONE.reduce_s(bucket, lambda nbytes: nbytes / 10) == pytest.approx(10.0)


def test_speeds_that_are_not_given_are_measured() -> None:
    assert all(one.speed > 0 for one in compressions({}))


# ---- the whole ----


def resnet(backward_s: float = 0.110) -> Workload:
    """About a ResNet-50 on a GPU: 100 MB of gradients that come evenly over a backward; 60 ms of forward."""
    shapes = [(256, 1000)] * 100
    buckets = [
        spread([shape], [1.0e6], 0.060 + number * 0.0011, 0.060 + (number + 1) * 0.0011) for number, shape in enumerate(shapes)
    ]
    merged = Workload(tuple(ReadyBucket(one, one[-1].came_s) for one in buckets), 0.060 + backward_s, 0.010)
    return rebucket(merged, [MIB, 25 * MIB])


def test_scaling_is_near_linear_to_256_with_good_buckets_on_a_fast_network_as_the_paper_has_it() -> None:
    # Li and others, 2020: with NCCL, 256 GPUs (8 a node) keep most of their speed.
    model = CostModel(Link(20e-6, 12.5e9), Link(5e-6, 60e9), per_node=8)
    found = forecast(resnet(), model, [8, 32, 256], [NONE])
    efficiencies = [found.efficiency(ranks, AS_TRACED) for ranks in (8, 32, 256)]
    assert efficiencies == sorted(efficiencies, reverse=True)
    assert efficiencies[-1] > 0.8
    # One bucket in all hides nothing; a bucket for each gradient pays the latency a hundred times.
    assert found.steps[256][Choice(100 * MIB, "none")].step_s > found.traced(256).step_s


def test_on_a_slow_network_compression_is_advised() -> None:
    model = CostModel(Link(50e-6, 125e6), SLOW)
    found = forecast(resnet(), model, [2, 64], compressions({BF16: 50e9, POWER_SGD: 50e9}))
    said = advice(found)
    assert said.startswith("At 64 ranks the traced buckets keep ")
    assert "bf16 give 1.8 times that (and more than 1.05 times from 2 ranks on)" in said
    assert POWER_SGD in said
    assert said.index(BF16) < said.index(POWER_SGD)


def test_where_all_is_hidden_nothing_is_advised() -> None:
    found = forecast(resnet(), CostModel(Link(0.0, 1e15), FAST), [2, 8], [NONE])
    assert "no other bucket size or compression gives much more" in advice(found)
