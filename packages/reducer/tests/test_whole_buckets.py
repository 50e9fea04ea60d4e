"""Static graphs, in which buckets have one hook each; see Note [One hook for a bucket]."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from syncline.collectives import MisuseError, ProcessGroup, Work
from syncline.collectives.testing import run_ranks
from syncline.reducer import Reducer

pytestmark = pytest.mark.ranks

VIEWS = [pytest.param(False, id="copied"), pytest.param(True, id="as-view")]
ONE_EACH = 0  # a cap of 0 bytes: every parameter has a bucket to itself
PAIRS = 32  # of two elements of float64: two parameters in each bucket
FORWARD, REVERSED = [0, 1, 2, 3], [3, 2, 1, 0]


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
        for _, parameter in parameters:
            parameter.grad = None
        if before is not None:
            before(step)
        reducer.prepare_for_backward()
        loss(parameters, group.rank, step, arrival).backward()
        for index, (_, parameter) in enumerate(parameters):
            assert parameter.grad is not None
            assert parameter.grad.tolist() == average(group.size, index, step), (step, index)


def noting(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> list[bool]:
    """Which parameters have, or ever had, a hook of their own: its cost stays when it is removed."""
    return [parameter._post_accumulate_grad_hooks is not None for _, parameter in parameters]


@pytest.mark.parametrize("as_view", VIEWS)
def test_parameters_of_a_static_graph_are_never_hooked_themselves(as_view: bool) -> None:
    def body(group: ProcessGroup) -> None:
        static, dynamic = make_parameters(), make_parameters()
        reducers = [
            Reducer(static, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True),
            Reducer(dynamic, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view),
        ]
        for reducer, parameters in zip(reducers, (static, dynamic), strict=True):
            train(reducer, parameters, group, [REVERSED] * 4)
        assert noting(static) == [False] * 4
        assert noting(dynamic) == [True] * 4

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("cap", [ONE_EACH, PAIRS])
def test_buckets_still_overlap_with_backward(as_view: bool, cap: int) -> None:
    """When the last gradient is computed, all buckets but its own are on their way."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        counted = Counted(group)
        reducer = Reducer(parameters, counted, bucket_cap_bytes=cap, gradient_as_bucket_view=as_view, static_graph=True)  # type: ignore[arg-type]
        seen: list[int] = []
        parameters[0][1].register_hook(lambda _: seen.append(counted.issued))
        marks: list[int] = []
        train(reducer, parameters, group, [REVERSED] * 4, before=lambda _: marks.append(counted.issued))
        others = len(reducer.buckets) - 1
        assert [after - before for after, before in zip(seen, marks, strict=True)][1:] == [others] * 3

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("cap", [ONE_EACH, PAIRS, 1 << 20])
def test_another_order_costs_only_time(as_view: bool, cap: int) -> None:
    """Also if it changes on one rank only; from then on each gradient is noted."""

    def body(group: ProcessGroup) -> list[bool]:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=cap, gradient_as_bucket_view=as_view, static_graph=True)
        changed = FORWARD if group.rank == 0 else REVERSED
        train(reducer, parameters, group, [REVERSED, REVERSED, REVERSED, changed, changed, REVERSED, [2, 0, 3, 1]])
        return noting(parameters)

    found = run_ranks(2, body)
    assert found[0] == [cap != ONE_EACH] * 4, "a bucket of one gradient cannot be in another order"


@pytest.mark.parametrize("as_view", VIEWS)
def test_each_rank_has_its_own_order(as_view: bool) -> None:
    def body(group: ProcessGroup) -> list[bool]:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
        arrival = [REVERSED, FORWARD, [2, 0, 3, 1]][group.rank]
        train(reducer, parameters, group, [arrival] * 5)
        return noting(parameters)

    assert run_ranks(3, body) == [[False] * 4] * 3


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("kept_from", [1, 2, 4])
@pytest.mark.parametrize("then", [REVERSED, FORWARD], ids=["same-order", "another-order"])
def test_gradients_that_are_kept_are_noted_one_by_one(as_view: bool, kept_from: int, then: Sequence[int]) -> None:
    """That a gradient is there says nothing then."""

    def body(group: ProcessGroup) -> list[bool]:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
        train(reducer, parameters, group, [REVERSED] * kept_from)
        expected = [torch.tensor(average(2, index, kept_from - 1), dtype=torch.float64) for index in range(4)]
        for step in range(kept_from, kept_from + 3):
            reducer.prepare_for_backward()
            loss(parameters, group.rank, step, then).backward()
            for index, (_, parameter) in enumerate(parameters):
                expected[index] += torch.tensor(average(2, index, step), dtype=torch.float64)
                assert parameter.grad is not None
                assert torch.equal(parameter.grad, expected[index]), (step, index)
        return noting(parameters)

    assert run_ranks(2, body) == [[True] * 4] * 2


