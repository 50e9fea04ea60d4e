from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import InvalidArgumentError, MisuseError, ProcessGroup, RoundRobinGroup, TorchGroup
from syncline.collectives.testing import run_ranks
from syncline.hooks import (
    DiLoCoOptimizer,
    HierarchicalModelAverager,
    PeriodicModelAverager,
    PostLocalSGDOptimizer,
    PostLocalSGDState,
    post_localSGD_hook,
)
from syncline.hooks.testing import FakeBucket

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("averages_near_by", [True, False])
def test_it_averages_globally_then_near_by_or_not_at_all(averages_near_by: bool) -> None:
    def body(group: ProcessGroup) -> list[float]:
        near = group.split(group.rank // 2)
        state = PostLocalSGDState(group, near, 2, averages_near_by)
        return [
            float(
                post_localSGD_hook(state, FakeBucket([torch.tensor([10.0**group.rank])], group, index=i, is_last=i == 1)).wait()
            )
            for _ in range(4)
            for i in range(2)
        ]

    results = run_ranks(4, body)
    near_by = [5.5, 5.5, 550.0, 550.0] if averages_near_by else [1.0, 10.0, 100.0, 1000.0]
    for rank, found in enumerate(results):
        assert found == [277.75] * 4 + [near_by[rank]] * 4


def test_its_step_is_saved() -> None:
    state, other = PostLocalSGDState(None, None, 3, False), PostLocalSGDState(None, None, 3, False)
    state.iter = 5
    other.load_state_dict(state.state_dict())
    assert other.iter == 5
    with pytest.raises(MisuseError, match="expected a state of kind 'post-local SGD'"):
        other.load_state_dict({})


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="start_localSGD_iter of 0 or above, found -1"):
        PostLocalSGDState(None, None, -1, False)
    with pytest.raises(InvalidArgumentError, match="a subgroup to average in after the start"):
        PostLocalSGDState(None, None, 3)
    with pytest.raises(MisuseError, match="expected a PostLocalSGDState"):
        post_localSGD_hook(None, FakeBucket([], None))  # type: ignore[arg-type]  # on purpose


