"""Elastic training: which samples a step takes, what it agrees on, and when it ends. Ranks are threads here."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from syncline.collectives import (
    BackendUnavailableError,
    CollectiveTimeout,
    DisagreementError,
    InvalidArgumentError,
    MisuseError,
    ProcessGroup,
    RankLostError,
    ReduceOp,
    TransportError,
)
from syncline.collectives.testing.ranks import run_ranks
from syncline.collectives.transports.threads import InProcessGroup, create_groups
from syncline.ddp import DistributedDataParallel, Elastic, ElasticSampler
from syncline.ddp.elastic_sampler import batch_bounds, share_bounds
from test_support.waiting import wait_until

# ---- the sampler ----


@pytest.mark.parametrize(("samples", "batches"), [(1437, 15), (96, 1), (97, 2), (7, 7)])
def test_batches_take_each_sample_once_and_differ_by_one_at_most(samples: int, batches: int) -> None:
    bounds = [batch_bounds(number, batches, samples) for number in range(batches)]
    assert [begin for begin, _ in bounds] == [0, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == samples
    sizes = [end - begin for begin, end in bounds]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_shares_take_each_sample_of_a_batch_once_and_differ_by_one_at_most(ranks: int) -> None:
    bounds = [share_bounds(rank, ranks, 100, 196) for rank in range(ranks)]
    assert [begin for begin, _ in bounds] == [100, *(end for _, end in bounds[:-1])]
    assert bounds[-1][1] == 196
    sizes = [end - begin for begin, end in bounds]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("ranks_at_batch", [[4, 4, 3, 3, 1], [1, 2, 3, 4, 4], [2, 2, 2, 2, 2]])
def test_no_sample_of_an_epoch_is_lost_or_used_twice_whoever_is_there(ranks_at_batch: list[int]) -> None:
    used: list[int] = []
    sampler = ElasticSampler(49, 10, seed=1)
    for ranks in ranks_at_batch:
        where, weight = sampler.state_dict(), 0.0
        for rank in range(ranks):
            mine = ElasticSampler(49, 10, seed=1)
            mine.load_state_dict(where)
            mine.divide(rank, ranks)
            used += next(iter(mine))
            weight += mine.weight
        assert weight == pytest.approx(ranks)
        sampler.advance()
    assert sorted(used) == list(range(49))
    assert used != list(range(49))
    assert sampler.is_exhausted
    assert not list(sampler)


def test_an_epoch_begins_anew_only_if_it_is_another() -> None:
    sampler = ElasticSampler(8, 4)
    first = list(sampler)
    sampler.advance()
    sampler.set_epoch(0)
    assert list(sampler) == first[1:]
    sampler.set_epoch(1)
    assert len(list(sampler)) == 2
    assert list(sampler) != first
    assert list(ElasticSampler(4, 2, shuffle=False)) == [[0, 1], [2, 3]]


def test_batches_too_small_for_the_ranks_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="at least one sample for each of 4 ranks"):
        ElasticSampler(9, 3).divide(0, 4)
    with pytest.raises(InvalidArgumentError, match="at least one batch"):
        ElasticSampler(0, 3)
    with pytest.raises(InvalidArgumentError, match="at least one batch"):
        ElasticSampler(2, 3, drop_last=True)


def test_the_rest_may_be_left_out() -> None:
    batches = list(ElasticSampler(11, 4, drop_last=True))
    assert [len(batch) for batch in batches] == [4, 4]
    assert len({index for batch in batches for index in batch}) == 8
    assert {index for epoch in range(20) for batch in _epoch(11, epoch) for index in batch} == set(range(11))


@pytest.mark.parametrize(
    ("change", "found"),
    [({"batch_size": 16}, "batch_size=8, this one has batch_size=16"), ({"seed": 1}, "seed=0, this one has seed=1")],
)
def test_a_state_from_within_an_epoch_fits_the_same_batches_only(change: dict[str, int], found: str) -> None:
    saved = ElasticSampler(samples=96, batch_size=8)
    other = ElasticSampler(**{"samples": 96, "batch_size": 8, **change})
    other.load_state_dict(saved.state_dict())  # at the beginning of an epoch, no batch is applied yet
    saved.advance()
    with pytest.raises(MisuseError, match=found):
        other.load_state_dict(saved.state_dict())
    assert other.applied == 0


@pytest.mark.parametrize("batch_size", [4, 16])
def test_a_state_from_the_end_of_an_epoch_fits_other_batches(batch_size: int) -> None:
    saved, other = ElasticSampler(samples=96, batch_size=8), ElasticSampler(samples=96, batch_size=batch_size)
    for _ in saved:
        saved.advance()
    other.load_state_dict(saved.state_dict())
    assert other.is_exhausted
    other.set_epoch(1)
    assert len(list(other)) == 96 // batch_size


def test_numpys_integers_become_ints_in_a_saved_state() -> None:
    sampler = ElasticSampler(np.int64(8), np.int64(4), seed=np.int64(1))  # type: ignore[arg-type]
    assert {type(value) for value in sampler.state_dict().values()} == {int, bool}


def _epoch(samples: int, epoch: int) -> list[list[int]]:
    sampler = ElasticSampler(samples, 4, drop_last=True)
    sampler.set_epoch(epoch)
    return list(sampler)


# ---- training ----

STEPS = 6

T = TypeVar("T")


class Training:
    """One rank's: a linear model whose gradient is the mean of the samples of a batch, so that its weights are known."""

    def __init__(self, group: ProcessGroup, sampler: ElasticSampler | None = None, **limits: object) -> None:
        self.model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), process_group=group)
        torch.nn.init.zeros_(self.model.module.weight)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.sampler = sampler or ElasticSampler(12 * STEPS, 12)
        samples = TensorDataset(torch.arange(12.0 * STEPS, dtype=torch.float64).float().view(-1, 1))
        self.loader = DataLoader(samples, batch_sampler=self.sampler)
        self.bodies_that_ended = 0
        self.elastic = Elastic(self.model, self.optimizer, self.sampler, silence_timeout_s=20, **limits)  # type: ignore[arg-type]

    def run(self, at: Callable[[str, int], None] = lambda moment, step: None) -> float:
        for (batch,) in self.elastic.batches(self.loader):
            step = self.elastic.applied_steps
            with self.elastic.step():
                self.optimizer.zero_grad()
                at("forward", step)
                loss = self.model(batch).mean() * self.sampler.weight
                at("backward", step)
                loss.backward()
                at("agreement", step)
                self.optimizer.step()
                self.bodies_that_ended += 1
                at("applied", step)
            at("between", step)
        return float(self.model.module.weight.detach())


# The sum over the batches of their means, with a minus: each sample counts one twelfth, exactly once.
FINAL_WEIGHT = -sum(range(12 * STEPS)) / 12


