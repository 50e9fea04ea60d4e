"""Ranks without gradients take part in the backwards of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from syncline.collectives import InvalidArgumentError, MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.reducer import GradBucket, Reducer
from test_support.training_runs import VIEWS

pytestmark = pytest.mark.ranks

OWN = 7.0  # what a rank that shadows a backward holds before


def make_parameters(count: int = 4) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"p{i}", torch.nn.Parameter(torch.ones(i + 1, dtype=torch.float64))) for i in range(count)]


def coefficient(rank: int, index: int, step: int) -> torch.Tensor:
    return torch.arange(1, index + 2, dtype=torch.float64) * (rank + 1) + 10 * index + 100 * step


def step_with_gradients(reducer: Reducer, parameters: Any, rank: int, step: int, used: set[int]) -> None:
    reducer.prepare_for_backward()
    total = sum((parameters[index][1] * coefficient(rank, index, step)).sum() for index in used)
    assert isinstance(total, torch.Tensor)
    total.backward()


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize(
    ("options", "used"),
    [
        ({}, {0, 1, 2, 3}),
        ({"find_unused_parameters": True}, {0, 3}),
        ({"find_unused_parameters": True, "skip_all_reduce_unused_params": True}, {0, 3}),
        ({"delayed": ["p1"], "delayed_until": "p0"}, {0, 1, 2, 3}),
    ],
    ids=["complete", "unused", "skipped", "delayed"],
)
def test_it_adds_zeros_and_keeps_its_gradients(world_size: int, as_view: bool, options: Any, used: set[int]) -> None:
    """Rank 0 never has gradients, so that the rebuild's order is that of a rank that shadowed backwards."""

    def body(group: ProcessGroup) -> list[torch.Tensor | None]:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=0, gradient_as_bucket_view=as_view, **options)
        for step in range(3):
            for _, parameter in parameters:
                parameter.grad = torch.full_like(parameter, OWN) if group.rank == 0 else None
            if group.rank == 0:
                reducer.shadow_backward()
            else:
                step_with_gradients(reducer, parameters, group.rank, step, used)
            assert reducer.statistics.finished > 0.0
        assert reducer.has_rebuilt_buckets == (not options or "delayed" in options)
        return [parameter.grad for _, parameter in parameters]

    results = run_ranks(world_size, body)
    for gradient in results[0]:
        assert gradient is not None
        assert torch.equal(gradient, torch.full_like(gradient, OWN))
    for found in results[1:]:
        for index, gradient in enumerate(found):
            if index not in used:
                assert gradient is None
                continue
            total = sum(coefficient(rank, index, 2) for rank in range(1, world_size))
            torch.testing.assert_close(gradient, total / world_size, rtol=1e-14, atol=0)


