"""Elastic training with communication hooks that have a state. Ranks are threads."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from syncline.collectives import TransportError
from syncline.collectives.transports.threads import InProcessGroup, create_groups
from syncline.ddp import DistributedDataParallel, Elastic, ElasticSampler
from syncline.hooks import (
    CompressionState,
    Phase,
    PowerSGDState,
    RandomK,
    ScheduleState,
    TopK,
    allreduce_hook,
    compression_hook,
    powerSGD_hook,
    schedule_hook,
)

pytestmark = pytest.mark.launch

STEPS, LOST_AT, ADMIT_AT, VICTIM, NEWCOMER = 12, 6, 8, 1, 3


def train(group: InProcessGroup, number: int) -> Any:
    model = DistributedDataParallel(torch.nn.Linear(16, 8, bias=False), process_group=group)
    torch.nn.init.zeros_(model.module.weight)
    compressing = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
    hook = ScheduleState([Phase(0, allreduce_hook), Phase(2, powerSGD_hook, compressing)])
    model.register_comm_hook(hook, schedule_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    samples = TensorDataset(torch.randn(12 * STEPS, 16, generator=generator), torch.randn(12 * STEPS, 8, generator=generator))
    sampler = ElasticSampler(len(samples), 12)
    elastic = Elastic(model, optimizer, sampler, silence_timeout_s=20, give_up_s=60, admit_every=ADMIT_AT)
    steps_at_first = hook.iter
    for inputs, labels in elastic.batches(DataLoader(samples, batch_sampler=sampler)):
        if number == VICTIM and elastic.applied_steps == LOST_AT:
            model.join_process_group.lose()  # type: ignore[attr-defined]
            return None
        end_s = time.monotonic() + 60
        while elastic.applied_steps == ADMIT_AT - 1 and model.join_process_group.newcomers() == 0:
            assert time.monotonic() < end_s
            time.sleep(0.01)
        if number == 2 and elastic.applied_steps == LOST_AT:
            hook.iter += 5  # as if the failing step had got further here than on other ranks
        with elastic.step():
            optimizer.zero_grad()
            ((model(inputs) - labels).square().mean() * sampler.weight).backward()
            optimizer.step()
    errors = [float(error.norm()) for error in hook.state_dict()["states"]["1"]["errors"].values()]
    return model.module.weight.detach().clone(), hook.iter, steps_at_first, errors, model.join_process_group.members


def test_a_hook_that_remembers_goes_on_in_the_groups_that_follow() -> None:
    """A remaining rank keeps its error feedback. A newcomer begins with the step of the others and with zeros."""
    groups = create_groups(3, timeout_s=60)
    everybody = [*groups, groups[0].newcomer()]
    with warnings.catch_warnings(), ThreadPoolExecutor(len(everybody)) as threads:
        warnings.simplefilter("error")
        ends = list(threads.map(train, everybody, range(len(everybody))))
    assert ends[VICTIM] is None
    left = [end for end in ends if end is not None]
    for weight, steps, _, errors, members in left:
        assert torch.equal(weight, left[0][0])
        assert steps == STEPS + 1  # as on rank 0, where one step was done again
        assert members == (0, 2, NEWCOMER)
        assert errors
        assert all(error > 0 for error in errors)
    assert ends[NEWCOMER][2] == ADMIT_AT + 1


# ---- the same bits, whatever the hook remembers ----

FEW_SAMPLES, BATCH_SIZE = 72, 12


class LostError(BaseException):
    """Ends a thread that plays a killed rank."""


def random_places(model: DistributedDataParallel) -> None:
    model.register_comm_hook(CompressionState(RandomK(0.3)), compression_hook)


def power_sgd(model: DistributedDataParallel) -> None:
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook)


def plain_then_random_places(model: DistributedDataParallel) -> None:
    phases = [Phase(0, allreduce_hook), Phase(2, compression_hook, CompressionState(RandomK(0.3)))]
    model.register_comm_hook(ScheduleState(phases), schedule_hook)


@pytest.mark.parametrize("register", [random_places, power_sgd, plain_then_random_places])
@pytest.mark.parametrize("loses", [True, False], ids=["a rank dies", "a connection breaks"])
def test_survivors_have_the_same_bits(register: Callable[[DistributedDataParallel], None], loses: bool) -> None:
    groups = create_groups(3, timeout_s=60)

    def rank_body(rank: int) -> list[torch.Tensor] | None:
        try:
            return train_rank(rank)
        except LostError:
            return None

    def train_rank(rank: int) -> list[torch.Tensor]:
        torch.manual_seed(3)
        module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        model = DistributedDataParallel(module, process_group=groups[rank], bucket_cap_mb=0.0001)  # several buckets
        register(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = ElasticSampler(FEW_SAMPLES, BATCH_SIZE)
        elastic = Elastic(model, optimizer, sampler, silence_timeout_s=30)
        broken: list[int] = []
        for epoch in elastic.epochs(2):
            for (inputs,) in elastic.batches(DataLoader([(sample,) for sample in few_samples()], batch_sampler=sampler)):
                with elastic.step():
                    optimizer.zero_grad()
                    if rank == 1 and elastic.applied_steps == 3 and not broken:
                        broken.append(epoch)
                        if loses:
                            groups[1].lose()
                            raise LostError
                        raise TransportError("a connection of this rank broke")  # while the others are in their hooks
                    (model(inputs).square().mean() * sampler.weight).backward()
                    optimizer.step()
        assert elastic.applied_steps == 2 * FEW_SAMPLES // BATCH_SIZE
        assert len(elastic.recovery_s) == 1
        return [parameter.detach() for parameter in module.parameters()]

    with ThreadPoolExecutor(3) as threads:
        ends = list(threads.map(rank_body, range(3)))
    assert [end is None for end in ends] == [False, loses, False]
    for end in ends[1:]:
        for mine, others in zip(ends[0] or (), end or ends[0] or (), strict=True):
            assert torch.equal(mine, others)
            assert mine.isfinite().all()


def few_samples() -> torch.Tensor:
    return torch.randn(FEW_SAMPLES, 6, generator=torch.Generator().manual_seed(1))


# ---- nothing of a gradient is lost ----


class KnownGradient(torch.nn.Module):
    """A weight whose gradient is `GRADIENT` in every step, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(8, 8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return (self.weight * GRADIENT).sum() + 0 * inputs.sum()


GRADIENT = torch.outer(torch.arange(1.0, 9), torch.ones(8)) + torch.diag(torch.arange(8.0))


def top_k() -> tuple[Any, Any, Any]:
    state = CompressionState(TopK(0.1))
    return state, compression_hook, state


def low_rank() -> tuple[Any, Any, Any]:
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    return state, powerSGD_hook, state


def plain_then_top_k() -> tuple[Any, Any, Any]:
    state = CompressionState(TopK(0.1))
    return ScheduleState([Phase(0, allreduce_hook), Phase(2, compression_hook, state)]), schedule_hook, state


@pytest.mark.parametrize("make", [top_k, low_rank, plain_then_top_k])
def test_a_repeated_step_adds_the_error_feedback_once(make: Callable[[], tuple[Any, Any, Any]]) -> None:
    """After each step, the sum of all averages and the remaining error is the sum of all gradients."""
    groups = create_groups(3, timeout_s=60)

    def rank_body(rank: int) -> tuple[int, torch.Tensor] | None:
        try:
            return train_rank(rank)
        except LostError:
            return None

    def train_rank(rank: int) -> tuple[int, torch.Tensor]:
        model = DistributedDataParallel(KnownGradient(), process_group=groups[rank])
        state, hook, compressing = make()
        model.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sampler = ElasticSampler(60, 6)
        elastic = Elastic(model, optimizer, sampler, silence_timeout_s=30)
        for batch in elastic.batches(DataLoader(torch.arange(60.0), batch_sampler=sampler)):
            with elastic.step():
                optimizer.zero_grad()
                if rank == 2 and elastic.applied_steps == 5:
                    groups[2].lose()
                    raise LostError
                model(batch).backward()
                optimizer.step()
        error = compressing.state_dict()["errors"]["weight"]
        return len(elastic.recovery_s), error - model.module.weight.detach()

    with ThreadPoolExecutor(3) as threads:
        ends = list(threads.map(rank_body, range(3)))
    assert ends[2] is None
    for end in ends[:2]:
        assert end is not None
        assert end[0] == 1
        torch.testing.assert_close(end[1], 10 * GRADIENT)
