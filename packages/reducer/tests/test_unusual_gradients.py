"""Gradients that are missing, undefined, taken away, put there by hand, or come twice."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from syncline.collectives import MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.reducer import Reducer
from syncline.reducer.torch_internals import TELLS_OF_UNDEFINED_GRADIENTS
from test_support.chosen_gradients import (
    FORWARD,
    GRAPHS,
    ONE_EACH,
    PAIRS,
    REVERSED,
    average,
    coefficient,
    forward,
    loss,
    make_parameters,
    set_to_none,
    train,
)
from test_support.training_runs import VIEWS

pytestmark = pytest.mark.ranks


class Leaves(torch.autograd.Function):
    """The sum of a vector; its gradient is left undefined if that is asked for."""

    @staticmethod
    def forward(ctx: Any, vector: torch.Tensor, undefined: bool) -> torch.Tensor:
        ctx.shape, ctx.undefined = vector.shape, undefined
        return vector.sum()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]  # torch's is less precise
        return None if ctx.undefined else gradient.expand(ctx.shape), None


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("index", [0, 1, 2, 3])
@pytest.mark.parametrize("when", [0, 1, 3])
def test_a_gradient_that_autograd_leaves_undefined_counts_as_zeros(
    as_view: bool, index: int, when: int, graph: dict[str, bool]
) -> None:
    """On one rank: it counts as zeros."""
    if graph == GRAPHS["static"] and when == 0:
        return  # it learns in its first step that this rank does not use the parameter

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
        for step in range(5):
            set_to_none(parameters)
            reducer.prepare_for_backward()
            total = loss(parameters, group.rank, step, [other for other in REVERSED if other != index])
            undefined = group.rank == 1 and step == when
            total = total + Leaves.apply(parameters[index][1], undefined) * 4  # type: ignore[no-untyped-call]
            total.backward()
            gradient = parameters[index][1].grad
            assert gradient is not None
            assert gradient.tolist() == [2.0 if step == when else 4.0] * 2, step

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_gradient_that_a_users_hook_drops_is_named(as_view: bool, before: bool, graph: dict[str, bool]) -> None:
    """It would count as zeros, or as unused; registered before the reducer or after it, noticed in whatever step it begins."""

    def body(group: ProcessGroup) -> None:
        for begins in (0, 2, 3):
            parameters = make_parameters()
            steps: list[int] = []

            def drop(parameter: torch.Tensor, begins: int = begins, steps: list[int] = steps) -> None:
                if len(steps) > begins:
                    parameter.grad = None

            if before:
                parameters[1][1].register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
            reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
            if not before:
                parameters[1][1].register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
            for step in range(begins):
                steps.append(step)
                train(reducer, parameters, group, [REVERSED], first_step=step)
            steps.append(begins)
            with pytest.raises(MisuseError, match=r"gradient of parameter 'p1' was gone .*register_post_average_grad_hook"):
                train(reducer, parameters, group, [REVERSED], first_step=begins)

    run_ranks(2, body)


@pytest.mark.parametrize("cap", [ONE_EACH, PAIRS])
@pytest.mark.parametrize("index", FORWARD)
def test_a_gradient_that_a_users_hook_drops_in_a_checkpoint_is_named(cap: int, index: int) -> None:
    """Of a static graph."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=cap, static_graph=True)
        steps: list[int] = []

        def drop(parameter: torch.Tensor) -> None:
            if len(steps) > 2:
                parameter.grad = None

        parameters[index][1].register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        inputs = torch.zeros((), dtype=torch.float64, requires_grad=True)

        def backward(step: int) -> None:
            steps.append(step)
            set_to_none(parameters)
            reducer.prepare_for_backward()
            checkpoint(
                lambda inputs: loss(parameters, group.rank, step, REVERSED) + inputs, inputs, use_reentrant=True
            ).backward()

        for step in range(2):
            backward(step)
            for number, (_, parameter) in enumerate(parameters):
                assert parameter.grad is not None
                assert parameter.grad.tolist() == average(2, number, step)
        with pytest.raises(MisuseError, match=rf"gradient of parameter 'p{index}' was gone"):
            backward(2)

    run_ranks(2, body)