class Lost(BaseException):
    """A thread that plays a rank that is killed ends."""


def on_ranks(size: int, rank_body: Callable[[int], T]) -> list[T | None]:
    """Run the ranks as threads. Return what each rank returns, and None for a rank that is lost."""

    def end(rank: int) -> T | None:
        try:
            return rank_body(rank)
        except Lost:
            return None

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(end, range(size)))


def train_and_lose(
    victims: dict[int, tuple[str, int]], size: int = 3, **limits: object
) -> tuple[list[object], list[Training | None]]:
    groups = create_groups(size, timeout_s=60)
    trainings: list[Training | None] = [None] * size

    def rank_body(rank: int) -> object:
        group: InProcessGroup = groups[rank]
        training = trainings[rank] = Training(group, **limits)

        def at(moment: str, step: int) -> None:
            if victims.get(rank) == (moment, step):
                present = training.model.join_process_group
                assert isinstance(present, InProcessGroup)
                present.lose()
                raise Lost

        try:
            return training.run(at)
        except (Lost, TransportError) as ended:
            return ended

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank_body, range(size))), trainings


def test_without_a_loss_it_trains_as_ever() -> None:
    weights = run_ranks(3, lambda group: Training(group).run())
    assert weights == [pytest.approx(FINAL_WEIGHT)] * 3
    assert len(set(weights)) == 1


@pytest.mark.parametrize("moment", ["forward", "backward", "agreement", "applied"])
@pytest.mark.parametrize("victim", [0, 1])
def test_who_is_left_applies_each_batch_once(moment: str, victim: int) -> None:
    ends, trainings = train_and_lose({victim: (moment, 2)})
    left = [rank for rank in range(3) if rank != victim]
    assert [ends[rank] for rank in left] == [pytest.approx(FINAL_WEIGHT)] * 2
    for rank in left:
        training = trainings[rank]
        assert training is not None
        assert (training.elastic.lost_ranks, training.elastic.applied_steps) == ([victim], STEPS)
        assert training.bodies_that_ended == STEPS  # a scheduler's step, say, belongs behind the optimizer's
        assert len(training.elastic.recovery_s) == 1
        assert training.model.join_process_group.size == 2


def test_losses_one_after_the_other_down_to_a_single_rank() -> None:
    ends, trainings = train_and_lose({0: ("backward", 1), 2: ("applied", 3)})
    assert ends[1] == pytest.approx(FINAL_WEIGHT)
    assert trainings[1] is not None
    assert trainings[1].elastic.lost_ranks == [0, 2]


class BadEnding:
    """An agreement of three ranks that ends well on one, fails on rank 2, and is the last thing that another does."""

    def __init__(self, at: int, dies: int) -> None:
        self._at, self._dies = at, dies
        self._agreed = threading.Barrier(2)
        self.failed: list[int] = []

    def befalls(self, training: Training, rank: int, group: InProcessGroup) -> None:
        """Let it befall the `at`-th agreement of this rank, counted from 1."""
        agree, agreements = training.elastic._sum_over_ranks, itertools.count(1)

        def ends_badly(number: int) -> int:
            agreed = agree(number)
            if next(agreements) == self._at and rank in (2, self._dies):
                self._agreed.wait(30)
                if rank == 2:
                    self.failed.append(rank)
                    raise TransportError("a connection broke after the others had agreed")
                group.lose()
                raise Lost
            return agreed

        training.elastic._sum_over_ranks = ends_badly  # type: ignore[method-assign]


def test_a_step_that_one_rank_has_applied_is_applied_by_all_that_live() -> None:
    """The agreement ends well on ranks 0 and 1 and fails on 2, because 0 dies when it has agreed."""
    groups = create_groups(3, timeout_s=60)
    ending = BadEnding(at=3, dies=0)

    def rank_body(rank: int) -> object:
        training = Training(groups[rank])
        ending.befalls(training, rank, groups[rank])
        return training.run()

    ends = on_ranks(3, rank_body)
    assert ends[1:] == [pytest.approx(FINAL_WEIGHT)] * 2
    assert ending.failed == [2]


@pytest.mark.parametrize("died_at", [STEPS, STEPS + 1], ids=["in the last step", "at the end of the epoch"])
def test_nobody_ends_an_epoch_whose_last_step_others_would_do_again(died_at: int) -> None:
    """The last agreement, or the one on the end, ends well on rank 0 and fails on 2, because 1 dies when it has agreed."""
    groups = create_groups(3, timeout_s=60)
    ending = BadEnding(at=died_at, dies=1)

    def rank_body(rank: int) -> object:
        training = Training(groups[rank])
        ending.befalls(training, rank, groups[rank])
        weight = training.run()
        training.sampler.set_epoch(1)
        training.run()  # those that are left go on together
        return weight, training.elastic.applied_steps, training.model.join_process_group.size

    ends = on_ranks(3, rank_body)
    assert ends[0] == ends[2] == (pytest.approx(FINAL_WEIGHT), 2 * STEPS, 2)
    assert ending.failed == [2]


def test_the_end_of_an_epoch_puts_nothing_back() -> None:
    """A loss that is noticed there leaves what the last step has changed."""
    groups = create_groups(2, timeout_s=60)

    def rank_body(rank: int) -> object:
        model = DistributedDataParallel(torch.nn.BatchNorm1d(1), process_group=groups[rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        elastic = Elastic(model, optimizer, ElasticSampler(8, 8), silence_timeout_s=20)
        for _ in elastic.batches([0]):
            with elastic.step():
                model(torch.arange(4.0).view(-1, 1)).square().sum().backward()
                optimizer.step()
            if rank == 1:
                groups[1].lose()
                return None
        return float(model.module.num_batches_tracked), len(elastic.recovery_s), model.module.weight.grad is None

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(rank_body, range(2))) == [(1.0, 1, False), None]


def test_a_step_costs_one_small_collective_more() -> None:
    def body(group: ProcessGroup) -> None:
        assert isinstance(group, InProcessGroup)
        training = Training(group)
        batch, called = torch.ones(6, 1), []
        for is_elastic in (False, False, False, True):  # at first buckets are built anew
            before = len(group.recorder.records())
            with training.elastic.step() if is_elastic else nullcontext():
                training.model(batch).mean().backward()
                if is_elastic:
                    training.optimizer.step()
            called.append([record.name for record in group.recorder.records()[before:]])
        assert called[2] == ["all_reduce"]
        assert called[3] == ["all_reduce", "all_reduce"]

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("change", "found"),
    [({"seed": 1}, "epoch 0 .* seed=1 "), ({"epoch": 2}, "epoch 2 "), ({"applied": 1}, "batch 1 of epoch 0 ")],
)
def test_ranks_whose_samplers_differ_are_told_so(change: dict[str, int], found: str) -> None:
    def body(group: ProcessGroup) -> None:
        mine = change if group.rank == 1 else {}
        sampler = ElasticSampler(12 * STEPS, 12, seed=mine.get("seed", 0))
        sampler.load_state_dict({"epoch": 0, "applied": 0, **mine})
        training = Training(group, sampler)
        with pytest.raises(DisagreementError, match=rf"(?s)rank 0: .*batch 0 of epoch 0 .*rank 1: .*{found}"):
            training.run()

    run_ranks(2, body)