@pytest.mark.parametrize("as_view", VIEWS)
def test_gradients_that_are_there_are_reduced_without_a_backward(as_view: bool) -> None:
    """Rank 0 has gradients of p0 and p1, and the others run a backward to p0 and p3. Nobody uses p2."""

    def body(group: ProcessGroup) -> list[torch.Tensor | None]:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=0, gradient_as_bucket_view=as_view, find_unused_parameters=True)
        calls: list[int] = []
        for step in range(2):
            for _, parameter in parameters:
                parameter.grad = None
            if group.rank == 0:
                for index in (0, 1):
                    parameters[index][1].register_hook(lambda _: calls.append(0))  # type: ignore[no-untyped-call]
                    parameters[index][1].grad = coefficient(0, index, step)
                parameters[2][1].grad = torch.full((3,), OWN, dtype=torch.float64)
                reducer.reduce_gradients([0, 1])
            else:
                (parameters[0][1] * coefficient(group.rank, 0, step)).sum().add(
                    (parameters[3][1] * coefficient(group.rank, 3, step)).sum()
                ).backward()
        assert calls == []
        assert reducer.reductions == 2
        return [parameter.grad for _, parameter in parameters]

    results = run_ranks(3, body)
    there = {0: (0, 1, 2), 1: (0,), 3: (1, 2)}
    for rank, found in enumerate(results):
        for index, ranks in there.items():
            expected = torch.stack([coefficient(each, index, 1) for each in ranks]).sum(0) / 3
            torch.testing.assert_close(found[index], expected, rtol=1e-14, atol=0)
        assert (found[2] is None) == (rank != 0)
    assert results[0][2] is not None
    assert results[0][2].tolist() == [OWN] * 3


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"skip_all_reduce_unused_params": True}], ids=str)
def test_reducing_without_a_backward_needs_parameters_that_may_be_unused(options: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        reducer = Reducer(make_parameters(), group, find_unused_parameters=bool(options), **options)
        with pytest.raises(MisuseError, match="find_unused_parameters=True"):
            reducer.reduce_gradients([])

    run_ranks(1, body)


def test_views_keep_their_values() -> None:
    """Gradients that lie in the buckets, through which those of the others travel."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, gradient_as_bucket_view=True)
        step_with_gradients(reducer, parameters, group.rank, 0, {0, 1, 2, 3})
        before = [parameter.grad.clone() for _, parameter in parameters]  # type: ignore[union-attr]
        if group.rank == 0:
            reducer.shadow_backward()
            for (_, parameter), expected in zip(parameters, before, strict=True):
                assert torch.equal(parameter.grad, expected)  # type: ignore[arg-type]
        else:
            step_with_gradients(reducer, parameters, group.rank, 1, {0, 1, 2, 3})

    run_ranks(2, body)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_gradients_of_an_unsynchronised_backward_still_wait_after_it(options: Any) -> None:
    """Rank 0's gradient of p1 is averaged in its own next backward, and a new reducer counts it as well."""

    def body(group: ProcessGroup, is_replaced: bool) -> float:
        parameters = make_parameters()
        everything = {0, 1, 2, 3}
        reducer = Reducer(parameters, group, **options)
        step_with_gradients(reducer, parameters, group.rank, 0, everything)
        for _, parameter in parameters:
            parameter.grad = None
        if group.rank == 0:
            reducer.prepare_for_backward(synchronizes=False)
            (parameters[1][1] * OWN).sum().backward()  # type: ignore[no-untyped-call]
            reducer.shadow_backward()
        else:
            step_with_gradients(reducer, parameters, group.rank, 1, everything)
            parameters[1][1].grad = None
        assert reducer.unreduced() == ({"p1"} if group.rank == 0 else set())
        if is_replaced:
            unreduced = reducer.unreduced()
            reducer.close()
            reducer = Reducer(parameters, group, **options, unreduced=unreduced)
        used = {0} if options == {"find_unused_parameters": True} else everything
        step_with_gradients(reducer, parameters, 0, 2, used)
        assert not reducer.has_local_gradients
        gradient = parameters[1][1].grad
        assert gradient is not None
        return (gradient - (coefficient(0, 1, 2) if 1 in used else 0.0))[0].item()

    for is_replaced in (False, True):
        assert run_ranks(2, body, is_replaced) == [OWN / 2] * 2


def test_it_does_what_the_last_forward_announced() -> None:
    """A forward without a backward, then none: the next backward that is not synchronised is so on every rank."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group)
        if group.rank == 1:
            reducer.prepare_for_backward()
            reducer.shadow_backward()
        else:
            step_with_gradients(reducer, parameters, group.rank, 0, {0, 1, 2, 3})
        for _, parameter in parameters:
            parameter.grad = None
        reducer.prepare_for_backward(synchronizes=False)
        parameters[3][1].sum().backward()
        reducer.check_finalized()
        assert parameters[3][1].grad is not None
        assert parameters[3][1].grad.tolist() == [1.0] * 4

    run_ranks(2, body)


def test_sums_are_divided_by_those_who_have_gradients() -> None:
    def body(group: ProcessGroup) -> torch.Tensor | None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group)
        reducer.divide_by(2)
        if group.rank == 1:
            reducer.shadow_backward()
        else:
            step_with_gradients(reducer, parameters, group.rank, 0, {0, 1, 2, 3})
        return parameters[3][1].grad

    found = run_ranks(3, body)
    assert found[1] is None
    expected = (coefficient(0, 3, 0) + coefficient(2, 3, 0)) / 2
    for rank in (0, 2):
        assert torch.equal(found[rank], expected)  # type: ignore[arg-type]


def test_hooks_are_called_with_zeros() -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group)

        def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            assert bool(bucket.buffer().any()) == (group.rank == 1)
            work = group.all_reduce(bucket.buffer(), async_op=True)
            return work.get_future().then(lambda done: done.value()[0])

        reducer.set_hook(hook)
        if group.rank == 0:
            reducer.shadow_backward()
        else:
            step_with_gradients(reducer, parameters, 1, 0, {0, 1, 2, 3})
            assert torch.equal(parameters[0][1].grad, coefficient(1, 0, 0))  # type: ignore[arg-type]

    run_ranks(2, body)


def test_a_static_graph_needs_everyone_once() -> None:
    def body(group: ProcessGroup) -> list[bool]:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, static_graph=True)
        needed = [reducer.needs_everyone]
        step_with_gradients(reducer, parameters, group.rank, 0, {0, 1, 3})
        needed.append(reducer.needs_everyone)
        if group.rank == 1:
            reducer.shadow_backward()
        else:
            parameters[0][1].grad = None
            step_with_gradients(reducer, parameters, group.rank, 1, {0, 1, 3})
            assert torch.equal(parameters[0][1].grad, coefficient(0, 0, 1) / 2)  # type: ignore[arg-type]
        assert parameters[2][1].grad is None
        return needed

    assert run_ranks(2, body) == [[True, False]] * 2


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_delayed_gradients_may_come_often_or_never(as_view: bool, options: Any) -> None:
    """p0 is used in a re-entrant backward of its own, p1 never; both wait for p3."""

    class Again(torch.autograd.Function):
        """The identity; its backward adds to a parameter's gradient once more."""

        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
            ctx.parameter = parameter
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with torch.enable_grad():
                (ctx.parameter * 5.0).sum().backward()
            return gradients[0], None

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        values = [parameter for _, parameter in parameters]
        reducer = Reducer(
            parameters, group, gradient_as_bucket_view=as_view, delayed=["p0", "p1"], delayed_until="p3", **options
        )
        for _ in range(3):
            for parameter in values:
                parameter.grad = None
            reducer.prepare_for_backward()
            # Autograd visits the latest node first: p0, p0 again, p2, p3.
            late = Again.apply((values[3] * (group.rank + 1.0)).sum(), values[0])
            (late * values[2].sum() + values[0].sum() * (group.rank + 1)).backward()
            assert torch.equal(values[0].grad, torch.full_like(values[0], 5.0 + 1.5))  # type: ignore[arg-type]
            assert torch.equal(values[3].grad, torch.full_like(values[3], 3 * 1.5))  # type: ignore[arg-type]
            assert values[1].grad is None if options else not values[1].grad.any()  # type: ignore[union-attr]
            assert sorted(reducer.buckets[-1].indices) == [0, 1]

    run_ranks(2, body)


def test_a_delayed_gradient_may_wait_for_the_end_of_backward() -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, delayed=["p3"])
        for step in range(3):
            for _, parameter in parameters:
                parameter.grad = None
            # Autograd visits the latest node first: p3, p2, p1, p0, and p3 again in a re-entrant backward.
            again = checkpoint(
                lambda one: (parameters[3][1] * one).sum(), torch.ones(4, requires_grad=True), use_reentrant=True
            )
            reducer.prepare_for_backward()
            total = again + sum((parameters[i][1] * coefficient(group.rank, i, step)).sum() for i in range(4))
            total.backward()
            for index, (_, parameter) in enumerate(parameters):
                expected = (coefficient(0, index, step) + coefficient(1, index, step)) / 2 + (1.0 if index == 3 else 0.0)
                assert torch.equal(parameter.grad, expected)  # type: ignore[arg-type]

    run_ranks(2, body)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("is_last_checkpointed", [False, True])