def test_a_gradient_that_only_autograd_grad_computes_may_be_unused_in_spite_of_a_users_hook() -> None:
    """As in GradNorm: between forward and backward, `torch.autograd.grad` reaches a part that the backward leaves out."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        for _, parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)  # type: ignore[no-untyped-call]
        reducer = Reducer(parameters, group, find_unused_parameters=True)
        for step in range(3):
            set_to_none(parameters)
            reducer.prepare_for_backward()
            torch.autograd.grad(loss(parameters, group.rank, step, REVERSED), parameters[0][1])
            loss(parameters, group.rank, step, REVERSED[:-1]).backward()
            assert parameters[0][1].grad is None
            assert parameters[1][1].grad is not None
            assert parameters[1][1].grad.tolist() == average(2, 1, step)

    run_ranks(2, body)


def test_a_gradient_that_a_users_hook_drops_is_named_after_a_conversion() -> None:
    """The parameter has another node in autograd's graph then."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        drops: list[bool] = []

        def drop(parameter: torch.Tensor) -> None:
            if drops:
                parameter.grad = None

        parameters[1][1].register_post_accumulate_grad_hook(drop)  # type: ignore[no-untyped-call]
        reducer = Reducer(parameters, group)
        for step in range(3):
            train(reducer, parameters, group, [REVERSED], first_step=step)
        parameter = parameters[1][1]
        parameter.data = parameter.data.float()
        parameter.data = parameter.data.double()
        reducer.find_nodes_again()
        drops.append(True)
        with pytest.raises(MisuseError, match=r"gradient of parameter 'p1' was gone"):
            train(reducer, parameters, group, [REVERSED], first_step=3)

    run_ranks(2, body)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_parameter_that_a_users_hook_steps_is_named(before: bool, graph: dict[str, bool]) -> None:
    """The step was made with this rank's own gradient, which stays."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducers = [] if before else [Reducer(parameters, group, **graph)]
        optimizer = torch.optim.SGD([parameters[2][1]], lr=0.1)
        parameters[2][1].register_post_accumulate_grad_hook(lambda _: optimizer.step())  # type: ignore[no-untyped-call]
        reducer = reducers.pop() if reducers else Reducer(parameters, group, **graph)
        with pytest.raises(MisuseError, match=r"parameter 'p2' was changed .*register_post_average_grad_hook"):
            train(reducer, parameters, group, [REVERSED])

    run_ranks(2, body)


def test_a_hook_that_looks_on_changes_nothing_and_an_undefined_gradient_is_none_that_was_dropped(
    graph: dict[str, bool],
) -> None:
    """Autograd calls the hook, too, where a function has no gradient for the parameter."""

    class Without(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: torch.Tensor) -> torch.Tensor:
            return torch.ones((), dtype=torch.float64)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None]:
            return None, None

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, **graph)
        seen: list[torch.Tensor | None] = []
        for _, parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lambda one: seen.append(one.grad))  # type: ignore[no-untyped-call]
        for step in range(3):
            set_to_none(parameters)
            reducer.prepare_for_backward()
            values = [parameter for _, parameter in parameters]
            nothing = Without.apply(values[0], values[1])  # type: ignore[no-untyped-call]
            (nothing + sum((values[i] * coefficient(group.rank, i, step)).sum() for i in (2, 3))).backward()
            for index in (2, 3):
                assert values[index].grad.tolist() == average(2, index, step)  # type: ignore[union-attr]
        assert (None in seen) == TELLS_OF_UNDEFINED_GRADIENTS
        assert reducer.has_users_hooks
        assert "'p0', 'p1', 'p2', 'p3'" in reducer.users_hooks_in_words()

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("missing", [0, 1, 2, 3])
@pytest.mark.parametrize("static", [False, True])
def test_a_missing_gradient_is_named(as_view: bool, missing: int, static: bool) -> None:
    advice = "The graph is not static" if static else "Freeze them"

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=static)
        train(reducer, parameters, group, [REVERSED] * 3)
        with pytest.raises(MisuseError, match=rf"got no gradient in it: 'p{missing}'\. {advice}"):
            train(reducer, parameters, group, [[index for index in REVERSED if index != missing]], first_step=3)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("static", [False, True])
def test_a_missing_gradient_is_named_where_parameters_were_converted(as_view: bool, static: bool) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=static)
        train(reducer, parameters, group, [REVERSED] * 3)
        set_to_none(parameters)
        for _, parameter in parameters:
            parameter.data = parameter.data.float()
            parameter.data = parameter.data.double()
        with pytest.raises(MisuseError, match="no gradient in it: 'p3'"):
            forward(reducer, parameters, group, 3, [2, 1, 0]).backward()

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("reached", [[3, 1], [1]])
def test_a_backward_may_reach_only_parameters_in_the_middle_of_buckets(
    as_view: bool, reached: list[int], graph: dict[str, bool]
) -> None:
    """It reaches some parameters; the others are unused, or missing by name."""
    missing = ", ".join(f"'p{index}'" for index in FORWARD if index not in reached)

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
        train(reducer, parameters, group, [REVERSED] * 3)
        if "find_unused_parameters" not in graph:
            with pytest.raises(MisuseError, match=rf"got no gradient in it: {missing}\. (The graph is not static|Freeze them)"):
                train(reducer, parameters, group, [reached], first_step=3)
            return
        for step in (3, 4):
            set_to_none(parameters)
            forward(reducer, parameters, group, step, reached).backward()  # type: ignore[no-untyped-call]
            for index, (_, parameter) in enumerate(parameters):
                found = None if parameter.grad is None else parameter.grad.tolist()
                assert found == (average(2, index, step) if index in reached else None)

    run_ranks(2, body)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("converted_after", [0, 3])  # after 1, buckets are built anew, for the new dtype
def test_a_parameter_that_was_converted_is_named(converted_after: int, static: bool) -> None:
    """Its bucket was made for another dtype."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, static_graph=static)
        reducer.rebuild_buckets()
        train(reducer, parameters, group, [REVERSED] * converted_after)
        for _, parameter in parameters:
            parameter.grad = None
            parameter.data = parameter.data.float()
        total = forward(reducer, parameters, group, 3, REVERSED)
        with pytest.raises(MisuseError, match=r"expected a gradient of torch.float64 for parameter 'p\d'.*found torch.float32"):
            total.backward()

    run_ranks(2, body)


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has no grad_dtype")
def test_a_gradient_of_another_dtype_than_its_parameter_is_refused_and_names_grad_dtype() -> None:
    def body(group: ProcessGroup) -> None:
        parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        parameter.grad_dtype = torch.float32
        reducer = Reducer([("w", parameter)], group)
        reducer.prepare_for_backward()
        with pytest.raises(MisuseError) as caught:
            (parameter * (group.rank + 1)).sum().backward()
        headline = str(caught.value).splitlines()[0]
        assert re.search(r"bfloat16 for parameter 'w' on .*, found torch.float32: leave its `grad_dtype` unset", headline)
        assert len(headline) <= 200

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_parameter_without_a_gradient_in_the_first_backward_stays_without(as_view: bool) -> None:
    """It stays without one, and a gradient for it is an error by name, also if nothing comes after it."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view, static_graph=True)
        for step in range(4):
            set_to_none(parameters)
            forward(reducer, parameters, group, step, [3, 2, 0]).backward()
            assert parameters[1][1].grad is None
            for index in (0, 2, 3):
                gradient = parameters[index][1].grad
                assert gradient is not None
                assert gradient.tolist() == average(2, index, step)
        set_to_none(parameters)
        reducer.prepare_for_backward()
        with pytest.raises(MisuseError, match="'p1' became ready twice"):
            loss(parameters, group.rank, 4, [3, 2, 0, 1]).backward()

    run_ranks(2, body)


def test_a_parameter_may_be_frozen_later() -> None:
    """One without a gradient in the first backward may be, and a gradient after it thaws is an error by name."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, static_graph=True)
        for step in range(5):
            if step == 2:
                parameters[1][1].requires_grad_(False)
            if step < 3:
                set_to_none(parameters)
            forward(reducer, parameters, group, step, [3, 2, 0]).backward()
        parameters[1][1].requires_grad_(True)
        reducer.prepare_for_backward()
        with pytest.raises(MisuseError, match="'p1' became ready twice"):
            loss(parameters, group.rank, 6, [3, 2, 0, 1]).backward()

    run_ranks(2, body)