def test_without_shuffle_each_rank_may_have_its_own_seed() -> None:
    def body(group: ProcessGroup) -> None:
        training = Training(group, ElasticSampler(12 * STEPS, 12, shuffle=False, seed=group.rank))
        assert training.run() == FINAL_WEIGHT

    run_ranks(2, body)


def test_what_a_step_changed_is_put_back_before_it_is_done_again() -> None:
    groups = create_groups(2, timeout_s=60)
    seen: list[float] = []

    def rank_body(rank: int) -> None:
        model = DistributedDataParallel(torch.nn.BatchNorm1d(1), process_group=groups[rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = ElasticSampler(8, 8)
        elastic = Elastic(model, optimizer, sampler, silence_timeout_s=20)
        for _ in elastic.batches([0]):
            with elastic.step():
                if rank == 0:
                    seen.append(float(model.module.num_batches_tracked))
                model(torch.arange(4.0).view(-1, 1)).square().sum().backward()
                if rank == 1:
                    groups[1].lose()
                    raise Lost
                optimizer.step()
        assert float(model.module.num_batches_tracked) == 1

    on_ranks(2, rank_body)
    assert seen == [0, 0]


def test_layers_added_before_a_step_that_is_done_again_are_the_same_on_all_ranks() -> None:
    groups = create_groups(3, timeout_s=60)

    def rank_body(rank: int) -> list[float]:
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(1, 1)), process_group=groups[rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        elastic = Elastic(model, optimizer, ElasticSampler(6, 6), silence_timeout_s=20)
        added = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(added.weight, 1.0 + rank)
        model.module.append(added)
        optimizer.add_param_group({"params": list(added.parameters())})
        for _ in elastic.batches([0]):
            with elastic.step():
                loss = model(torch.ones(2, 1)).mean()  # shares the new layer
                if rank == 2:
                    groups[2].lose()
                    raise Lost
                loss.backward()
                optimizer.step()
        return [float(parameter.detach()) for parameter in model.parameters()]

    first, second, _ = on_ranks(3, rank_body)
    assert first == second


def train_with_scaler(group: ProcessGroup, at: Callable[[str, int], None], *, overflow_at: int | None) -> tuple[float, ...]:
    """Train with a GradScaler and a scheduler. Return weight, scale, learning rate, and the number of applied steps."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), process_group=group)
    torch.nn.init.zeros_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    sampler = ElasticSampler(24, 4)
    elastic = Elastic(model, optimizer, sampler, stateful=[scheduler, scaler], silence_timeout_s=20)
    for batch in elastic.batches(DataLoader(torch.arange(24.0).view(-1, 1), batch_sampler=sampler)):
        step = elastic.applied_steps
        with elastic.step():
            optimizer.zero_grad()
            loss = model(batch).mean() * sampler.weight * (float("inf") if step == overflow_at else 1.0)
            scaler.scale(loss).backward()
            at("agreement", step)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            at("end", step)
    weight, rate = float(model.module.weight.detach()), optimizer.param_groups[0]["lr"]
    return weight, scaler.get_scale(), rate, scheduler.get_last_lr()[0], elastic.applied_steps


@pytest.mark.parametrize(("moment", "overflow_at"), [("end", 2), ("agreement", 2), ("agreement", None)])
def test_a_repeated_step_scales_and_schedules_once(moment: str, overflow_at: int | None) -> None:
    """With an infinite gradient the scaler calls no `optimizer.step()`, so the ranks agree at the end of the body."""
    expected = run_ranks(1, lambda group: train_with_scaler(group, lambda *_: None, overflow_at=overflow_at))[0]
    assert expected[1:] == (1024.0 if overflow_at is None else 512.0, 0.5**6, 0.5**6, 6)
    groups = create_groups(2, timeout_s=60)

    def rank_body(rank: int) -> object:
        def at(*here: object) -> None:
            if rank == 1 and here == (moment, 2):
                groups[1].lose()
                raise Lost

        return train_with_scaler(groups[rank], at, overflow_at=overflow_at)

    assert on_ranks(2, rank_body) == [pytest.approx(expected), None]


def accumulate(
    group: ProcessGroup,
    at: Callable[[int, ProcessGroup], None] = lambda *_: None,
    *,
    every: int = 2,
    is_local: bool = False,
    **options: Any,
) -> float:
    """Train on numbers whose means are the gradients. The optimizer steps in every second step, or less often."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), process_group=group, **options)
    torch.nn.init.zeros_(model.module.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sampler = ElasticSampler(24, 4)
    elastic = Elastic(model, optimizer, sampler, silence_timeout_s=20, give_up_s=60, admit_every=1)
    for batch in elastic.batches(DataLoader(torch.arange(24.0).view(-1, 1), batch_sampler=sampler)):
        step = elastic.applied_steps
        steps_now = step % every == every - 1
        with elastic.step():
            with model.no_sync() if is_local and not steps_now else nullcontext():
                loss = model(batch).mean() * sampler.weight
                at(step, model.join_process_group)
                loss.backward()
            if steps_now:
                optimizer.step()
                optimizer.zero_grad()
    return float(model.module.weight.detach())


@pytest.mark.parametrize("lost_at", [2, 3])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}])
def test_gradients_that_steps_accumulate_survive_a_loss(lost_at: int, options: dict[str, bool]) -> None:
    groups = create_groups(2, timeout_s=60)

    def rank_body(rank: int) -> float:
        def at(step: int, _: ProcessGroup) -> None:
            if rank == 1 and step == lost_at:
                groups[1].lose()
                raise Lost

        return accumulate(groups[rank], at, **options)

    assert on_ranks(2, rank_body) == [pytest.approx(-sum(range(24)) / 4), None]


def test_a_newcomer_gets_the_gradients_that_steps_accumulate() -> None:
    """The newcomer comes in after step 0, whose gradients the optimizer uses in step 2."""
    groups = create_groups(2, timeout_s=60)
    present = [*groups, groups[0].newcomer()]

    def rank_body(number: int) -> float:
        def at(step: int, group: ProcessGroup) -> None:
            if number == 0 and step == 0:
                wait_until(lambda: group.newcomers() == 1)

        return accumulate(present[number], at, every=3)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(rank_body, range(3))) == [pytest.approx(-sum(range(24)) / 4)] * 3