@pytest.mark.parametrize("options", [{}, {"static_graph": True}], ids=str)
def test_delayed_gradients_may_come_in_re_entrant_checkpoints(
    world_size: int, is_last_checkpointed: bool, options: Any
) -> None:
    """The gradients of p0, p1 and p3 come in this order, each in a backward of its own. The first two wait for p3."""

    def body(group: ProcessGroup) -> None:
        parameters = [(f"p{index}", torch.nn.Parameter(torch.ones(2))) for index in range(4)]
        values = [parameter for _, parameter in parameters]
        reducer = Reducer(parameters, group, delayed=["p0", "p1"], delayed_until="p3", **options)

        def block(index: int, hidden: torch.Tensor) -> torch.Tensor:
            return checkpoint(lambda one: one * values[index], hidden, use_reentrant=True)  # type: ignore[no-any-return]

        for _ in range(3):
            for value in values:
                value.grad = None
            reducer.prepare_for_backward()
            hidden = torch.full((2,), group.rank + 1.0, requires_grad=True)
            hidden = block(3, hidden) if is_last_checkpointed else hidden * values[3]
            (block(0, block(1, hidden)) * values[2]).sum().backward()  # type: ignore[no-untyped-call]
            for value in values:
                assert value.grad is not None
                assert value.grad.tolist() == [(world_size + 1) / 2] * 2

    run_ranks(world_size, body)