def drift(group: ProcessGroup, averager: Any, steps: int) -> list[float]:
    """Each step adds 10**rank; what the parameter is after it."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    other = torch.nn.Parameter(torch.full((1,), float(group.rank), dtype=torch.float64))
    without_gradient = torch.nn.Parameter(torch.full((1,), float(group.rank)))
    parameter.grad, other.grad = torch.ones(2), torch.ones(1, dtype=torch.float64)
    found = []
    for _ in range(steps):
        parameter.data += 10.0**group.rank
        averager.average_parameters([parameter, other, without_gradient])
        assert without_gradient.item() == group.rank
        found.append(parameter[0].item())
    return found


def test_periodic_averaging_after_the_warm_up() -> None:
    def body(group: ProcessGroup) -> list[float]:
        return drift(group, PeriodicModelAverager(2, 1, group), 4)

    # Steps 1 and 3 average: 2 and 20 to 11; then 11 + 2 and 11 + 20 to 22.
    assert run_ranks(2, body) == [[1, 11, 12, 22], [10, 11, 21, 22]]


def test_hierarchical_averaging_lets_the_largest_period_decide() -> None:
    def body(group: ProcessGroup) -> list[float]:
        return drift(group, HierarchicalModelAverager({2: 2, 4: 4}, 1, group), 5)

    results = run_ranks(4, body)
    # Step 2 averages pairs, step 4 all; step 0 is warm-up.
    assert results == [
        [1, 2, 16.5, 17.5, 5 * 277.75],
        [10, 20, 16.5, 26.5, 5 * 277.75],
        [100, 200, 1650, 1750, 5 * 277.75],
        [1000, 2000, 1650, 2650, 5 * 277.75],
    ]


def test_on_few_ranks_two_levels_of_a_hierarchy_may_be_the_same() -> None:
    def body(group: ProcessGroup) -> list[float]:
        return drift(group, HierarchicalModelAverager({2: 2, 4: group.size}, 1, group), 3)

    assert run_ranks(2, body) == [[1, 2, 16.5], [10, 20, 16.5]]


@pytest.mark.parametrize(
    ("periods", "message"),
    [
        ({}, "at least one period"),
        ({0: 4}, "1 step or above"),
        ({4: 2, 2: 4}, "periods that rise"),
        ({2: 4, 4: 2}, "sizes that do not fall"),
        ({2: 2}, "divide the 4 ranks"),
        ({2: 3, 4: 4}, "divide the 4 ranks"),
    ],
)
def test_hierarchies_that_cannot_be_are_refused(periods: dict[int, int], message: str) -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match=message):
            HierarchicalModelAverager(periods, 0, group)

    run_ranks(4, body)


def test_a_group_that_nobody_can_divide_is_refused() -> None:
    around_a_bare_backend = TorchGroup(dist.ProcessGroupGloo(dist.HashStore(), 0, 1))
    in_turn = RoundRobinGroup([around_a_bare_backend])
    for group in (around_a_bare_backend, in_turn):
        group.size = 2  # a group of one rank is divided by no one
        with pytest.raises(MisuseError, match=r"expected a group that can be divided.*pass a group of torch\.distributed"):
            HierarchicalModelAverager({1: 1, 2: 2}, 0, group)


def test_averagers_refuse_what_cannot_be() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match="period of 1 step or above, found 0"):
            PeriodicModelAverager(0, 0, group)
        with pytest.raises(InvalidArgumentError, match="warmup_steps of 0 or above, found -1"):
            PeriodicModelAverager(2, -1, group)
        with pytest.raises(MisuseError, match="parameters or an optimizer's parameter groups, found str"):
            PeriodicModelAverager(1, 0, group).average_parameters(["weight"])

    run_ranks(1, body)
    with pytest.raises(MisuseError, match=r"process group .* or None, found str"):
        PeriodicModelAverager(2, 0, "world")


WRAPPERS: dict[str, Callable[[torch.optim.Optimizer, torch.nn.Parameter, ProcessGroup], torch.optim.Optimizer]] = {
    "post-local": lambda optim, _, group: PostLocalSGDOptimizer(optim, PeriodicModelAverager(1, 0, group)),
    "diloco": lambda optim, parameter, group: DiLoCoOptimizer(optim, [("p", parameter)], group, sync_every=1, outer_lr=1.0),
}


@pytest.fixture(params=WRAPPERS.values(), ids=WRAPPERS.keys())
def wrap(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_a_schedule_changes_the_rate_that_is_used_also_after_the_wrapped_optimizer_was_loaded(wrap: Any) -> None:
    def body(group: ProcessGroup) -> None:
        parameter = torch.nn.Parameter(torch.zeros(1))
        local = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
        optimizer = wrap(local, parameter, group)
        local.load_state_dict(local.state_dict())  # torch's optimizers make new groups
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
        optimizer.step()
        schedule.step()
        assert local.param_groups[0]["lr"] == pytest.approx(0.05)
        assert optimizer.param_groups is local.param_groups

    run_ranks(1, body)


def test_a_schedule_that_reads_the_defaults_works(wrap: Any) -> None:
    def body(group: ProcessGroup) -> None:
        parameter = torch.nn.Parameter(torch.zeros(1))
        local = torch.optim.SGD([parameter], lr=0.5, momentum=0.9)
        torch.optim.lr_scheduler.OneCycleLR(wrap(local, parameter, group), 1.0, total_steps=10)
        assert local.param_groups[0]["lr"] == pytest.approx(1 / 25)

    run_ranks(1, body)


def test_hooks_of_a_step_run_around_the_average_and_hooks_of_a_state_get_the_wrapped_optimizers(wrap: Any) -> None:
    def body(group: ProcessGroup) -> None:
        parameter = torch.nn.Parameter(torch.zeros(1))
        local = torch.optim.SGD([parameter], lr=1.0)
        optimizer = wrap(local, parameter, group)
        seen: list[Any] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(parameter.item()))
        optimizer.register_step_post_hook(lambda *_: seen.append(parameter.item()))
        parameter.grad = torch.tensor([-1.0 - group.rank])
        optimizer.step()
        assert seen == [0.0, pytest.approx(1.5 if isinstance(optimizer, PostLocalSGDOptimizer) else 1.5 * 1.9)]

        calls: list[str] = []
        optimizer.register_state_dict_pre_hook(lambda of: calls.append(f"before saving {of is local}"))
        optimizer.register_state_dict_post_hook(lambda of, _: calls.append(f"saved {of is local}"))
        optimizer.register_load_state_dict_pre_hook(lambda of, _: calls.append(f"before loading {of is local}"))
        optimizer.register_load_state_dict_post_hook(lambda of: calls.append(f"loaded {of is local}"))
        optimizer.load_state_dict(optimizer.state_dict())
        assert calls == ["before saving True", "saved True", "before loading True", "loaded True"]

    run_ranks(2, body)


@pytest.mark.parametrize("copied", [pickle.dumps, copy.deepcopy])
def test_a_copy_is_refused_with_the_remedy(wrap: Any, copied: Any) -> None:
    def body(group: ProcessGroup) -> None:
        parameter = torch.nn.Parameter(torch.zeros(1))
        optimizer = wrap(torch.optim.SGD([parameter], lr=1.0), parameter, group)
        with pytest.raises(MisuseError, match="cannot be copied or pickled: make one like this, and load its state_dict"):
            copied(optimizer)

    run_ranks(1, body)


def test_the_optimizer_steps_then_averages_and_resumes() -> None:
    def body(group: ProcessGroup) -> list[float]:
        def make() -> tuple[torch.nn.Parameter, PostLocalSGDOptimizer]:
            parameter = torch.nn.Parameter(torch.zeros(1))
            local = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
            return parameter, PostLocalSGDOptimizer(local, PeriodicModelAverager(2, 1, group))

        def step(parameter: torch.nn.Parameter, optimizer: PostLocalSGDOptimizer) -> float:
            optimizer.zero_grad()
            (parameter * (group.rank + 1.0)).sum().backward()
            optimizer.step()
            return parameter.item()

        parameter, optimizer = make()
        found = [step(parameter, optimizer) for _ in range(3)]
        again, resumed = make()
        again.data.copy_(parameter.data)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch's own shares its tensors
        assert resumed.averager.step == 3
        assert step(again, resumed) == step(parameter, optimizer), "the fourth step averages, and has the momentum"
        found.append(parameter.item())
        resumed.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
        assert len(resumed.param_groups) == 2
        assert resumed.state is resumed.optim.state
        with pytest.raises(MisuseError, match='averager\'s "step"'):
            resumed.load_state_dict(optimizer.optim.state_dict())
        return found

    results = run_ranks(2, body)
    assert results[0][0] == -1.0
    assert results[1][0] == -2.0
    assert results[0][1] == results[1][1] == -3.75
    assert results[0][2] != results[1][2]
    assert results[0][3] == results[1][3]