def test_gradients_of_an_optimizer_that_steps_seldom_survive_a_loss() -> None:
    groups = create_groups(2, timeout_s=60)

    def rank_body(rank: int) -> list[float]:
        model = DistributedDataParallel(torch.nn.Linear(1, 1), process_group=groups[rank])
        for parameter in model.parameters():
            torch.nn.init.zeros_(parameter)
        often, seldom = (torch.optim.SGD([parameter], lr=1.0) for parameter in model.parameters())
        sampler = ElasticSampler(24, 4)
        elastic = Elastic(model, [often, seldom], sampler, silence_timeout_s=20)
        for batch in elastic.batches(DataLoader(torch.arange(24.0).view(-1, 1), batch_sampler=sampler)):
            step = elastic.applied_steps
            with elastic.step():
                often.zero_grad()
                if rank == 1 and step == 3:
                    groups[1].lose()
                    raise Lost
                (model(batch).mean() * sampler.weight).backward()
                often.step()
                if step % 2:
                    seldom.step()
                    seldom.zero_grad()
        return [float(parameter.detach()) for parameter in model.parameters()]

    # The gradient of the weight is the mean of a batch, the gradient of the bias is 1.
    assert on_ranks(2, rank_body) == [pytest.approx([-sum(range(24)) / 4, -6.0]), None]


def clear_to_zeros(group: ProcessGroup, at: Callable[[int, ProcessGroup], None] = lambda *_: None) -> list[float]:
    """Train with momentum, which moves the bias also after step 1, when it is frozen and its gradient stays zero."""
    model = DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
    sampler = ElasticSampler(24, 4)
    elastic = Elastic(model, optimizer, sampler, silence_timeout_s=20, give_up_s=60, admit_every=1)
    for batch in elastic.batches(DataLoader(torch.arange(24.0).view(-1, 1), batch_sampler=sampler)):
        step = elastic.applied_steps
        if step == 2:
            model.module.bias.requires_grad_(False)
        with elastic.step():
            optimizer.zero_grad(set_to_none=False)
            loss = model(batch).mean() * sampler.weight
            at(step, model.join_process_group)
            loss.backward()
            optimizer.step()
    return [float(parameter.detach()) for parameter in model.parameters()]


CLEARED_TO_ZEROS = (1 + 1.5) * 1 + 1.5 * (
    0.5 + 0.25 + 0.125 + 0.0625
)  # how far the bias goes, whose gradient is 1 in two steps


def test_a_repeated_step_moves_what_has_a_gradient_of_zeros() -> None:
    groups = create_groups(2, timeout_s=60)

    def rank_body(rank: int) -> list[float]:
        def at(step: int, _: ProcessGroup) -> None:
            if rank == 1 and step == 3:
                groups[1].lose()
                raise Lost

        return clear_to_zeros(groups[rank], at)

    expected = run_ranks(1, clear_to_zeros)[0]
    assert expected[1] == pytest.approx(-CLEARED_TO_ZEROS)
    assert on_ranks(2, rank_body) == [pytest.approx(expected), None]


def test_a_newcomer_moves_what_has_a_gradient_of_zeros() -> None:
    """The newcomer comes in after step 3. It never computes a gradient of the bias."""
    groups = create_groups(2, timeout_s=60)
    is_time = threading.Event()

    def rank_body(number: int) -> list[float]:
        def at(step: int, group: ProcessGroup) -> None:
            if number == 0 and step == 3:
                is_time.set()
                wait_until(lambda: group.newcomers() == 1)

        if number < 2:
            return clear_to_zeros(groups[number], at)
        assert is_time.wait(30)
        return clear_to_zeros(groups[0].newcomer(), at)

    with ThreadPoolExecutor(3) as threads:
        ends = list(threads.map(rank_body, range(3)))
    assert ends[0] == ends[1] == ends[2]
    assert ends[0][1] == pytest.approx(-CLEARED_TO_ZEROS)


def test_a_step_that_ends_with_gradients_of_this_rank_alone_is_refused() -> None:
    """They would be lost with their rank."""

    def body(group: ProcessGroup) -> None:
        problem = "put all backwards of one optimizer's step into one"
        with pytest.raises(MisuseError, match=problem) as caught:
            accumulate(group, is_local=True)
        assert len(str(caught.value)) <= 200

    run_ranks(2, body)


def test_gradients_of_this_rank_alone_may_stay_if_no_step_needs_them() -> None:
    def body(group: ProcessGroup) -> float:
        training = Training(group)

        def at(moment: str, step: int) -> None:
            batch = torch.ones(2, 1)
            with training.model.no_sync():
                if moment == "forward":  # several backwards of one step
                    training.model(batch).mean().backward()
                    training.optimizer.zero_grad()
                elif moment == "applied":  # a look at the model, whose gradients the next step drops
                    training.model(batch).mean().backward()

        return training.run(at)

    assert run_ranks(2, body) == [pytest.approx(FINAL_WEIGHT)] * 2


# ---- what a hook and others remember ----


class HookState:
    """How many buckets a hook has seen, which must be the same on all ranks, and an error of each rank's own."""

    def __init__(self, rank: int) -> None:
        self.seen = 0
        self.errors = {"weight": torch.tensor([float(rank)])}

    def state_dict(self) -> dict[str, Any]:
        return {"iter": self.seen, "rank": 0, "world_size": 3, "errors": self.errors}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.errors = state["iter"], state["errors"]
        assert state["rank"] is state["world_size"] is None


def use_hook(model: DistributedDataParallel, rank: int) -> HookState:
    def average(state: HookState, bucket: Any) -> Any:
        state.seen += 1
        buffer = bucket.buffer()
        work = model.join_process_group.all_reduce(buffer, ReduceOp.AVG, async_op=True)
        return work.get_future().then(lambda done: (done.value(), buffer)[1])

    state = HookState(rank)
    model.register_comm_hook(state, average)
    return state


def test_hooks_that_a_failed_step_reached_on_some_ranks_only_go_on_alike() -> None:
    groups = create_groups(3, timeout_s=60)

    def rank_body(rank: int) -> object:
        training = Training(groups[rank])
        hook = use_hook(training.model, rank)
        breaks = [2]

        def at(moment: str, step: int) -> None:
            if rank == 2 and moment == "forward" and step in breaks:
                breaks.clear()
                raise TransportError("a connection of this rank broke")  # the others wait in the hook's all_reduce

        return training.run(at), hook.seen, float(hook.errors["weight"]), len(training.elastic.recovery_s)

    with ThreadPoolExecutor(3) as threads:
        ends = list(threads.map(rank_body, range(3)))
    assert [weight for weight, *_ in ends] == [pytest.approx(FINAL_WEIGHT)] * 3
    assert len({seen for _, seen, *_ in ends}) == 1
    assert [error for *_, error, _ in ends] == [0, 1, 2]
    assert [recoveries for *_, recoveries in ends] == [1, 1, 1]