# ---- gradients that come twice ----


def add_again(parameter: torch.nn.Parameter) -> None:
    """A backward within the running one, in which the parameter gets another gradient."""
    with torch.enable_grad():
        (parameter * 5).sum().backward()


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize(
    ("kind", "after"),
    [(kind, after) for kind in GRAPHS for after in (0, 1, 3) if (kind, after) != ("static", 0)],  # where it learns how often
)
@pytest.mark.parametrize(
    ("twice", "when"),
    [
        pytest.param(7, 6, id="before-its-bucket-starts"),
        pytest.param(6, 4, id="when-its-bucket-is-complete-but-for-the-last"),
        pytest.param(4, 3, id="its-buckets-last-after-the-start"),
        pytest.param(6, 0, id="another-after-the-start"),
        pytest.param(7, 0, id="its-buckets-first-after-the-start"),
        pytest.param(1, 0, id="in-the-last-bucket"),
        pytest.param(6, 5, id="at-once"),
    ],
)
def test_a_gradient_that_comes_twice_is_named(as_view: bool, kind: str, after: int, twice: int, when: int) -> None:
    """In buckets of four: gradient 7 comes first, and 0 last."""
    order = list(range(7, -1, -1))

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters(8)
        reducer = Reducer(
            parameters,
            group,
            bucket_cap_bytes=2 * PAIRS,
            first_bucket_cap_bytes=2 * PAIRS,
            gradient_as_bucket_view=as_view,
            **GRAPHS[kind],
        )
        train(reducer, parameters, group, [order] * after)
        parameters[when][1].register_hook(lambda _: add_again(parameters[twice][1]))
        set_to_none(parameters)
        total = forward(reducer, parameters, group, after, order)
        with pytest.raises(MisuseError, match=rf"gradient of parameter 'p{twice}' became ready twice.*(not static|re-entrant)"):
            total.backward()  # type: ignore[no-untyped-call]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("is_once", [True, False], ids=["once", "three-times"])
