"""Elastic training with a communication hook that remembers: PowerSGD after some plain steps. Ranks are threads."""

from __future__ import annotations

import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from syncline.collectives.backends.in_process import InProcessGroup, create_groups
from syncline.ddp import DistributedDataParallel, Elastic, ElasticSampler
from syncline.hooks import Phase, PowerSGDState, ScheduleState, allreduce_hook, powerSGD_hook, schedule_hook

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
    elastic = Elastic(model, optimizer, sampler, patience_s=20, give_up_s=60, admit_every=ADMIT_AT)
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
            hook.iter += 5  # as if the step that fails had got further here than elsewhere
        with elastic.step():
            optimizer.zero_grad()
            ((model(inputs) - labels).square().mean() * sampler.weight).backward()
            optimizer.step()
    errors = [float(error.norm()) for error in hook.state_dict()["states"]["1"]["errors"].values()]
    return model.module.weight.detach().clone(), hook.iter, steps_at_first, errors, model.join_process_group.members


def test_a_hook_that_remembers_goes_on_in_the_groups_that_follow() -> None:
    """Who is left keeps what its error feedback has kept; who comes begins with the step of the others and with zeros."""
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