def test_a_newcomer_gets_what_is_stateful_and_one_for_whom_there_is_no_sample_waits() -> None:
    """A batch has three samples, so one of two newcomers is let in."""
    groups = create_groups(2, timeout_s=60)
    newcomers = [groups[0].newcomer(), groups[0].newcomer()]
    over = threading.Event()

    def rank_body(number: int) -> object:
        group = groups[number] if number < 2 else newcomers[number - 2]
        model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False), process_group=group)
        torch.nn.init.zeros_(model.module.weight)
        hook = use_hook(model, number)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        sampler = ElasticSampler(24, 3, shuffle=False)
        give_up_s = 60.0 if number < 2 else 10.0
        try:
            elastic = Elastic(
                model,
                optimizer,
                sampler,
                stateful=[scheduler],
                silence_timeout_s=60,
                give_up_s=give_up_s,
                admit_every=1,
            )
        except CollectiveTimeout:
            assert over.wait(60)
            return "waited"
        for batch in elastic.batches(DataLoader(torch.arange(24.0).view(-1, 1), batch_sampler=sampler)):
            if number == 0 and elastic.applied_steps == 0:
                wait_until(lambda: model.join_process_group.newcomers() == 2)
            with elastic.step():
                optimizer.zero_grad()
                (model(batch).mean() * sampler.weight).backward()
                optimizer.step()
                scheduler.step()
        over.set()
        return float(model.module.weight.detach()), scheduler.last_epoch, hook.seen, elastic.applied_steps

    with ThreadPoolExecutor(4) as threads:
        ends = list(threads.map(rank_body, range(4)))
    assert ends.count("waited") == 1
    first, *others = [end for end in ends if end != "waited"]
    assert others == [first, first]
    assert first[1:] == (8, 8, 8)  # type: ignore[index]


def test_a_newcomer_whose_optimizer_has_parameters_of_another_model_is_refused_before_it_waits() -> None:
    (member,) = create_groups(1)
    model = DistributedDataParallel(torch.nn.Linear(1, 1), process_group=member.newcomer())
    optimizer = torch.optim.SGD([*model.parameters(), *torch.nn.Linear(1, 1).parameters()])
    with pytest.raises(MisuseError, match="has parameters that are not in the model"):
        Elastic(model, optimizer, ElasticSampler(4, 2))


def test_a_newcomer_alone_without_the_state_ends_without_further_recoveries() -> None:
    (member,) = create_groups(1, timeout_s=60)
    newcomer = member.newcomer()

    def let_in_and_end() -> None:
        wait_until(lambda: member.newcomers() == 1)
        admitted = member.admit(silence_timeout_s=60)
        assert isinstance(admitted, InProcessGroup)
        admitted.lose()

    with ThreadPoolExecutor(1) as threads:
        ended = threads.submit(let_in_and_end)
        with pytest.raises(RankLostError, match="all ranks that had the state of the training are lost"):
            Training(newcomer, give_up_s=20.0)
        ended.result()


@pytest.mark.parametrize(
    ("theirs", "own", "difference"),
    [
        ("hook", "plain", r"communication hook: none, and the other ranks .*average\(HookState\)"),
        ("plain", "hook", r"communication hook: .*average\(HookState\), and the other ranks none"),
        ("plain", "double", r"'weight': torch.float64\[1, 1\], and the other ranks torch.float32\[1, 1\]"),
        ("plain", "wide", r"'weight': torch.float32\[2, 1\], and the other ranks torch.float32\[1, 1\]"),
        ("plain", "bias", r"'bias': torch.float32\[1\], and the other ranks none"),
        ("plain", "adam", r"optimizers \(parameters in groups\): Adam \[1\], and the other ranks SGD \[1\]"),
        ("plain", "seed", r"seed of the sampler: 5, and the other ranks 0"),
        ("plain", "size", r"batch_size of the sampler: 18, and the other ranks 12"),
        ("plain", "groups", r"optimizers \(parameters in groups\): SGD \[1, 0\], and the other ranks SGD \[1\]"),
    ],
)
def test_a_newcomer_with_another_script_is_refused_and_the_others_go_on(theirs: str, own: str, difference: str) -> None:
    groups = create_groups(2, timeout_s=60)
    newcomer = groups[0].newcomer()
    joined: list[InProcessGroup] = []

    def others(rank: int) -> tuple[float, list[int], int]:
        training = Training(groups[rank], admit_every=1, max_failures=0)
        if theirs == "hook":
            use_hook(training.model, rank)

        def at(moment: str, step: int) -> None:
            if rank == 0 and (moment, step) == ("forward", 0):
                wait_until(lambda: groups[0].newcomers() == 1)

        return training.run(at), training.elastic.lost_ranks, training.model.join_process_group.size

    def join(group: InProcessGroup) -> str:
        admit = group.admit

        def noted(**options: Any) -> InProcessGroup:
            joined.append(admit(**options))
            return joined[0]

        group.admit = noted  # type: ignore[method-assign]
        module = torch.nn.Linear(1, 2 if own == "wide" else 1, bias=own == "bias")
        model = DistributedDataParallel(module.double() if own == "double" else module, process_group=group)
        if own == "hook":
            use_hook(model, 2)
        optimizer = (torch.optim.Adam if own == "adam" else torch.optim.SGD)(model.parameters(), lr=1.0)
        if own == "groups":
            optimizer.add_param_group({"params": []})
        sampler = ElasticSampler(12 * STEPS, 18 if own == "size" else 12, seed=5 if own == "seed" else 0)
        with pytest.raises(MisuseError, match=difference) as caught:
            Elastic(model, optimizer, sampler, give_up_s=60)
        joined[0].lose()  # the newcomer's process ends
        return str(caught.value)

    with ThreadPoolExecutor(3) as threads:
        refusal = threads.submit(join, newcomer)
        assert list(threads.map(others, range(2))) == [(pytest.approx(FINAL_WEIGHT), [], 2)] * 2
        assert len(refusal.result()) <= 200


