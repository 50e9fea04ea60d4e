"""Buckets that have one hook each; see Note [One hook for a bucket]."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from syncline.collectives import MisuseError, ProcessGroup, Work
from syncline.collectives.testing import run_ranks
from syncline.reducer import GradBucket, Reducer

pytestmark = pytest.mark.ranks

GRAPHS = {"dynamic": {}, "static": {"static_graph": True}, "find-unused": {"find_unused_parameters": True}}
VIEWS = [pytest.param(False, id="copied"), pytest.param(True, id="as-view")]
ONE_EACH = 0  # a cap of 0 bytes: every parameter has a bucket to itself
PAIRS = 32  # of two elements of float64: two parameters in each bucket
FORWARD, REVERSED = [0, 1, 2, 3], [3, 2, 1, 0]


@pytest.fixture(params=[pytest.param(options, id=name) for name, options in GRAPHS.items()])
def graph(request: pytest.FixtureRequest) -> dict[str, bool]:
    """What is known of the graph."""
    return dict(request.param)


class Counted:
    """A group that counts the all_reduces that were issued."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.issued = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_reduce(self, *arguments: Any, **options: Any) -> Work:
        self.issued += 1
        return self._group.all_reduce(*arguments, **options)


def make_parameters(count: int = 4) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"p{i}", torch.nn.Parameter(torch.ones(2, dtype=torch.float64))) for i in range(count)]


def coefficient(rank: int, index: int, step: int) -> float:
    return (rank + 1.0) * (index + 1) + 100 * step


def average(world_size: int, index: int, step: int) -> list[float]:
    return [sum(coefficient(rank, index, step) for rank in range(world_size)) / world_size] * 2


def loss(parameters: Sequence[tuple[str, torch.nn.Parameter]], rank: int, step: int, arrival: Sequence[int]) -> torch.Tensor:
    """Its gradients are the coefficients, and arrive in this order: autograd visits the latest node first."""
    total = torch.zeros((), dtype=torch.float64)
    for index in reversed(arrival):
        total = total + (parameters[index][1] * coefficient(rank, index, step)).sum()
    return total


def forward(
    reducer: Reducer,
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    group: ProcessGroup,
    step: int,
    arrival: Sequence[int],
) -> torch.Tensor:
    """A loss whose backward is reduced."""
    reducer.prepare_for_backward()
    total = loss(parameters, group.rank, step, arrival)
    reducer.watch([total])
    return total


