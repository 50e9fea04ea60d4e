from __future__ import annotations

import io
from typing import Any

import pytest
import torch

from syncline.collectives import InvalidArgumentError, MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.hooks import (
    CompressionState,
    Int8,
    Phase,
    PostLocalSGDState,
    PowerSGDState,
    ScheduleState,
    allreduce_hook,
    bf16_compress_hook,
    compression_hook,
    merge_states,
    noop_hook,
    post_localSGD_hook,
    powerSGD_hook,
    schedule_hook,
)
from syncline.hooks.testing import FakeBucket

pytestmark = pytest.mark.ranks


def recording(name: str, log: list[tuple[str, Any]]) -> Any:
    def hook(state: Any, bucket: Any) -> Any:
        log.append((name, state))
        return noop_hook(state, bucket)

    return hook


def step(state: ScheduleState, buckets: int = 2) -> None:
    for index in range(buckets):
        bucket = FakeBucket([torch.ones(1)], None, index=index, is_last=index == buckets - 1)  # type: ignore[arg-type]  # unused
        schedule_hook(state, bucket).wait()


def test_every_bucket_of_a_step_goes_to_the_phase_of_that_step() -> None:
    log: list[tuple[str, Any]] = []
    state = ScheduleState(
        [Phase(0, recording("plain", log), 1), Phase(2, recording("half", log)), Phase(3, recording("low", log), 3)]
    )
    for _ in range(5):
        step(state)

    assert log == [("plain", 1)] * 4 + [("half", None)] * 2 + [("low", 3)] * 4


def test_it_can_be_switched_between_steps_only() -> None:
    log: list[tuple[str, Any]] = []
    state = ScheduleState([Phase(0, recording("a", log)), Phase(3, recording("never", log))])
    step(state)
    state.switch(recording("b", log), "state")
    for _ in range(4):
        step(state)
    assert log == [("a", None)] * 2 + [("b", "state")] * 8

    schedule_hook(state, FakeBucket([torch.ones(1)], None, is_last=False)).wait()  # type: ignore[arg-type]  # unused
    with pytest.raises(MisuseError, match="between steps, found step 5 under way"):
        state.switch(noop_hook)


def failing_at(index: int) -> Any:
    def hook(state: Any, bucket: Any) -> Any:
        if bucket.index() == index:
            raise ValueError("the hook fails")
        return noop_hook(state, bucket)

    return hook


@pytest.mark.parametrize("failing", [0, 1])
def test_it_can_be_switched_after_a_step_whose_hook_failed_and_the_step_is_done_again(failing: int) -> None:
    log: list[tuple[str, Any]] = []
    state = ScheduleState([Phase(0, failing_at(failing))])
    with pytest.raises(ValueError, match="the hook fails"):
        step(state, buckets=3)
    state.switch(recording("b", log))
    step(state)

    assert state.iter == 1
    assert log == [("b", None)] * 2


def test_it_can_be_switched_after_a_backward_that_failed_once_its_state_is_loaded() -> None:
    log: list[tuple[str, Any]] = []
    state = ScheduleState([Phase(0, noop_hook)])
    schedule_hook(state, FakeBucket([torch.ones(1)], None, is_last=False)).wait()  # type: ignore[arg-type]  # unused
    with pytest.raises(MisuseError, match=r"call load_state_dict\(state_dict\(\)\) first"):
        state.switch(noop_hook)
    state.load_state_dict(state.state_dict())
    state.switch(recording("b", log))
    step(state)

    assert log == [("b", None)] * 2


def plain_then_half_then_low(parameter: torch.Tensor) -> ScheduleState:
    named = [("weight", parameter)]
    low = PowerSGDState(None, 2, 2, named_parameters=named)
    int8 = CompressionState(Int8(), named_parameters=named)
    return ScheduleState(
        [
            Phase(0, allreduce_hook),
            Phase(1, bf16_compress_hook),
            Phase(2, compression_hook, int8),
            Phase(4, powerSGD_hook, low),
        ]
    )


def train(group: ProcessGroup, state: ScheduleState, parameter: torch.Tensor, steps: range) -> list[torch.Tensor]:
    found = []
    for number in steps:
        gradient = torch.randn(20, 20, generator=torch.Generator().manual_seed(100 * group.rank + number))
        found.append(schedule_hook(state, FakeBucket([gradient], group, parameters=[parameter])).wait())
    return found