def test_a_step_that_ends_while_the_model_is_frozen_and_in_evaluation_is_repeated_as_it_began() -> None:
    groups = create_groups(2, timeout_s=60)

    def train(group: ProcessGroup, rank: int = 0) -> list[float]:
        model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(1, 1), Halved()), process_group=group)
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = ElasticSampler(24, 4)
        elastic = Elastic(model, optimizer, sampler, silence_timeout_s=20, give_up_s=60)
        for batch in elastic.batches(DataLoader(torch.arange(24.0).view(-1, 1), batch_sampler=sampler)):
            with elastic.step():
                optimizer.zero_grad()
                assert model.training
                (model(batch).mean() * sampler.weight).backward()
                model.requires_grad_(False)
                model.eval()
                if rank == 1 and elastic.applied_steps == 2:
                    groups[1].lose()
                    raise Lost
                group = model.join_process_group
                group.all_reduce(torch.ones(1))  # fails on rank 0
                model.requires_grad_(True)
                model.train()
                optimizer.step()
        return [float(parameter.detach()) for parameter in model.parameters()]

    expected = run_ranks(1, train)[0]
    assert on_ranks(2, lambda rank: train(groups[rank], rank)) == [pytest.approx(expected), None]


@pytest.mark.parametrize("frozen", ["a part", "the whole model"])
def test_a_step_that_freezes_is_undone_on_all_alike_if_only_some_are_in_the_agreement(frozen: str) -> None:
    groups = create_groups(3, timeout_s=60)

    def train(group: ProcessGroup, rank: int = 0) -> list[float]:
        module = torch.nn.Linear(1, 1)
        model = DistributedDataParallel(module, process_group=group)
        for parameter in model.parameters():
            torch.nn.init.ones_(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = ElasticSampler(24, 4)
        elastic = Elastic(model, optimizer, sampler, silence_timeout_s=20, give_up_s=60)
        has_failed = False
        for batch in elastic.batches(DataLoader(torch.arange(24.0).view(-1, 1), batch_sampler=sampler)):
            with elastic.step():
                optimizer.zero_grad()
                (model(batch).mean() * sampler.weight).backward()
                (module.bias if frozen == "a part" else module).requires_grad_(False)
                if rank == 2 and elastic.applied_steps == 2:
                    groups[2].lose()
                    raise Lost
                if rank == 1 and elastic.applied_steps == 2 and not has_failed:
                    has_failed = True
                    raise TransportError("a connection broke")  # before the agreement, in which rank 0 waits
                optimizer.step()
                module.requires_grad_(True)
        return [float(parameter.detach()) for parameter in model.parameters()]

    expected = run_ranks(1, train)[0]
    assert on_ranks(3, lambda rank: train(groups[rank], rank)) == [pytest.approx(expected), pytest.approx(expected), None]


def test_steps_without_batches_may_follow_a_loop_over_batches() -> None:
    def body(group: ProcessGroup) -> int:
        training = Training(group)
        for _ in training.elastic.batches(training.loader):
            with training.elastic.step():
                pass
        with training.elastic.step():
            pass
        return training.elastic.applied_steps

    assert run_ranks(1, body) == [STEPS + 1]


class Halved(torch.nn.Module):
    """Halves its input, but only in evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.training else x / 2


class Averaging(torch.nn.Module):
    """Subtracts a moving average, which is None until the first forward, and drops what only the first forwards need."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", None)
        self.register_buffer("same_average", None)
        self.made = torch.ones(1)  # becomes a buffer in the first forward
        self.register_buffer("left", torch.ones(1))
        self.register_buffer("right", self.left)  # another tensor from the first forward on
        self.register_buffer("warm_up", torch.ones(1))
        self.register_buffer("seed", torch.ones(1))
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.average = x.mean() if self.average is None else 0.5 * (self.average + x.mean())
        self.same_average, self.warm_up = self.average, None
        if self.right is self.left:
            self.right = torch.zeros(1)
        if hasattr(self, "seed"):
            del self.seed
        if "made" not in self._buffers:
            vars(self).pop("made", None)
            self.register_buffer("made", None)
        return (x - self.average) * self.scale


def test_buffers_that_a_forward_fills_or_drops_survive_a_loss_and_reach_a_newcomer() -> None:
    """Rank 2 is lost in the first step. Rank 3 joins later."""
    groups = create_groups(3, timeout_s=60)
    present = [*groups, groups[0].newcomer()]

    def train(rank: int, group: ProcessGroup, loses: bool = True) -> tuple[object, ...]:
        module = Averaging()
        model = DistributedDataParallel(module, process_group=group, forward_sync_buffers=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        sampler = ElasticSampler(24, 4)
        elastic = Elastic(model, optimizer, sampler, silence_timeout_s=20, give_up_s=60, admit_every=2)
        for _ in elastic.batches(DataLoader(torch.arange(24.0).view(-1, 1), batch_sampler=sampler)):
            if rank == 0 and loses and elastic.applied_steps == 1:
                wait_until(lambda: groups[0].newcomers() == 1)
            with elastic.step():
                optimizer.zero_grad()
                loss = model(torch.full((4, 1), float(sampler.applied))).mean() / model.join_process_group.size
                if rank == 2:
                    groups[2].lose()
                    raise Lost
                loss.backward()
                optimizer.step()
        assert module.same_average is module.average
        assert (module.left.tolist(), module.right.tolist()) == ([1], [0])
        module.made = torch.ones(1)
        assert "made" in module.state_dict()
        return float(module.average), module.warm_up, hasattr(module, "seed"), float(module.scale.detach())

    expected = train(0, create_groups(1)[0], loses=False)
    first, second, lost, newcomer = on_ranks(4, lambda rank: train(rank, present[rank]))
    assert first is not None
    assert first[:3] == expected[:3]
    assert (second, lost, newcomer) == (first, None, first)


@pytest.mark.parametrize("thaws", [True, False])
def test_a_newcomer_has_the_modes_that_the_others_have_set_during_the_training(thaws: bool) -> None:
    groups = create_groups(2, timeout_s=60)
    present = [*groups, groups[0].newcomer()]
    # A module of TorchScript that was frozen has no mode. Make all here, because threads cannot make them at once.
    teachers = [torch.jit.freeze(torch.jit.script(torch.nn.Identity().eval())) for _ in present]

    def rank_body(number: int) -> tuple[bool, object, object]:
        module = torch.nn.Linear(1, 1)
        module.bias.requires_grad_(not thaws)
        halved = Halved()
        model = DistributedDataParallel(torch.nn.Sequential(module, halved, teachers[number]), process_group=present[number])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sampler = ElasticSampler(24, 4)
        elastic = Elastic(model, optimizer, sampler, silence_timeout_s=20, give_up_s=60, admit_every=2)
        for batch in elastic.batches(DataLoader(torch.arange(24.0).view(-1, 1), batch_sampler=sampler)):
            step = elastic.applied_steps
            if step == 1:  # the newcomer begins with a later step
                module.bias.requires_grad_(thaws)
                halved.eval()
                model.training = False
                if number == 0:
                    wait_until(lambda: groups[0].newcomers() == 1)
            with elastic.step():
                optimizer.zero_grad()
                (model(batch).mean() * sampler.weight).backward()
                optimizer.step()
        assert model.join_process_group.size == 3
        assert not halved.training
        assert not model.training
        assert model.module.training
        return module.bias.requires_grad, module.weight.tolist(), module.bias.tolist()

    with ThreadPoolExecutor(3) as threads:
        first, *others = threads.map(rank_body, range(3))
    assert others == [first, first]
    assert first[0] is thaws


def test_what_stands_behind_a_step_in_the_loop_runs_before_a_newcomer_comes_in() -> None:
    """The newcomer begins with a batch, so it takes no part in the average of that step's loss."""
    groups = create_groups(2, timeout_s=60)
    present = [*groups, groups[0].newcomer()]

    def rank_body(number: int) -> list[int]:
        training, sizes = Training(present[number], admit_every=1), []
        if number == 0:
            wait_until(lambda: groups[0].newcomers() == 1)
        for (samples,) in training.elastic.batches(training.loader):
            with training.elastic.step():
                training.optimizer.zero_grad()
                (training.model(samples).mean() * training.sampler.weight).backward()
                training.optimizer.step()
            ones = torch.ones(1)
            training.model.join_process_group.all_reduce(ones)
            sizes.append(int(ones))
        return sizes

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(rank_body, range(3))) == [[2, *[3] * (STEPS - 1)]] * 2 + [[3] * (STEPS - 1)]