def set_to_none(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
    """As `zero_grad()` does."""
    for _, parameter in parameters:
        parameter.grad = None


def train(
    reducer: Reducer,
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    group: ProcessGroup,
    arrivals: Sequence[Sequence[int]],
    *,
    first_step: int = 0,
    before: Callable[[int], None] | None = None,
) -> None:
    """Steps, each of which must give the averages."""
    for step, arrival in enumerate(arrivals, first_step):
        set_to_none(parameters)
        if before is not None:
            before(step)
        forward(reducer, parameters, group, step, arrival).backward()
        for index, (_, parameter) in enumerate(parameters):
            assert parameter.grad is not None
            assert parameter.grad.tolist() == average(group.size, index, step), (step, index)


def noting(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> list[int]:
    """Which parameters have, or ever had, a hook of their own: its cost stays when it is removed.

    In a regular graph the last one of a bucket that has one hook has it at its node of the graph instead.
    """
    return [index for index, (_, parameter) in enumerate(parameters) if parameter._post_accumulate_grad_hooks is not None]


@pytest.mark.parametrize("as_view", VIEWS)
def test_only_the_first_parameter_and_the_last_of_each_bucket_are_hooked(as_view: bool, graph: dict[str, bool]) -> None:
    """The hooks by which the order was learnt are gone without a trace, also if a loss was kept."""

    def body(group: ProcessGroup) -> None:
        parameters, kept = make_parameters(8), []
        reducer = Reducer(parameters, group, bucket_cap_bytes=2 * PAIRS, gradient_as_bucket_view=as_view, **graph)
        for step in range(4):
            set_to_none(parameters)
            kept.append(forward(reducer, parameters, group, step, list(range(7, -1, -1))))
            kept[-1].backward()  # type: ignore[no-untyped-call]
            assert [parameter.grad.tolist() for _, parameter in parameters if parameter.grad is not None] == [
                average(2, index, step) for index in range(8)
            ]
        assert noting(parameters) == ([0, 4, 7] if "find_unused_parameters" in graph else [7])
        assert all(parameter._backward_hooks is None for _, parameter in parameters)

    run_ranks(2, body)


def test_users_hooks_on_gradients_stay_when_the_order_is_learnt(graph: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        seen: list[int] = []
        parameters[1][1].register_hook(lambda _: seen.append(1))
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, **graph)
        parameters[2][1].register_hook(lambda _: seen.append(2))
        train(reducer, parameters, group, [REVERSED] * 4)
        assert seen == [2, 1] * 4

    run_ranks(2, body)


def test_without_outputs_to_watch_each_gradient_is_noted(graph: dict[str, bool]) -> None:
    """But for static graphs, which have no backward that one hook for a bucket does not see."""

    def body(group: ProcessGroup) -> list[int]:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, **graph)
        for step in range(4):
            set_to_none(parameters)
            reducer.prepare_for_backward()
            loss(parameters, group.rank, step, REVERSED).backward()  # type: ignore[no-untyped-call]
        return noting(parameters)

    assert run_ranks(2, body) == [[3] if "static_graph" in graph else FORWARD] * 2


@pytest.mark.parametrize("as_view", VIEWS)
def test_outputs_without_a_graph_once(as_view: bool, graph: dict[str, bool]) -> None:
    """From then on each gradient is noted, in the backward of that forward, too."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
        train(reducer, parameters, group, [REVERSED] * 3)
        set_to_none(parameters)
        reducer.prepare_for_backward()
        reducer.watch([torch.ones(2)])
        with contextlib.nullcontext() if graph else pytest.raises(MisuseError, match="got no gradient in it: 'p0', 'p2', 'p3'"):
            loss(parameters, group.rank, 3, REVERSED if "static_graph" in graph else [1]).backward()  # type: ignore[no-untyped-call]
        if graph:
            assert parameters[1][1].grad is not None
            assert parameters[1][1].grad.tolist() == average(2, 1, 3)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_failed_forward_changes_nothing(as_view: bool, graph: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> list[int]:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
        for steps in (1, 2, 2):
            set_to_none(parameters)
            reducer.prepare_for_backward()
            reducer.withdraw()
            train(reducer, parameters, group, [REVERSED] * steps)
        return noting(parameters)

    assert run_ranks(2, body) == [[0, 2, 3] if "find_unused_parameters" in graph else [3]] * 2


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("after", range(4))
def test_gradients_that_are_only_computed(as_view: bool, after: int, graph: dict[str, bool]) -> None:
    """torch.autograd.grad goes through the outputs, calls hooks on gradients, and accumulates nothing."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
        train(reducer, parameters, group, [REVERSED] * after)
        for step in range(after, after + 3):
            set_to_none(parameters)
            total = forward(reducer, parameters, group, step, REVERSED)
            computed = torch.autograd.grad(total, [parameter for _, parameter in parameters], retain_graph=True)
            assert computed[1].tolist() == [coefficient(group.rank, 1, step)] * 2
            total.backward()  # type: ignore[no-untyped-call]
            for index, (_, parameter) in enumerate(parameters):
                assert parameter.grad is not None
                assert parameter.grad.tolist() == average(2, index, step)

    run_ranks(2, body)


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
def test_a_gradient_that_autograd_leaves_undefined(as_view: bool, index: int, when: int, graph: dict[str, bool]) -> None:
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
            reducer.watch([total])
            total.backward()
            gradient = parameters[index][1].grad
            assert gradient is not None
            assert gradient.tolist() == [2.0 if step == when else 4.0] * 2, step

    run_ranks(2, body)


def test_two_reducers_of_the_same_parameters(graph: dict[str, bool]) -> None:
    """Each notes each gradient; when one is closed, the other may have one hook for a bucket if it has not begun yet."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        options = {"bucket_cap_bytes": PAIRS, **graph}
        first = Reducer(parameters, group, **options)  # type: ignore[arg-type]
        train(first, parameters, group, [REVERSED] * 3)
        assert noting(parameters) == ([0, 2, 3] if "find_unused_parameters" in graph else [3])
        second = Reducer(parameters[:2], group, **options)  # type: ignore[arg-type]
        for step in range(4):
            set_to_none(parameters)
            for reducer in (first, second):
                reducer.prepare_for_backward()
            total = loss(parameters, group.rank, step, REVERSED)
            for reducer in (first, second):
                reducer.watch([total])
            total.backward()  # type: ignore[no-untyped-call]
            for index, (_, parameter) in enumerate(parameters):
                assert parameter.grad is not None
                assert parameter.grad.tolist() == average(2, index, step)
        assert noting(parameters) == FORWARD
        first.close()
        second.close()
        others = make_parameters()
        Reducer(others, group, **options).close()  # type: ignore[arg-type]
        train(Reducer(others, group, **options), others, group, [REVERSED] * 3)  # type: ignore[arg-type]
        assert noting(others) == ([0, 2, 3] if "find_unused_parameters" in graph else [3])

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("static", [False, True])
def test_a_backward_within_a_users_hook(as_view: bool, after: int, static: bool) -> None:
    """The gradient whose hook it is, is not there yet; its bucket shall wait for it."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters(6)
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=static)
        reached_by = {3: 2, 1: 0}

        def reach_another(index: int) -> None:
            with torch.enable_grad():
                (parameters[reached_by[index]][1] * 6.0 * (group.rank + 1)).sum().backward()

        train(reducer, parameters, group, [[5, 4, 3, 2, 1, 0]] * after)
        for index in reached_by:
            parameters[index][1].register_hook(lambda _, index=index: reach_another(index))
        for step in range(after, after + 3):
            set_to_none(parameters)
            forward(reducer, parameters, group, step, [5, 4, 3, 1]).backward()  # type: ignore[no-untyped-call]
            for index, (_, parameter) in enumerate(parameters):
                assert parameter.grad is not None
                wanted = [9.0, 9.0] if index in reached_by.values() else average(2, index, step)
                assert parameter.grad.tolist() == wanted, (step, index)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("seed", range(12))
