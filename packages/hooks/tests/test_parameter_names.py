from __future__ import annotations

import gc
import io
from typing import Any

import pytest
import torch

from syncline.collectives import InvalidArgumentError, MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.hooks import (
    CompressionState,
    DiLoCoOptimizer,
    Phase,
    PowerSGDState,
    ScheduleState,
    TopK,
    compression_hook,
    noop_hook,
    powerSGD_hook,
    schedule_hook,
)
from syncline.hooks.testing import FakeBucket

pytestmark = pytest.mark.ranks

NAMES = ["last", "first", "middle"]
READY = ["last", "middle", "first"]  # the order in which backward has the gradients


class Model:
    """Matrices of one shape, so that nothing but its name tells a parameter from another."""

    def __init__(self, shapes: dict[str, tuple[int, ...]] | None = None) -> None:
        self.parameters = {name: torch.zeros((shapes or {}).get(name, (8, 8))) for name in NAMES}

    def bucket(self, group: ProcessGroup, step: int, order: list[str], *, knows_names: bool) -> FakeBucket:
        gradients = {
            name: torch.randn(
                self.parameters[name].shape, generator=torch.Generator().manual_seed(100 * step + 10 * n + group.rank)
            )
            for n, name in enumerate(NAMES)
        }
        parameters = [self.parameters[name] for name in order]
        names = order if knows_names else None
        return FakeBucket([gradients[name] for name in order], group, parameters=parameters, names=names)


class Run:
    """A run of a model whose DDP orders its buckets anew after the first step."""

    def __init__(self, group: ProcessGroup, state: Any, hook: Any, *, knows_names: bool, model: Model | None = None) -> None:
        self.group, self.state, self.hook, self.knows_names = group, state, hook, knows_names
        self.model = model or Model()
        self.is_rebuilt = False

    def step(self, number: int, without: str = "") -> dict[str, torch.Tensor]:
        order = [name for name in (READY if self.is_rebuilt else NAMES[::-1]) if name != without]
        bucket = self.model.bucket(self.group, number, order, knows_names=self.knows_names)
        self.hook(self.state, bucket).wait()
        self.is_rebuilt = True
        return {name: gradient.clone() for name, gradient in zip(order, bucket.gradients(), strict=True)}


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    for name in one.keys() | other.keys():
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize("knows_names", [True, False])
@pytest.mark.parametrize("rehearses", [True, False])
def test_a_hook_switched_to_later_resumes_as_a_phase_bitwise(rehearses: bool, knows_names: bool) -> None:
    def body(group: ProcessGroup) -> None:
        run = Run(group, ScheduleState([Phase(0, noop_hook)]), schedule_hook, knows_names=knows_names)
        for number in range(2):
            run.step(number)
        run.state.switch(powerSGD_hook, PowerSGDState(None, 1, 2))
        for number in range(2, 6):
            run.step(number)
        saved = through_a_file(run.state)
        phases = [Phase(0, noop_hook), Phase(2, powerSGD_hook, PowerSGDState(None, 1, 2))]
        resumed = Run(group, ScheduleState(phases), schedule_hook, knows_names=knows_names)
        if rehearses:
            resumed.step(0)
        resumed.state.load_state_dict(saved)
        for number in range(6, 9):
            assert_same(resumed.step(number), run.step(number))

    run_ranks(2, body)


def test_a_state_that_has_numbered_parameters_keeps_their_numbers_in_a_schedule() -> None:
    def body(group: ProcessGroup) -> None:
        run = Run(group, CompressionState(TopK(0.1)), compression_hook, knows_names=False)
        run.step(0, without="middle")
        run.state, run.hook = ScheduleState([Phase(0, compression_hook, run.state)]), schedule_hook
        run.step(1)
        assert len(run.state.phases[0].state.error_feedback) == 3

    run_ranks(1, body)


def test_a_parameter_that_was_frozen_at_first_keeps_its_error_under_the_models_own_name() -> None:
    def body(group: ProcessGroup) -> None:
        run = Run(group, CompressionState(TopK(0.1)), compression_hook, knows_names=True)
        for number in range(4):
            run.step(number, without="first" if number < 2 else "")
        saved = through_a_file(run.state)
        resumed = Run(group, CompressionState(TopK(0.1)), compression_hook, knows_names=True)
        resumed.state.load_state_dict(saved)
        for number in range(4, 7):
            assert_same(resumed.step(number), run.step(number))

    run_ranks(2, body)


