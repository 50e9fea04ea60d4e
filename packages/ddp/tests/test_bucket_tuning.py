"""bucket_cap_mb="auto": the choice as tables, and replicas that stay equal whatever is chosen."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from syncline.collectives import InvalidArgumentError, MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.ddp import DistributedDataParallel
from syncline.ddp.bucket_tuning import (
    BucketTuning,
    ReductionCosts,
    choose,
    measuring_caps,
    predicted_steps,
    share_of_cores,
    without_outliers,
)
from syncline.ddp.prediction.replay import ReadyBucket, Workload, spread

MIB = 1 << 20
STEPS = 14


# ---- the choice ----


@pytest.mark.parametrize(
    ("nbytes", "seconds"),
    [(1.0, 2.0), (100.0, 2.0), (150.0, 2.5), (200.0, 3.0), (400.0, 7.0), (800.0, 15.0), (1200.0, 23.0)],
)
def test_costs_between_the_measured_sizes(nbytes: float, seconds: float) -> None:
    costs = ReductionCosts((100.0, 200.0, 800.0), (2.0, 3.0, 15.0), 0.0)
    assert costs.reduce_s(nbytes) == pytest.approx(seconds)


def test_one_measured_size() -> None:
    costs = ReductionCosts((100.0,), (2.0,), 0.0)
    assert (costs.reduce_s(50.0), costs.reduce_s(300.0)) == (2.0, 6.0)


@pytest.mark.parametrize(("total", "caps"), [(10, [MIB]), (32 * MIB, [MIB]), (320 * MIB, [10 * MIB])])
def test_sizes_while_measuring(total: int, caps: list[int]) -> None:
    assert measuring_caps(total) == caps


def a_workload(buckets: int = 64, backward_s: float = 0.128) -> Workload:
    """Buckets of 1 MiB that come evenly; nothing before."""
    each = backward_s / buckets
    found = [spread([(256, 256)] * 4, [MIB / 4] * 4, number * each, (number + 1) * each) for number in range(buckets)]
    return Workload(tuple(ReadyBucket(one, one[-1].came_s) for one in found), backward_s, 0.0)


def linear(latency_s: float, bandwidth: float, issue_s: float = 0.0) -> ReductionCosts:
    sizes = (MIB / 32, MIB, 64 * MIB)
    return ReductionCosts(sizes, tuple(latency_s + size / bandwidth for size in sizes), issue_s)


@pytest.mark.parametrize(
    ("costs", "chosen"),
    [
        # All is hidden but the last bucket: the smaller the better.
        (linear(0.0, 2e9), (MIB // 2, MIB // 2)),
        # Each reduction costs more than all of backward: one in all.
        (linear(0.2, 1e12), (100 * MIB, 100 * MIB)),
        # Communication that costs nothing: no reason to leave the default.
        (linear(0.0, 1e15), (MIB, 25 * MIB)),
    ],
)
def test_the_choice(costs: ReductionCosts, chosen: tuple[int, int]) -> None:
    assert choose(predicted_steps(a_workload(), costs)) == chosen


def test_starting_a_bucket_costs_time_on_the_thread_of_backward() -> None:
    free, costly = (predicted_steps(a_workload(), linear(0.0, 1e15, issue_s)) for issue_s in (0.0, 1e-4))
    # The measured buckets were 64, and their starts are in what was measured.
    assert costly[MIB, MIB] == pytest.approx(free[MIB, MIB], rel=1e-3)
    assert costly[100 * MIB, 100 * MIB] == pytest.approx(free[100 * MIB, 100 * MIB] - 63e-4, rel=1e-3)


def test_reductions_that_take_cores_from_the_model_hide_nothing() -> None:
    # Hidden behind backward it would be half the default's; but all of it is taken from backward.
    free = linear(0.0, 64 * MIB / 0.1)
    taking = ReductionCosts(free.nbytes, free.seconds, 0.0, taken=free.seconds)
    assert choose(predicted_steps(a_workload(), free)) != (MIB, 25 * MIB)
    steps = predicted_steps(a_workload(), taking)
    assert choose(steps) == (MIB, 25 * MIB)
    # Measured were buckets of 1 MiB, which have delayed backward already; one in all delays nothing, and is hidden by nothing.
    assert steps[MIB, MIB] == pytest.approx(0.128 + 0.1 / 64, rel=1e-3)
    assert steps[100 * MIB, 100 * MIB] == pytest.approx(0.128 + 0.1 / 64, rel=1e-3)


def test_no_more_is_taken_from_backward_than_it_computes() -> None:
    costs = ReductionCosts((1.0, 64.0 * MIB), (0.0, 1.0), 0.0, taken=(0.0, 1.0))
    assert predicted_steps(a_workload(), costs)[100 * MIB, 100 * MIB] == pytest.approx(0.002 + 1.0, rel=1e-2)


def test_times_without_outliers() -> None:
    assert without_outliers([6.0, 3.0, 9.0, 4.0, 8.0, 28.0]) == (3.0, 3.0, 4.0, 4.0, 8.0, 28.0)


@pytest.mark.parametrize(
    ("busy", "cores", "share"),
    [
        ([1.0, 1.0], ["01", "01"], 1.0),
        ([0.1, 0.1], ["01", "01"], 0.1),
        ([1.5, 1.5], ["01", "01"], 1.0),
        ([0.5, 1.0], ["01", "01"], 0.75),
        ([1, 1], ["01234567", "01234567"], 0.25),
        ([1, 1, 1, 1], ["0123", "4567", "89ab", "cdef"], 0.25),  # each bound to its own
        ([1, 1, 1, 1], ["01", "01", "23", "23"], 1.0),  # bound to sockets
    ],
)
def test_the_share_of_the_cores_that_ranks_keep_busy(busy: list[float], cores: list[str], share: float) -> None:
    sets = [frozenset(int(core, 16) for core in words) for words in cores]
    assert share_of_cores(0, busy, sets) == pytest.approx(share)


def test_a_gain_of_little_is_none() -> None:
    default = (MIB, 25 * MIB)
    assert choose({default: 1.0, (MIB, MIB): 0.96}) == default
    assert choose({default: 1.0, (MIB, MIB): 0.9}) == (MIB, MIB)


# ---- on ranks ----


def a_model() -> torch.nn.Module:
    """3 MiB of parameters; the same in each thread."""
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(12)])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.06, generator=generator)
    return model


def train(ddp: torch.nn.Module, rank: int, steps: int = STEPS) -> list[torch.Tensor]:
    """All gradients of all steps, and the parameters at the end."""
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, 256, generator=generator)).square().mean().backward()
        seen += [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]
        optimizer.step()
    return [*seen, *(parameter.detach().clone() for parameter in ddp.parameters())]


def costing(latency_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of what is measured; other on each rank, as measurements are."""

    def costs(tuning: BucketTuning, share: float) -> ReductionCosts:
        assert 0 <= share <= 1
        factor = 1.0 if tuning._group.rank == 0 else 1e-6
        return ReductionCosts((1.0, 1e9), (factor * latency_s, factor * (latency_s + 1e-6)), 0.0)

    monkeypatch.setattr(BucketTuning, "_measure_costs", costs)