def test_resumed_in_any_phase_it_goes_on_bitwise_and_merged_on_more_ranks() -> None:
    def body(group: ProcessGroup) -> dict[str, Any]:
        parameter = torch.zeros(20, 20)
        state = plain_then_half_then_low(parameter)
        train(group, state, parameter, range(7))
        file = io.BytesIO()
        torch.save(state.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        expected = train(group, state, parameter, range(7, 9))
        resumed = plain_then_half_then_low(parameter)
        resumed.load_state_dict(saved)
        assert resumed.phases[3].state.iter == 3
        for ours, theirs in zip(train(group, resumed, parameter, range(7, 9)), expected, strict=True):
            assert torch.equal(ours, theirs)
        return dict(saved)

    merged = merge_states(run_ranks(2, body))

    def more(group: ProcessGroup) -> torch.Tensor:
        parameter = torch.zeros(20, 20)
        state = plain_then_half_then_low(parameter)
        state.load_state_dict(merged)
        return train(group, state, parameter, range(7, 9))[-1]

    results = run_ranks(3, more)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([], "first has first_step=0"),
        ([Phase(1, noop_hook)], "first has first_step=0"),
        ([Phase(0, noop_hook), Phase(5, noop_hook), Phase(5, noop_hook)], r"first steps rise, found \[0, 5, 5\]"),
        ([Phase(0, 3)], "found int"),  # type: ignore[arg-type]  # on purpose
    ],
)
def test_phases_that_cannot_be_are_refused(phases: list[Phase], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        ScheduleState(phases)


def test_a_schedule_of_other_phases_is_refused() -> None:
    saved = ScheduleState([Phase(0, noop_hook), Phase(5, noop_hook)]).state_dict()
    with pytest.raises(MisuseError, match=r"phases from steps \[0, 5\], this one from \[0\]"):
        ScheduleState([Phase(0, noop_hook)]).load_state_dict(saved)
    with pytest.raises(MisuseError, match="kind 'schedule'"):
        ScheduleState([Phase(0, noop_hook)]).load_state_dict(CompressionState(Int8()).state_dict())
    with pytest.raises(MisuseError, match="expected a ScheduleState"):
        schedule_hook(None, FakeBucket([], None))  # type: ignore[arg-type]  # on purpose


def test_merged_states_of_a_class_of_the_program_are_those_of_the_first_rank() -> None:
    class Scale:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        def state_dict(self) -> dict[str, float]:
            return {"scale": self.scale}

        def load_state_dict(self, state: dict[str, float]) -> None:
            self.scale = state["scale"]

    def made(scale: float) -> ScheduleState:
        return ScheduleState([Phase(0, noop_hook, Scale(scale)), Phase(9, powerSGD_hook, PowerSGDState(None, 1, 2))])

    loaded = made(0.0)
    loaded.load_state_dict(merge_states([made(2.0).state_dict(), made(3.0).state_dict()]))
    assert loaded.phases[0].state.scale == 2.0


def test_a_schedule_whose_later_phase_is_refused_changes_nothing() -> None:
    def body(group: ProcessGroup) -> None:
        def made(low: Any) -> ScheduleState:
            int8 = CompressionState(Int8(), named_parameters=[("weight", parameter)])
            inner = ScheduleState([Phase(0, compression_hook, int8), Phase(9, powerSGD_hook, low)])
            local = PostLocalSGDState(None, group, 3)
            return ScheduleState([Phase(0, post_localSGD_hook, local), Phase(1, schedule_hook, inner)])

        parameter = torch.zeros(20, 20)
        state, same = (made(PowerSGDState(None, 2, 2)) for _ in range(2))
        other = made(PowerSGDState(None, 3, 2))
        for number, each in ((3, state), (3, same), (5, other)):
            train(group, each, parameter, range(number))
        with pytest.raises(MisuseError, match="matrix_approximation_rank=3, this one 2"):
            state.load_state_dict(other.state_dict())
        other = made(None)
        with pytest.raises(MisuseError, match="state for phase 1, whose state here cannot be loaded"):
            other.load_state_dict(state.state_dict())

        assert (other.iter, other.phases[0].state.iter, other.phases[1].state.phases[0].state.iter) == (0, 0, 0)
        assert (state.iter, state.phases[0].state.iter, state.phases[1].state.phases[0].state.iter) == (3, 1, 2)
        for ours, theirs in zip(
            train(group, state, parameter, range(3, 6)), train(group, same, parameter, range(3, 6)), strict=True
        ):
            assert torch.equal(ours, theirs)

    run_ranks(2, body)


def test_a_later_phase_numbers_its_parameters_in_the_first_step() -> None:
    low = PowerSGDState(None)
    state = ScheduleState([Phase(0, noop_hook), Phase(9, powerSGD_hook, low)])
    schedule_hook(state, FakeBucket([torch.ones(2), torch.ones(3)], None))  # type: ignore[arg-type]  # unused

    assert low.names.shapes == {"parameter 0": torch.Size([2]), "parameter 1": torch.Size([3])}