def test_numbers_that_were_given_in_several_steps_are_refused() -> None:
    def body(group: ProcessGroup) -> None:
        run = Run(group, CompressionState(TopK(0.1)), compression_hook, knows_names=False)
        run.step(0, without="first")
        run.step(1)
        with pytest.raises(MisuseError, match=r"numbered parameters in several steps.*pass named_parameters"):
            CompressionState(TopK(0.1)).load_state_dict(through_a_file(run.state))

    run_ranks(1, body)


def saved_by(group: ProcessGroup, *, knows_names: bool, model: Model | None = None, without: str = "") -> dict[str, Any]:
    run = Run(group, CompressionState(TopK(0.1)), compression_hook, knows_names=knows_names, model=model)
    run.step(0, without=without)
    return run.state.state_dict()  # type: ignore[no-any-return]  # a Run takes any state


OTHER_NAMES = [
    ({"knows_names": False}, False, "middle", "'parameter 2' only there, none only here"),
    ({"knows_names": False, "without": "middle"}, False, "", "none only there, 'parameter 2' only here"),
    ({"knows_names": False}, True, "", "'parameter 0' and 2 more only there, 'first' and 2 more only here"),
    ({"knows_names": True}, False, "", "'first' and 2 more only there, 'parameter 0' and 2 more only here"),
]
OTHER_SHAPES = [
    ({"knows_names": True, "model": Model({"last": (4, 16)})}, True, "", r"'last' is \[4, 16\] there and \[8, 8\] here"),
    ({"knows_names": False, "model": Model({"last": (4, 16)})}, False, "", r"2' is \[4, 16\] there and \[8, 8\] here"),
]


@pytest.mark.parametrize(
    ("rehearses", "saver", "knows_names", "without", "message"),
    [
        *((rehearses, *case) for rehearses in (True, False) for case in OTHER_NAMES),
        *((False, *case) for case in OTHER_SHAPES),
    ],
)
def test_a_state_of_other_parameters_is_refused_in_the_first_step_and_ever_after(
    rehearses: bool, saver: dict[str, Any], knows_names: bool, without: str, message: str
) -> None:
    def body(group: ProcessGroup) -> None:
        run = Run(group, CompressionState(TopK(0.1)), compression_hook, knows_names=knows_names)
        if rehearses:
            run.step(0, without=without)
        run.state.load_state_dict(saved_by(group, **saver))
        for number in (1, 2):  # also if the script goes on
            with pytest.raises(MisuseError, match=f"{message}.*pass named_parameters in both runs"):
                run.step(number, without=without)

    run_ranks(1, body)


@pytest.mark.parametrize(("saver", "knows_names", "without", "message"), OTHER_SHAPES)
def test_a_load_that_is_refused_changes_nothing(saver: dict[str, Any], knows_names: bool, without: str, message: str) -> None:
    def body(group: ProcessGroup) -> None:
        run, same = (Run(group, CompressionState(TopK(0.1)), compression_hook, knows_names=knows_names) for _ in range(2))
        assert_same(run.step(0), same.step(0))
        with pytest.raises(MisuseError, match=f"{message}.*pass named_parameters in both runs"):
            run.state.load_state_dict(saved_by(group, **saver))
        for number in range(1, 4):
            assert_same(run.step(number, without=without), same.step(number, without=without))

    run_ranks(1, body)


def test_numbers_are_refused_by_a_state_with_names() -> None:
    def body(group: ProcessGroup) -> None:
        state = CompressionState(TopK(0.1), named_parameters=Model().parameters.items())
        with pytest.raises(MisuseError, match="numbers for its parameters, this one names: load it into a state without"):
            state.load_state_dict(saved_by(group, knows_names=False))

    run_ranks(1, body)


def test_a_frozen_parameter_and_a_new_one_do_no_harm_to_the_models_own_names() -> None:
    def body(group: ProcessGroup) -> None:
        for without in (("middle", ""), ("", "middle")):
            run = Run(group, CompressionState(TopK(0.1)), compression_hook, knows_names=True)
            run.state.load_state_dict(saved_by(group, knows_names=True, without=without[0]))
            run.step(1, without=without[1])

    run_ranks(1, body)