def test_parameters_that_are_used_now_and_then(as_view: bool, seed: int) -> None:
    """Other ones on each rank, in steps with and without synchronisation; those that nobody uses keep what they have."""
    count, steps = 6, 10
    pick = random.Random(seed)
    cap, skip = pick.choice([ONE_EACH, PAIRS, 48, 1 << 20]), pick.random() < 0.5
    settled = pick.choice([1, 3, 6])  # steps in which all are used
    script = []
    for step in range(steps):
        used = [pick.sample(range(count), count if step < settled else pick.randint(1, count)) for _ in range(2)]
        if pick.random() < 0.7:
            used = [sorted(indices, reverse=True) for indices in used]
        script.append((pick.random() < 0.15, pick.random() < 0.8, used))

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters(count)
        reducer = Reducer(
            parameters,
            group,
            bucket_cap_bytes=cap,
            gradient_as_bucket_view=as_view,
            find_unused_parameters=True,
            skip_all_reduce_unused_params=skip,
        )
        expected: dict[int, list[float]] = {}  # of each parameter on each rank; 0 on a rank that has none
        has_any: list[set[int]] = [set(), set()]
        pending: list[set[int]] = [set(), set()]
        for step, (unsynchronised, clears, used) in enumerate(script):
            if clears:
                set_to_none(parameters)
                expected, has_any = {}, [set(), set()]
            if unsynchronised:
                reducer.prepare_for_backward(synchronizes=False)
                total = loss(parameters, group.rank, step, used[group.rank])
            else:
                total = forward(reducer, parameters, group, step, used[group.rank])
            total.backward()  # type: ignore[no-untyped-call]
            for rank in range(2):
                for index in used[rank]:
                    expected.setdefault(index, [0.0, 0.0])[rank] += coefficient(rank, index, step)
                    has_any[rank].add(index)
                    pending[rank].add(index)
            if not unsynchronised:
                for index in pending[0] | pending[1]:
                    expected[index] = [sum(expected.get(index, [0.0, 0.0])) / 2] * 2
                    for rank in range(2):
                        has_any[rank].add(index)
                pending = [set(), set()]
            for index, (_, parameter) in enumerate(parameters):
                found = None if parameter.grad is None else parameter.grad.tolist()
                wanted = [expected[index][group.rank]] * 2 if index in has_any[group.rank] else None
                assert found == wanted, (step, index)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("cap", [ONE_EACH, PAIRS])