def test_a_rank_that_is_busy_behind_a_step_is_not_given_up_when_a_newcomer_comes() -> None:
    """It may write a checkpoint, which takes longer than a recovery waits for a silent rank."""
    groups = create_groups(2, timeout_s=60)
    present = [*groups, groups[0].newcomer()]

    def rank_body(number: int) -> float:
        training = Training(present[number], admit_every=1)
        training.elastic._silence_timeout_s = 0.2
        if number == 0:
            wait_until(lambda: groups[0].newcomers() == 1)

        def at(moment: str, step: int) -> None:
            if number == 0 and (moment, step) == ("between", 0):
                time.sleep(1)

        return training.run(at)

    with ThreadPoolExecutor(3) as threads:
        assert list(threads.map(rank_body, range(3))) == [pytest.approx(FINAL_WEIGHT)] * 3


# ---- limits and misuse ----


@pytest.mark.parametrize(
    ("limits", "problem"), [({"min_ranks": 3}, "min_ranks is 3"), ({"max_failures": 0}, "max_failures is 0")]
)
def test_beyond_a_limit_all_end_with_the_same_error(limits: dict[str, int], problem: str) -> None:
    ends, _ = train_and_lose({1: ("backward", 2)}, **limits)
    for rank in (0, 2):
        ended = ends[rank]
        assert isinstance(ended, RankLostError)
        assert ended.ranks == (1,)
        assert problem in str(ended)
        assert "after 2 applied steps" in str(ended)


def test_a_limit_that_is_exceeded_while_a_newcomer_comes_ends_with_the_ranks_that_were_lost() -> None:
    groups = create_groups(3, timeout_s=60)
    present = [*groups, groups[0].newcomer()]

    def rank_body(number: int) -> object:
        def at(moment: str, step: int) -> None:
            if (moment, step) == ("forward", 0):
                wait_until(lambda: groups[0].newcomers() == 1)
            if number == 2 and (moment, step) == ("between", 0):
                groups[2].lose()
                raise Lost

        group = present[number]
        try:
            training = Training(group, admit_every=1, max_failures=0, give_up_s=60)
            group = training.model.join_process_group
            return training.run(at)
        except (Lost, TransportError) as ended:
            present[number].lose()
            return ended

    with ThreadPoolExecutor(4) as threads:
        ends = list(threads.map(rank_body, range(4)))
    for ended in (ends[0], ends[1]):
        assert isinstance(ended, RankLostError)
        assert ended.ranks == (2,)
        assert "1 rank(s) were lost in all" in str(ended)


@pytest.mark.parametrize("moment", ["backward", "agreement"])
def test_too_little_time_to_recover_is_an_error(moment: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "syncline.ddp"):
        ends, _ = train_and_lose({1: (moment, 2)}, size=2, give_up_s=1e-9)
    assert "did not come together again within" in str(ends[0])
    assert caplog.text.count("rank lost or out of reach") == 1  # no second recovery


@pytest.mark.parametrize("moment", ["in the body", "in the agreement"])
@pytest.mark.parametrize("limits", [{"give_up_s": 1e-9}, {"min_ranks": 2}])
def test_after_a_recovery_that_fails_the_model_is_as_before_the_step(moment: str, limits: dict[str, float]) -> None:
    groups = create_groups(2, timeout_s=60)

    def rank_body(rank: int) -> tuple[int, int, bool]:
        norm, linear = torch.nn.BatchNorm1d(1), torch.nn.Linear(1, 1)
        model = DistributedDataParallel(torch.nn.Sequential(norm, linear), process_group=groups[rank])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = ElasticSampler(24, 4)
        elastic = Elastic(model, optimizer, sampler, silence_timeout_s=20, **limits)  # type: ignore[arg-type]

        def train() -> None:
            for batch in elastic.batches(DataLoader(torch.arange(24.0).view(-1, 1), batch_sampler=sampler)):
                with elastic.step():
                    optimizer.zero_grad()
                    loss = model(batch).mean() * sampler.weight
                    if moment == "in the agreement":
                        loss.backward()
                    linear.requires_grad_(False)
                    if rank == 1 and elastic.applied_steps == 2:
                        groups[1].lose()
                        raise Lost
                    if moment == "in the body":
                        loss.backward()
                    optimizer.step()
                    linear.requires_grad_(True)

        with pytest.raises(TransportError):
            train()
        assert norm.num_batches_tracked is not None
        return elastic.applied_steps, int(norm.num_batches_tracked), linear.weight.requires_grad

    assert on_ranks(2, rank_body) == [(2, 2, True), None]


def test_misuse_is_named() -> None:
    def body(group: ProcessGroup) -> None:
        training = Training(group)
        with pytest.raises(MisuseError, match=r"outside of `with elastic\.step\(\):`"):
            training.optimizer.step()
        with pytest.raises(MisuseError, match="a batch was taken, and no step"):
            for _ in training.elastic.batches(training.loader):
                pass
        with (
            pytest.raises(MisuseError, match="a step was begun within a step"),
            training.elastic.step(),
            training.elastic.step(),
        ):
            pass
        batches = training.elastic.batches(training.loader)
        next(batches)
        with training.elastic.step():
            pass
        with (
            pytest.raises(MisuseError, match=r"a second step was begun for one batch of elastic\.batches on rank 0 of 1"),
            training.elastic.step(),
        ):
            pass
        for limits, problem in (
            ({"min_ranks": 2}, "min_ranks from 1 to the 1 ranks"),
            ({"max_failures": -1}, "max_failures of at least 0"),
            ({"give_up_s": 0}, "give_up_s above 0 seconds"),
            ({"admit_every": 0}, "admit_every of at least 1"),
            ({"stateful": [training.loader]}, "state_dict and load_state_dict, found DataLoader"),
        ):
            with pytest.raises(InvalidArgumentError, match=problem):
                Training(group, **limits)
        training.elastic.close()
        training.optimizer.step()

    run_ranks(1, body)