@pytest.mark.ranks
@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize(("latency_s", "buckets"), [(10.0, 1), (0.0, 2)])
def test_gradients_are_those_of_fixed_buckets_before_and_after_the_choice(
    as_view: bool, latency_s: float, buckets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    costing(latency_s, monkeypatch)

    def body(group: ProcessGroup) -> tuple[list[torch.Tensor], list[torch.Tensor], list[float] | None, int]:
        fixed = DistributedDataParallel(a_model(), process_group=group, gradient_as_bucket_view=as_view)
        expected = train(fixed, group.rank)
        tuned = DistributedDataParallel(a_model(), process_group=group, bucket_cap_mb="auto", gradient_as_bucket_view=as_view)
        found = train(tuned, group.rank)
        return expected, found, tuned.tuned_bucket_cap_mb, len(tuned._reducer.buckets)

    results = run_ranks(2, body)
    for expected, found, _, count in results:
        assert count == buckets
        assert len(expected) == len(found)
        assert all(map(torch.equal, expected, found))
    assert all(map(torch.equal, results[0][1], results[1][1]))
    assert results[0][2] == results[1][2] is not None


@pytest.mark.ranks
def test_what_is_chosen_is_said_and_can_be_given_back(caplog: pytest.LogCaptureFixture) -> None:
    def body(group: ProcessGroup) -> tuple[list[float], int, int]:
        ddp = DistributedDataParallel(a_model(), process_group=group, bucket_cap_mb="auto")
        assert ddp.tuned_bucket_cap_mb is None
        train(ddp, group.rank)
        assert ddp.tuned_bucket_cap_mb is not None
        again = DistributedDataParallel(a_model(), process_group=group, bucket_cap_mb_list=ddp.tuned_bucket_cap_mb)
        train(again, group.rank, steps=2)
        return ddp.tuned_bucket_cap_mb, len(ddp._reducer.buckets), len(again._reducer.buckets)

    with caplog.at_level(logging.INFO, logger="syncline.ddp"):
        (first, buckets, again), (second, _, _) = run_ranks(2, body)
    assert first == second
    assert buckets == again
    (line,) = [record.getMessage() for record in caplog.records if "auto" in record.getMessage()]
    assert "ms until the gradients are there" in line
    assert f"bucket_cap_mb_list=[{first[0]:g}, {first[1]:g}]" in line


def with_hook(ddp: DistributedDataParallel) -> None:
    def average(group: ProcessGroup, bucket: object) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()  # type: ignore[attr-defined]
        return group.all_reduce(buffer.div_(group.size), async_op=True).get_future().then(lambda _: buffer)

    ddp.register_comm_hook(ddp._group, average)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (with_hook, "a communication hook reduces the gradients"),
        (lambda ddp: ddp.join_hook(), "ranks may have different numbers of steps"),
    ],
)
def test_where_it_cannot_measure_the_buckets_stay_and_a_line_says_why(
    prepare: Callable[[DistributedDataParallel], object], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(a_model(), process_group=group, bucket_cap_mb="auto")
        prepare(ddp)
        train(ddp, group.rank)
        assert ddp.tuned_bucket_cap_mb is None

    with caplog.at_level(logging.INFO, logger="syncline.ddp"):
        run_ranks(2, body)
    assert len([record for record in caplog.records if why in record.getMessage()]) == 1


@pytest.mark.parametrize("arguments", [{"find_unused_parameters": True}, {"bucket_cap_mb_list": [1]}])
def test_arguments_that_contradict_it(arguments: dict[str, object]) -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match=r"pass a number of MiB|found both"):
            DistributedDataParallel(a_model(), process_group=group, bucket_cap_mb="auto", **arguments)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="found 'best'; bucket_cap_mb=\"auto\" finds one"):
            DistributedDataParallel(a_model(), process_group=group, bucket_cap_mb="best")

    run_ranks(1, body)


@pytest.mark.ranks
def test_ranks_that_disagree_about_it_are_told_so() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(RuntimeError, match="bucket_cap_mb"):
            DistributedDataParallel(a_model(), process_group=group, bucket_cap_mb="auto" if group.rank else 1.0)

    run_ranks(2, body)


def test_sizes_cannot_be_changed_before_the_order_of_gradients_is_known() -> None:
    def body(group: ProcessGroup) -> None:
        ddp = DistributedDataParallel(a_model(), process_group=group)
        with pytest.raises(MisuseError, match="call it after a reduced backward"):
            ddp._reducer.change_bucket_caps([MIB])

    run_ranks(1, body)