def test_buckets_still_overlap_with_backward(as_view: bool, cap: int, graph: dict[str, bool]) -> None:
    """When the last gradient is computed, all buckets but its own are on their way."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        counted = Counted(group)
        reducer = Reducer(parameters, counted, bucket_cap_bytes=cap, gradient_as_bucket_view=as_view, **graph)  # type: ignore[arg-type]
        seen: list[int] = []
        parameters[0][1].register_hook(lambda _: seen.append(counted.issued))
        marks: list[int] = []
        train(reducer, parameters, group, [REVERSED] * 4, before=lambda _: marks.append(counted.issued))
        others = len(reducer.buckets) - 1
        found = [after - before for after, before in zip(seen, marks, strict=True)]
        assert found == [0 if "static_graph" in graph else others, others, others, others]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("cap", [ONE_EACH, PAIRS, 1 << 20])
def test_another_order_costs_only_time(as_view: bool, cap: int, graph: dict[str, bool]) -> None:
    """Also if it changes on one rank only; from then on each gradient is noted, where a bucket has more than one."""

    def body(group: ProcessGroup) -> list[int]:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=cap, gradient_as_bucket_view=as_view, **graph)
        changed = FORWARD if group.rank == 0 else REVERSED
        train(reducer, parameters, group, [REVERSED, REVERSED, REVERSED, changed, changed, REVERSED, *[[2, 0, 3, 1]] * 2])
        return noting(parameters)

    assert run_ranks(2, body) == [[3] if cap == ONE_EACH and "find_unused_parameters" not in graph else FORWARD] * 2


@pytest.mark.parametrize("as_view", VIEWS)
def test_each_rank_has_its_own_order(as_view: bool, graph: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> list[int]:
        parameters = make_parameters(8)
        reducer = Reducer(parameters, group, bucket_cap_bytes=2 * PAIRS, gradient_as_bucket_view=as_view, **graph)
        arrival = [list(range(7, -1, -1)), list(range(8)), [2, 0, 3, 6, 7, 1, 5, 4]][group.rank]
        train(reducer, parameters, group, [arrival] * 5)
        return noting(parameters)

    assert all(len(found) < 8 for found in run_ranks(3, body))


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("kept_from", [1, 2, 4])
@pytest.mark.parametrize("then", [REVERSED, FORWARD], ids=["same-order", "another-order"])
def test_gradients_that_are_kept_are_noted_one_by_one(
    as_view: bool, kept_from: int, then: Sequence[int], graph: dict[str, bool]
) -> None:
    """That a gradient is there says nothing then."""

    def body(group: ProcessGroup) -> list[int]:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
        train(reducer, parameters, group, [REVERSED] * kept_from)
        expected = [torch.tensor(average(2, index, kept_from - 1), dtype=torch.float64) for index in range(4)]
        for step in range(kept_from, kept_from + 3):
            forward(reducer, parameters, group, step, then).backward()
            for index, (_, parameter) in enumerate(parameters):
                expected[index] += torch.tensor(average(2, index, step), dtype=torch.float64)
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, expected[index]), (step, index)
        return noting(parameters)

    assert run_ranks(2, body) == [FORWARD] * 2


@pytest.mark.parametrize("as_view", VIEWS)
def test_what_was_added_up_without_synchronisation_is_reduced(as_view: bool, graph: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
        train(reducer, parameters, group, [REVERSED] * 3)
        set_to_none(parameters)
        reducer.prepare_for_backward(synchronizes=False)
        loss(parameters, group.rank, 3, [2, 1]).backward()  # it may leave some out
        forward(reducer, parameters, group, 4, REVERSED).backward()
        for index, (_, parameter) in enumerate(parameters):
            assert parameter.grad is not None
            extra = average(2, index, 3)[0] if index in (1, 2) else 0
            assert parameter.grad.tolist() == [average(2, index, 4)[0] + extra] * 2

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("missing", [0, 1, 2, 3])
@pytest.mark.parametrize("static", [False, True])
def test_a_gradient_that_is_missing_is_named(as_view: bool, missing: int, static: bool) -> None:
    advice = "The graph is not static" if static else "Every parameter must take part"

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=static)
        train(reducer, parameters, group, [REVERSED] * 3)
        with pytest.raises(MisuseError, match=rf"got no gradient in it: 'p{missing}'\. {advice}"):
            train(reducer, parameters, group, [[index for index in REVERSED if index != missing]], first_step=3)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("reached", [[3, 1], [1]])
def test_a_backward_that_reaches_no_buckets_last_parameter(as_view: bool, reached: list[int], graph: dict[str, bool]) -> None:
    """It is seen by the first gradient, or by the outputs, which a static graph does not need."""
    missing = ", ".join(f"'p{index}'" for index in FORWARD if index not in reached)

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
        train(reducer, parameters, group, [REVERSED] * 3)
        if "find_unused_parameters" not in graph:
            with pytest.raises(MisuseError, match=rf"got no gradient in it: {missing}\. (The graph is not static|Every param)"):
                train(reducer, parameters, group, [reached], first_step=3)
            return
        for step in (3, 4):
            set_to_none(parameters)
            forward(reducer, parameters, group, step, reached).backward()  # type: ignore[no-untyped-call]
            for index, (_, parameter) in enumerate(parameters):
                found = None if parameter.grad is None else parameter.grad.tolist()
                assert found == (average(2, index, step) if index in reached else None)

    if reached == [3, 1] or "static_graph" not in graph:
        run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize(
    ("twice", "when", "complaint"),
    [
        pytest.param(4, 0, r"'p4' became ready twice", id="its-buckets-last"),
        pytest.param(6, 0, r"gradient of .*'p6'.* came on rank \d.*being reduced already", id="another"),
        pytest.param(6, 5, None, id="before-it-was-collected"),
    ],
)
def test_a_gradient_that_comes_twice(
    as_view: bool, twice: int, when: int, complaint: str | None, graph: dict[str, bool]
) -> None:
    """It is an error, if the bucket is being reduced already; else both are reduced."""
    order = list(range(7, -1, -1))

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters(8)
        reducer = Reducer(parameters, group, bucket_cap_bytes=2 * PAIRS, gradient_as_bucket_view=as_view, **graph)
        train(reducer, parameters, group, [order] * 3)

        def again(_: torch.Tensor) -> None:
            handle.remove()
            with torch.enable_grad():
                (parameters[twice][1] * 5).sum().backward()

        handle = parameters[when][1].register_hook(again)
        set_to_none(parameters)
        total = forward(reducer, parameters, group, 3, order)
        if complaint is not None:
            with pytest.raises(MisuseError, match=f"{complaint}.*(The graph is not static|re-entrant)"):
                total.backward()
        else:
            total.backward()
            assert parameters[twice][1].grad is not None
            assert parameters[twice][1].grad.tolist() == [average(2, twice, 3)[0] + 5] * 2

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_gradient_that_replaces_one_that_was_taken_away(as_view: bool, graph: dict[str, bool]) -> None:
    """Taken away alone it is given anew; see `Bucket.deliver`."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
        train(reducer, parameters, group, [REVERSED] * 3)

        def take_away(_: torch.Tensor) -> None:
            parameters[3][1].grad = None

        def replace(_: torch.Tensor) -> None:
            parameters[3][1].grad = torch.ones(2, dtype=torch.float64)

        handle = parameters[0][1].register_hook(take_away)
        train(reducer, parameters, group, [REVERSED], first_step=3)
        handle.remove()
        parameters[0][1].register_hook(replace)
        with pytest.raises(MisuseError, match=r"gradient of parameter 'p3' came on rank"):
            train(reducer, parameters, group, [REVERSED], first_step=4)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_gradients_that_are_pieces_of_one_tensor(as_view: bool, graph: dict[str, bool]) -> None:
    """To write one bucket back changes the version of another's."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=ONE_EACH, gradient_as_bucket_view=as_view, **graph)
        factors = torch.arange(1.0, 9.0, dtype=torch.float64) * (group.rank + 1)
        for _ in range(4):
            set_to_none(parameters)
            reducer.prepare_for_backward()
            total = (torch.cat([parameter for _, parameter in parameters]) * factors).sum()
            reducer.watch([total])
            total.backward()
            for index, (_, parameter) in enumerate(parameters):
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [1.5 * (2 * index + 1), 1.5 * (2 * index + 2)]

    run_ranks(2, body)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("converted_after", [0, 3])  # after 1, buckets are built anew, for the new dtype
def test_a_parameter_that_was_converted_is_named(converted_after: int, static: bool) -> None:
    """Its node in the graph is another one then, and whatever was hooked on the old one is lost."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, static_graph=static)
        train(reducer, parameters, group, [REVERSED] * converted_after)
        for _, parameter in parameters:
            parameter.grad = None
            parameter.data = parameter.data.float()
        total = forward(reducer, parameters, group, 3, REVERSED)
        with pytest.raises(MisuseError, match=r"expected a gradient of torch.float64 for parameter 'p\d'.*found torch.float32"):
            total.backward()

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_gradient_that_a_users_hook_takes_away_always(as_view: bool) -> None:
    """It counts as unused, as in the first backward."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True)

        def take_away(parameter: torch.Tensor) -> None:
            parameter.grad = None

        parameters[1][1].register_post_accumulate_grad_hook(take_away)  # type: ignore[no-untyped-call]
        for step in range(4):
            set_to_none(parameters)
            forward(reducer, parameters, group, step, REVERSED).backward()
            for index in (0, 2, 3):
                gradient = parameters[index][1].grad
                assert gradient is not None
                assert gradient.tolist() == average(2, index, step)

    run_ranks(2, body)


def test_a_parameter_that_is_frozen_later() -> None:
    """One without a gradient in the first backward may be; also when each gradient is noted again, and when it thaws."""

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


def test_what_was_closed_stays_closed(graph: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, **graph)
        train(reducer, parameters, group, [REVERSED] * 3)
        reducer.close()
        reducer.prepare_for_backward()
        set_to_none(parameters)
        loss(parameters, group.rank, 3, REVERSED).backward()
        for index, (_, parameter) in enumerate(parameters):
            assert parameter.grad is not None
            assert parameter.grad.tolist() == [coefficient(group.rank, index, 3)] * 2

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("converted", [[0], [1], [0, 1, 2, 3]])
def test_parameters_that_are_converted_in_forward(as_view: bool, converted: Sequence[int], static: bool) -> None:
    """There and back, as rounding of weights and offloading do: each has a new node then, in each step."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=static)
        for step in range(4):
            set_to_none(parameters)
            reducer.prepare_for_backward()
            for index in converted:
                parameters[index][1].data = parameters[index][1].data.float()
                parameters[index][1].data = parameters[index][1].data.double()
            total = loss(parameters, group.rank, step, REVERSED)
            reducer.watch([total])
            total.backward()
            for index, (_, parameter) in enumerate(parameters):
                assert parameter.grad is not None
                assert parameter.grad.tolist() == average(2, index, step), (step, index)

    run_ranks(2, body)