@pytest.mark.parametrize("as_view", VIEWS)
def test_what_was_added_up_without_synchronisation_is_reduced(as_view: bool) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
        train(reducer, parameters, group, [REVERSED] * 3)
        for _, parameter in parameters:
            parameter.grad = None
        reducer.prepare_for_backward(synchronizes=False)
        loss(parameters, group.rank, 3, [2, 1]).backward()  # it may leave some out
        reducer.prepare_for_backward()
        loss(parameters, group.rank, 4, REVERSED).backward()
        for index, (_, parameter) in enumerate(parameters):
            assert parameter.grad is not None
            extra = average(2, index, 3)[0] if index in (1, 2) else 0
            assert parameter.grad.tolist() == [average(2, index, 4)[0] + extra] * 2

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_a_gradient_that_is_missing_is_named(as_view: bool, missing: int) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
        train(reducer, parameters, group, [REVERSED] * 3)
        with pytest.raises(MisuseError, match=rf"got no gradient in it: 'p{missing}'\. The graph is not static"):
            train(reducer, parameters, group, [[index for index in REVERSED if index != missing]], first_step=3)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_backward_that_reaches_no_buckets_last_parameter(as_view: bool) -> None:
    """It is seen by the first gradient."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
        train(reducer, parameters, group, [REVERSED] * 3)
        with pytest.raises(MisuseError, match=r"got no gradient in it: 'p0', 'p2'\. The graph is not static"):
            train(reducer, parameters, group, [[3, 1]], first_step=3)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("where", ["its bucket's last", "another", "before it was collected"])
def test_a_gradient_that_comes_twice(as_view: bool, where: str) -> None:
    """It is an error, if the bucket is being reduced already; else both are reduced."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
        train(reducer, parameters, group, [REVERSED] * 3)
        twice = 2 if where == "its bucket's last" else 3
        when = 2 if where == "before it was collected" else 0

        def again(_: torch.Tensor) -> None:
            handle.remove()
            with torch.enable_grad():
                (parameters[twice][1] * 5).sum().backward()

        handle = parameters[when][1].register_hook(again)
        if where == "before it was collected":
            for _, parameter in parameters:
                parameter.grad = None
            reducer.prepare_for_backward()
            loss(parameters, group.rank, 3, REVERSED).backward()
            assert parameters[3][1].grad is not None
            assert parameters[3][1].grad.tolist() == [average(2, 3, 3)[0] + 5] * 2
            return
        complaint = r"'p2' became ready twice" if twice == 2 else r"'p3'.* came on rank \d.*being reduced already"
        with pytest.raises(MisuseError, match=f"{complaint}.*The graph is not static"):
            train(reducer, parameters, group, [REVERSED], first_step=3)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_parameter_without_a_gradient_in_the_first_backward(as_view: bool) -> None:
    """It stays without one, and a gradient for it is an error by name, also if nothing comes after it."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view, static_graph=True)
        for step in range(4):
            for _, parameter in parameters:
                parameter.grad = None
            reducer.prepare_for_backward()
            loss(parameters, group.rank, step, [3, 2, 0]).backward()
            assert parameters[1][1].grad is None
            for index in (0, 2, 3):
                gradient = parameters[index][1].grad
                assert gradient is not None
                assert gradient.tolist() == average(2, index, step)
        assert noting(parameters) == [False] * 4
        for _, parameter in parameters:
            parameter.grad = None
        reducer.prepare_for_backward()
        with pytest.raises(MisuseError, match="'p1' became ready twice"):
            loss(parameters, group.rank, 4, [3, 2, 0, 1]).backward()

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_users_hooks_run_before_their_bucket_is_collected(as_view: bool) -> None:
    """Also those on the parameter that is the last of its bucket, and also if they replace the gradient."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True)

        def double(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad = parameter.grad * 2

        for _, parameter in parameters:
            parameter.register_post_accumulate_grad_hook(double)  # type: ignore[no-untyped-call]
        for step in range(4):
            for _, parameter in parameters:
                parameter.grad = None
            reducer.prepare_for_backward()
            loss(parameters, group.rank, step, REVERSED).backward()
            for index, (_, parameter) in enumerate(parameters):
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [2 * value for value in average(2, index, step)]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_four_ranks_with_delays(as_view: bool) -> None:
    """Late ranks, in orders of their own that change now and then."""

    def body(group: ProcessGroup) -> None:
        pick = random.Random(group.rank)
        parameters = make_parameters(8)
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
        arrival = list(range(8))
        pick.shuffle(arrival)
        arrivals = [list(arrival) for _ in range(60)]
        for changed in arrivals[40 + group.rank * 4 :]:
            pick.shuffle(changed)
        for _, parameter in parameters:
            parameter.register_hook(lambda _: time.sleep(pick.choice([0, 0, 0.001])))
        train(reducer, parameters, group, arrivals)

    run_ranks(4, body)