def test_close_ends_the_steps_and_is_refused_within_one() -> None:
    def body(group: ProcessGroup) -> None:
        training = Training(group)
        with pytest.raises(MisuseError, match="called within a step"), training.elastic.step():
            training.elastic.close()
        training.elastic.close()
        with pytest.raises(MisuseError, match="a step was begun after close"), training.elastic.step():
            pass
        with pytest.raises(MisuseError, match="was called after close"):
            next(training.elastic.batches(training.loader))
        training.elastic.close()
        # The ranks agree on no step any more, so a rank may make one alone.
        if group.rank == 0:
            training.optimizer.step()

    run_ranks(2, body)


def test_close_within_an_epoch_ends_the_epoch_with_an_error() -> None:
    def body(group: ProcessGroup) -> None:
        training = Training(group)
        batches = training.elastic.batches(training.loader)
        next(batches)
        with training.elastic.step():
            training.optimizer.step()
        training.elastic.close()
        with pytest.raises(MisuseError, match="a batch was taken after close"):
            next(batches)

    run_ranks(1, body)


def test_a_collective_that_fails_behind_the_agreement_is_an_error() -> None:
    """The code after it would run on some ranks only."""

    def body(group: ProcessGroup) -> None:
        training = Training(group)
        with (  # noqa: PT012 - a step is several statements
            pytest.raises(MisuseError, match="after the ranks had agreed") as caught,
            training.elastic.step(),
        ):
            training.model(torch.ones(1, 1)).sum().backward()
            training.optimizer.step()
            raise TransportError("a connection broke")
        assert isinstance(caught.value.__cause__, TransportError)
        assert training.elastic.applied_steps == 1

    run_ranks(1, body)


def test_an_optimizer_that_steps_within_backward_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        training = Training(group)
        training.model._register_fused_optim(torch.optim.SGD, lr=1.0)
        with pytest.raises(MisuseError, match="steps within backward"), training.elastic.step():  # noqa: PT012 - as above
            training.model(torch.ones(1, 1)).sum().backward()
            training.optimizer.step()
        with pytest.raises(MisuseError, match="steps within backward"):
            Elastic(training.model, training.optimizer, training.sampler)

    run_ranks(1, body)


def test_a_group_that_cannot_shrink_is_refused_at_once() -> None:
    def body(group: ProcessGroup) -> None:
        half = group.split(0)
        assert half is not None
        with pytest.raises(BackendUnavailableError, match=r"elastic training on rank \d of 2"):
            Training(half)

    run_ranks(2, body)


def test_a_model_that_is_not_on_the_cpu_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def body(group: ProcessGroup) -> None:
        monkeypatch.setattr(DistributedDataParallel, "parameters", lambda _: iter([torch.empty(1, device="meta")]))
        model = DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group)
        optimizer = torch.optim.SGD(model.module.parameters(), lr=1.0)
        with pytest.raises(BackendUnavailableError, match="does not wait for what meta still reduces"):
            Elastic(model, optimizer, ElasticSampler(8, 8))

    run_ranks(1, body)


# ---- the loader ----


@pytest.mark.parametrize(
    "wrap",
    [lambda loader: map(list, loader), enumerate, lambda loader: (batch for batch in loader)],
    ids=["map", "enumerate", "generator"],
)
def test_a_loader_that_cannot_begin_again_is_refused(wrap: Callable[[Any], Any]) -> None:
    """After a loss it would go on behind the batch that was not applied."""

    def body(group: ProcessGroup) -> None:
        training = Training(group)
        with pytest.raises(MisuseError, match="can begin again, such as a DataLoader, found an iterator"):
            next(training.elastic.batches(wrap(training.loader)))

    run_ranks(1, body)


def test_a_loader_that_returns_itself_and_begins_again_may_be_used() -> None:
    """Such as Lightning's `CombinedLoader`."""

    class BeginsAgain:
        def __init__(self, loader: DataLoader[Any]) -> None:
            self.loader = loader

        def __iter__(self) -> Iterator[Any]:
            self.batches = iter(self.loader)
            return self

        def __next__(self) -> Any:
            return next(self.batches)

        def __len__(self) -> int:
            return len(self.loader)

    def body(group: ProcessGroup) -> int:
        training = Training(group)
        for _ in range(2):
            for batch in itertools.islice(training.elastic.batches(BeginsAgain(training.loader)), 2):
                with training.elastic.step():
                    training.model(*batch).mean().backward()
                    training.optimizer.step()
        return training.elastic.applied_steps

    assert run_ranks(1, body) == [4]


def test_a_loader_that_gives_no_batch_before_the_epoch_ends_is_refused() -> None:
    class Ends:
        """Gives two batches, then none."""

        def __init__(self) -> None:
            self.batches = [torch.ones(12, 1)] * 2

        def __iter__(self) -> Iterator[torch.Tensor]:
            while self.batches:
                yield self.batches.pop()

    def body(group: ProcessGroup) -> None:
        training = Training(group)
        batches = training.elastic.batches(Ends())
        for batch in itertools.islice(batches, 2):
            with training.elastic.step():
                training.model(batch).mean().backward()
                training.optimizer.step()
        with pytest.raises(MisuseError, match="gives no batch, and 4 batches of the epoch are left"):
            next(batches)

    run_ranks(1, body)


# ---- torch's default device ----


@pytest.mark.parametrize("shuffle", [True, False])
def test_the_order_of_the_samples_does_not_depend_on_torchs_default_device(shuffle: bool) -> None:
    expected = list(ElasticSampler(12, 4, shuffle=shuffle))
    with torch.device("meta"):
        assert list(ElasticSampler(12, 4, shuffle=shuffle)) == expected


def test_a_step_agrees_with_another_default_device() -> None:
    def body(group: ProcessGroup) -> int:
        training = Training(group)
        batch = torch.ones(6, 1)
        with torch.device("meta"), training.elastic.step():
            training.model(batch).mean().backward()
            training.optimizer.step()
        return training.elastic.applied_steps

    assert run_ranks(2, body) == [1, 1]