def test_what_is_delayed_waits_for_the_last_of_several_gradients() -> None:
    """In a static graph that of p3 arrives twice, before and after p0's, which waits for it."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, static_graph=True, delayed=["p0"], delayed_until="p3")
        values = [parameter for _, parameter in parameters]

        def again() -> torch.Tensor:
            return checkpoint(lambda one: (values[3] * one).sum(), torch.ones(4, requires_grad=True), use_reentrant=True)  # type: ignore[no-any-return]

        for _ in range(3):
            for value in values:
                value.grad = None
            reducer.prepare_for_backward()
            late = again()
            (late + values[1].sum() + values[2].sum() + values[0].sum() * (group.rank + 1) + again()).backward()
            assert torch.equal(values[0].grad, torch.full_like(values[0], 1.5))  # type: ignore[arg-type]
            assert torch.equal(values[3].grad, torch.full_like(values[3], 2.0))  # type: ignore[arg-type]

    run_ranks(2, body)


def test_what_is_delayed_in_a_static_graph_may_not_appear_late() -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, static_graph=True, delayed=["p0"])
        step_with_gradients(reducer, parameters, group.rank, 0, {1, 2, 3})
        assert parameters[0][1].grad is None
        with pytest.raises(MisuseError, match=r"'p0' on rank .*had none in the first backward"):
            step_with_gradients(reducer, parameters, group.rank, 1, {0, 1, 2, 3})

    run_ranks(2, body)


def test_delayed_until_without_delayed_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match="delayed_until='p0' without delayed"):
            Reducer(make_parameters(), group, delayed_until="p0")

    run_ranks(1, body)


@pytest.mark.parametrize("others", [{}, {"find_unused_parameters": True, "static_graph": True}])
def test_skipping_buckets_without_a_search_for_unused_parameters_is_refused(others: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match="only with find_unused_parameters=True"):
            Reducer(make_parameters(), group, skip_all_reduce_unused_params=True, **others)

    run_ranks(1, body)


def test_a_delayed_gradient_that_comes_after_all_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, delayed=["p0"], delayed_until="p3")
        reducer.prepare_for_backward()
        # Autograd visits the latest node first: p3 before p0.
        total = parameters[0][1].sum() + parameters[1][1].sum() + parameters[2][1].sum()
        with pytest.raises(MisuseError, match=r"'p0' became ready twice.*after that of param_to_hook_all_reduce"):
            (total + parameters[3][1].sum()).backward()

    run_ranks(2, body)


def test_unknown_names_are_refused() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match="found 'p9'"):
            Reducer(make_parameters(), group, delayed=["p9"], delayed_until="p0")

    run_ranks(1, body)