def test_a_late_gradient_is_seen_where_the_buckets_first_parameter_is_unused() -> None:
    """With views; the order of the other rank counts, where it is used."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters(8)
        reducer = Reducer(parameters, group, bucket_cap_bytes=2 * PAIRS, gradient_as_bucket_view=True, static_graph=True)
        order = list(range(7 if group.rank == 0 else 6, -1, -1))
        for step in range(3):
            set_to_none(parameters)
            forward(reducer, parameters, group, step, order).backward()

        def again(_: torch.Tensor) -> None:
            with torch.enable_grad():
                (parameters[5][1] * 5).sum().backward()

        set_to_none(parameters)
        if group.rank == 1:
            parameters[0][1].register_hook(again)
        reducer.prepare_for_backward()
        if group.rank == 0:
            loss(parameters, group.rank, 3, order).backward()
            return
        with pytest.raises(MisuseError, match=r"'p5'.* came on rank 1"):
            loss(parameters, group.rank, 3, order).backward()

    run_ranks(2, body)


def test_pieces_of_one_tensor_that_hooks_change(graph: dict[str, bool]) -> None:
    """What changes one changes the version of all, also of those in other buckets."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=ONE_EACH, **graph)

        def double(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(2)

        for _, parameter in parameters:
            parameter.register_post_accumulate_grad_hook(double)  # type: ignore[no-untyped-call]
        for _ in range(4):
            set_to_none(parameters)
            reducer.prepare_for_backward()
            total = (torch.cat([parameter for _, parameter in parameters]) * (group.rank + 1)).sum()
            reducer.watch([total])
            total.backward()
            for _, parameter in parameters:
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [3.0, 3.0]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_communication_hook_may_give_parameters_their_gradients(as_view: bool, graph: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)

        def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            def give(_: object) -> torch.Tensor:
                for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                    parameter.grad = gradient.clone()
                return bucket.buffer()

            return group.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(give)

        reducer.set_hook(hook)
        train(reducer, parameters, group, [REVERSED] * 4)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_gradient_that_a_users_hook_takes_away_once(as_view: bool, graph: dict[str, bool]) -> None:
    """It counts as zeros; and what was taken away in the middle of a bucket is no reason to complain."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
        steps = iter(range(10))

        def take_away_once(parameter: torch.Tensor) -> None:
            if next(steps) == 3 and group.rank == 1:
                parameter.grad = None

        parameters[1][1].register_post_accumulate_grad_hook(take_away_once)  # type: ignore[no-untyped-call]
        train(reducer, parameters, group, [REVERSED] * 3)
        set_to_none(parameters)
        forward(reducer, parameters, group, 3, REVERSED).backward()
        assert parameters[1][1].grad is not None
        assert parameters[1][1].grad.tolist() == [coefficient(0, 1, 3) / 2] * 2
        train(reducer, parameters, group, [REVERSED] * 2, first_step=4)

    run_ranks(2, body)


def test_a_forward_in_inference_mode_while_the_graph_is_learnt(graph: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, **graph)
        with torch.inference_mode():
            reducer.prepare_for_backward()
        train(reducer, parameters, group, [REVERSED] * 3)

    run_ranks(1, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_hooks_of_a_group_and_ranks_that_sit_out(as_view: bool, graph: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
        reducer.set_hook(lambda _, bucket: group.all_reduce(bucket.buffer().div_(2), async_op=True).get_future())
        train(reducer, parameters, group, [REVERSED] * 3)
        set_to_none(parameters)
        if group.rank == 0:
            reducer.sit_out()
        else:
            forward(reducer, parameters, group, 3, REVERSED).backward()
            for index, (_, parameter) in enumerate(parameters):
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [coefficient(1, index, 3) / 2] * 2
        train(reducer, parameters, group, [REVERSED] * 2, first_step=4)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_parameter_without_a_gradient_in_the_first_backward(as_view: bool) -> None:
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
        assert noting(parameters) == [1, 3]
        set_to_none(parameters)
        reducer.prepare_for_backward()
        with pytest.raises(MisuseError, match="'p1' became ready twice"):
            loss(parameters, group.rank, 4, [3, 2, 0, 1]).backward()

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_users_hooks_run_before_their_bucket_is_collected(as_view: bool, graph: dict[str, bool]) -> None:
    """Also those on the parameter that is the last of its bucket, and also if they replace the gradient."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)

        def double(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 2

        for _, parameter in parameters:
            parameter.register_post_accumulate_grad_hook(double)  # type: ignore[no-untyped-call]
        for step in range(4):
            set_to_none(parameters)
            forward(reducer, parameters, group, step, REVERSED).backward()
            for index, (_, parameter) in enumerate(parameters):
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [2 * value for value in average(2, index, step)]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_four_ranks_with_delays(as_view: bool, graph: dict[str, bool]) -> None:
    """Late ranks, in orders of their own that change now and then."""

    def body(group: ProcessGroup) -> None:
        pick = random.Random(group.rank)
        parameters = make_parameters(8)
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
        arrival = list(range(8))
        pick.shuffle(arrival)
        arrivals = [list(arrival) for _ in range(60)]
        for changed in arrivals[40 + group.rank * 4 :]:
            pick.shuffle(changed)
        for _, parameter in parameters:
            parameter.register_hook(lambda _: time.sleep(pick.choice([0, 0, 0.001])))
        train(reducer, parameters, group, arrivals)

    run_ranks(4, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_loops_do_with_gradients(as_view: bool, seed: int, graph: dict[str, bool]) -> None:
    """Gradients set to None, to zero, or kept, before or after forward; steps without synchronisation; two forwards before two
    backwards; another order on any rank."""
    count, steps = 6, 8
    pick = random.Random(seed)
    cap, absent = pick.choice([ONE_EACH, PAIRS, 48, 1 << 20]), pick.choice([None, None, 2]) if graph else None
    used = [index for index in range(count) if index != absent]
    orders = [[pick.sample(used, len(used)) for _ in range(2)] for _ in range(2)]
    script = [
        {
            "clear": pick.choice(["none", "none", "none", "zero", "keep"]),
            "late": pick.random() < 0.2,
            "unsynchronised": pick.random() < 0.2,
            "forwards": 1 + (pick.random() < 0.2),
            "order": orders[pick.random() < 0.15],
        }
        for _ in range(steps)
    ]

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters(count)
        reducer = Reducer(parameters, group, bucket_cap_bytes=cap, gradient_as_bucket_view=as_view, **graph)
        expected: dict[int, list[float]] = {}  # of each parameter on each rank

        def clear(how: str) -> None:
            for _, parameter in parameters:
                if how == "none" or parameter.grad is None:
                    parameter.grad = None
                elif how == "zero":
                    parameter.grad.zero_()
            for index in list(expected):
                if how == "none":
                    del expected[index]
                elif how == "zero":
                    expected[index] = [0.0, 0.0]

        def backward(step: int, order: Sequence[Sequence[int]], *, reduced: bool) -> None:
            total = loss(parameters, group.rank, step, order[group.rank])
            if reduced:
                reducer.watch([total])
            total.backward()
            for index in used:
                before = expected.get(index, [0.0, 0.0])
                ranks = [value + coefficient(rank, index, step) for rank, value in enumerate(before)]
                expected[index] = [sum(ranks) / 2] * 2 if reduced else ranks

        for step, what in enumerate(script):
            if not what["late"]:
                clear(what["clear"])
            if what["unsynchronised"]:
                reducer.prepare_for_backward(synchronizes=False)
                backward(step, what["order"], reduced=False)
            for _ in range(what["forwards"]):
                reducer.prepare_for_backward()
            if what["late"] and not what["unsynchronised"]:
                clear(what["clear"])
            for _ in range(what["forwards"]):
                backward(step, what["order"], reduced=True)
            for index, (_, parameter) in enumerate(parameters):
                found = None if parameter.grad is None else parameter.grad.tolist()
                assert found == ([expected[index][group.rank]] * 2 if index in expected else None), (step, index)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("cap", [ONE_EACH, PAIRS, 1 << 20])
@pytest.mark.parametrize("static", [False, True])
def test_parameters_that_are_converted_there_and_back(as_view: bool, cap: int, static: bool) -> None:
    """They get other nodes in the graph, where there are no hooks."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=cap, gradient_as_bucket_view=as_view, static_graph=static)

        def convert(step: int) -> None:
            if step == 4:
                for _, parameter in parameters:
                    parameter.data = parameter.data.float()
                    parameter.data = parameter.data.double()

        train(reducer, parameters, group, [REVERSED] * 7, before=convert)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("static", [False, True])
def test_a_missing_gradient_is_named_also_where_parameters_were_converted(as_view: bool, static: bool) -> None:
    """The backward does not come to the one parameter that has still a hook."""

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


@pytest.mark.parametrize("cap", [ONE_EACH, PAIRS])
@pytest.mark.parametrize("index", FORWARD)
def test_a_users_hook_takes_a_gradient_away_in_a_checkpoint(cap: int, index: int) -> None:
    """Of a static graph; it counts as zeros."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=cap, static_graph=True)
        steps = []

        def take_away(parameter: torch.Tensor) -> None:
            if len(steps) > 2:
                parameter.grad = None

        parameters[index][1].register_post_accumulate_grad_hook(take_away)  # type: ignore[no-untyped-call]
        inputs = torch.zeros((), dtype=torch.float64, requires_grad=True)
        for step in range(5):
            steps.append(step)
            set_to_none(parameters)
            reducer.prepare_for_backward()
            total = checkpoint(
                lambda inputs, step=step: loss(parameters, group.rank, step, REVERSED) + inputs, inputs, use_reentrant=True
            )
            reducer.watch([total])
            total.backward()
            for number, (_, parameter) in enumerate(parameters):
                assert parameter.grad is not None
                assert parameter.grad.tolist() == ([0, 0] if number == index and step > 1 else average(2, number, step))

    run_ranks(2, body)