def test_a_static_graph_learns_that_a_gradient_comes_twice(as_view: bool, is_once: bool) -> None:
    """To come once or three times is an error by name then."""
    order = list(range(7, -1, -1))

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters(8)
        reducer = Reducer(parameters, group, bucket_cap_bytes=2 * PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
        handle = parameters[3][1].register_hook(lambda _: add_again(parameters[6][1]))
        for step in range(3):
            set_to_none(parameters)
            forward(reducer, parameters, group, step, order).backward()  # type: ignore[no-untyped-call]
            for index, (_, parameter) in enumerate(parameters):
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [average(2, index, step)[0] + (5 if index == 6 else 0)] * 2
        set_to_none(parameters)
        if is_once:
            handle.remove()
            error = "got no gradient in it: 'p6'.*not static"
        else:
            parameters[2][1].register_hook(lambda _: add_again(parameters[6][1]))
            error = "'p6' became ready twice.*not static"
        total = forward(reducer, parameters, group, 3, order)
        with pytest.raises(MisuseError, match=error):
            total.backward()  # type: ignore[no-untyped-call]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_second_gradient_is_named_where_the_buckets_first_parameter_is_unused(as_view: bool) -> None:
    """Of a static graph, on one rank; the buckets have the order of the other rank, where the parameter is used."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters(8)
        reducer = Reducer(parameters, group, bucket_cap_bytes=2 * PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
        order = list(range(7 if group.rank == 0 else 6, -1, -1))
        for step in range(3):
            set_to_none(parameters)
            forward(reducer, parameters, group, step, order).backward()  # type: ignore[no-untyped-call]
        set_to_none(parameters)
        total = forward(reducer, parameters, group, 3, order)
        if group.rank == 0:
            total.backward()  # type: ignore[no-untyped-call]
            return
        parameters[0][1].register_hook(lambda _: add_again(parameters[5][1]))
        with pytest.raises(MisuseError, match="'p5' became ready twice"):
            total.backward()  # type: ignore[no-untyped-call]

    run_ranks(2, body)


# ---- gradients that users put there ----


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("after", [0, 1, 3], ids=["first-step", "rebuild", "later"])
@pytest.mark.parametrize("when", ["before forward", "after forward", "in backward"])
@pytest.mark.parametrize("index", FORWARD)
def test_a_gradient_that_is_put_there_by_hand_does_not_count_as_computed(
    as_view: bool, after: int, when: str, index: int
) -> None:
    """Backward does not reach the parameter: it is missing, by name, whatever its `.grad` holds."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view)
        train(reducer, parameters, group, [REVERSED] * after)
        set_to_none(parameters)

        def put(_: object = None) -> None:
            parameters[index][1].grad = torch.full((2,), group.rank + 1.0, dtype=torch.float64)

        if when == "before forward":
            put()
        total = forward(reducer, parameters, group, after, [other for other in REVERSED if other != index])
        if when == "after forward":
            put()
        elif when == "in backward":
            parameters[(index + 1) % 4][1].register_hook(put)
        with pytest.raises(MisuseError, match=f"got no gradient in it: 'p{index}'"):
            total.backward()  # type: ignore[no-untyped-call]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("after", [1, 3])
def test_a_gradient_that_is_put_there_by_hand_is_named_in_a_static_graph(as_view: bool, after: int) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
        train(reducer, parameters, group, [REVERSED] * after)
        set_to_none(parameters)
        total = forward(reducer, parameters, group, after, [3, 2, 0])
        parameters[1][1].grad = torch.full((2,), group.rank + 1.0, dtype=torch.float64)
        with pytest.raises(MisuseError, match=r"got no gradient in it: 'p1'.*not static"):
            total.backward()  # type: ignore[no-untyped-call]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_gradient_that_is_put_there_by_hand_stays_where_nobody_uses_the_parameter(as_view: bool) -> None:
    """With unused parameters: it is each rank's own."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(
            parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, find_unused_parameters=True
        )
        for step in range(4):
            set_to_none(parameters)
            parameters[1][1].grad = torch.full((2,), group.rank + 1.0, dtype=torch.float64)
            forward(reducer, parameters, group, step, [3, 2, 0]).backward()  # type: ignore[no-untyped-call]
            assert parameters[1][1].grad.tolist() == [group.rank + 1.0] * 2
            for index in (0, 2, 3):
                gradient = parameters[index][1].grad
                assert gradient is not None
                assert gradient.tolist() == average(2, index, step)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("value", [None, 9.0], ids=["taken-away", "replaced"])
def test_a_gradient_that_is_replaced_after_its_bucket_was_collected_gets_the_average(
    as_view: bool, value: float | None, graph: dict[str, bool]
) -> None:
    """The average of what was collected, whatever a later hook has put in its place."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
        train(reducer, parameters, group, [REVERSED] * 3)

        def replace(_: torch.Tensor) -> None:
            parameters[3][1].grad = None if value is None else torch.full((2,), value, dtype=torch.float64)

        parameters[0][1].register_hook(replace)
        train(reducer, parameters, group, [REVERSED] * 2, first_step=3)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("numel", [3, 70_000], ids=["small", "large"])
def test_gradients_that_torch_conjugates_lazily_are_averaged(as_view: bool, numel: int) -> None:
    """As autograd makes them for `w.conj()`, and as a program leaves them that conjugates its gradients."""

    def body(group: ProcessGroup) -> list[complex]:
        parameters = [(f"w{i}", torch.nn.Parameter(torch.full((numel,), 1 + 1j))) for i in range(2)]
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view)
        found = []
        for step in range(3):
            factor = complex(group.rank + 1, step)
            reducer.prepare_for_backward()
            sum((parameter.conj() * factor).real.sum() for _, parameter in parameters).backward()
            for _, parameter in parameters:
                assert parameter.grad is not None
                assert len(set(parameter.grad.tolist())) == 1
                found.append(parameter.grad[0].item())
                # The next backward adds to this gradient.
                parameter.grad = parameter.grad.conj()
        return found

    def on_one_process() -> list[complex]:
        gradient, found = 0j, []
        for step in range(3):
            gradient += complex(1.5, step)
            found += [gradient] * 2
            gradient = gradient.conjugate()
        return found

    assert run_ranks(2, body) == [on_one_process()] * 2