@pytest.mark.parametrize("parts", [("", "first", "middle"), ("", "first", "first", "middle"), ("first", "middle", "last")])
def test_a_run_may_resume_several_times_if_each_step_uses_a_part_of_the_model(parts: tuple[str, ...]) -> None:
    """As with several heads of which each step uses one. Each step is a run of its own, which loads and saves the state."""

    def body(group: ProcessGroup) -> None:
        whole = Run(group, CompressionState(TopK(0.1)), compression_hook, knows_names=True)
        saved: Any = None
        for number, without in enumerate(parts):
            run = Run(group, CompressionState(TopK(0.1)), compression_hook, knows_names=True)
            run.is_rebuilt = number > 0
            if saved is not None:
                run.state.load_state_dict(saved)
            assert_same(run.step(number, without=without), whole.step(number, without=without))
            saved = through_a_file(run.state)
            assert set(saved["errors"]) == set(saved["names"]["shapes"])

    run_ranks(2, body)


@pytest.mark.parametrize("rehearses", [False, True])
@pytest.mark.parametrize(
    ("without", "saver", "message"),
    [
        ("middle", {"knows_names": False}, "'parameter 2' only there, none only here"),
        ("", {"knows_names": False, "model": Model({"last": (4, 16)})}, r"'parameter 2' is \[4, 16\] there and \[8, 8\] here"),
    ],
)
def test_a_state_that_is_saved_before_the_first_step_is_checked_in_the_next_run(
    rehearses: bool, without: str, saver: dict[str, Any], message: str
) -> None:
    def body(group: ProcessGroup) -> None:
        ended, run = (Run(group, CompressionState(TopK(0.1)), compression_hook, knows_names=False) for _ in range(2))
        if rehearses:
            # The rehearsal has the parameters of the saved run, so that the state can be loaded.
            ended.model = saver.get("model") or ended.model
            ended.step(0)
        ended.state.load_state_dict(saved_by(group, **saver))
        run.state.load_state_dict(through_a_file(ended.state))
        with pytest.raises(MisuseError, match=message):
            run.step(1, without=without)

    run_ranks(1, body)


def test_one_state_refuses_two_models_of_the_same_names_and_a_parameter_of_another_shape() -> None:
    def body(group: ProcessGroup) -> None:
        state = CompressionState(TopK(0.1))
        one, other = (Run(group, state, compression_hook, knows_names=True) for _ in range(2))
        one.step(0)
        other.step(0)
        with pytest.raises(MisuseError, match="two models that have a parameter 'last'; make a state for each model"):
            one.step(1)
        larger = Run(group, state, compression_hook, knows_names=True, model=Model({"middle": (9, 8)}))
        with pytest.raises(MisuseError, match=r"'middle' is \[9, 8\] now, and was \[8, 8\] before: register the hook"):
            larger.step(1)

    run_ranks(1, body)


def test_a_parameter_that_takes_anothers_place_keeps_its_error() -> None:
    def body(group: ProcessGroup) -> None:
        run = Run(group, CompressionState(TopK(0.1)), compression_hook, knows_names=True)
        same = Run(group, CompressionState(TopK(0.1)), compression_hook, knows_names=True)
        for number in range(4):
            run.model = Model()  # as by `load_state_dict(assign=True)`
            gc.collect()
            assert_same(run.step(number), same.step(number))

    run_ranks(2, body)


def make_diloco(named: list[tuple[str, torch.Tensor]], group: ProcessGroup) -> object:
    optimizer = torch.optim.SGD(list(dict.fromkeys(parameter for _, parameter in named)), lr=0.1)
    return DiLoCoOptimizer(optimizer, named, group)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [
        lambda named, group: CompressionState(TopK(0.5), group, named_parameters=named),
        lambda named, group: PowerSGDState(group, named_parameters=named),
        make_diloco,
    ],
    ids=["compression", "powersgd", "diloco"],
)
def test_two_parameters_with_one_name_are_refused(make: Any) -> None:
    """The names of two modules that are chained. One of the two parameters would be forgotten."""

    def body(group: ProcessGroup) -> None:
        first, second = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        named = [*first.named_parameters(), *first.named_parameters()]  # the same pair twice does no harm
        make(named[:2], group)
        with pytest.raises(InvalidArgumentError, match="one parameter for each name, found two with the name 'weight'"):
            make([*named, *second.named_parameters()], group)

    run_ranks(1, body)
