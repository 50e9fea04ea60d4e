"""What scripts do to gradients, reducers and backwards without asking: averaged, or an error by name; never silently local."""

from __future__ import annotations

import os
import pickle
import re
import select
from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline.collectives import MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.reducer import GradBucket, Reducer
from syncline.reducer.torch_internals import TELLS_OF_UNDEFINED_GRADIENTS
from test_support.forked import answer_of, in_fork
from test_support.training_runs import VIEWS

pytestmark = pytest.mark.ranks


def named(*names: str, shape: tuple[int, ...] = (2, 2)) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name, torch.nn.Parameter(torch.ones(shape))) for name in names]


def backward(
    reducer: Reducer, parameters: list[tuple[str, torch.nn.Parameter]], group: ProcessGroup, factors: tuple[float, ...]
) -> None:
    """Gradients of factor * (rank + 1), added to what is there; their average is 1.5 * factor on two ranks."""
    reducer.prepare_for_backward()
    total = torch.zeros(())
    for (_, parameter), factor in zip(parameters, factors, strict=True):
        total = total + (parameter * factor * (group.rank + 1)).sum()
    total.backward()


def values(parameters: list[tuple[str, torch.nn.Parameter]]) -> list[float | None]:
    return [None if p.grad is None else float(p.grad.flatten()[0]) for _, p in parameters]


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_was_given_other_memory_is_averaged(as_view: bool, set_to_none: bool) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = named("a", "b")
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view)
        for step in range(4):
            backward(reducer, parameters, group, (1.0, 2.0))
            assert values(parameters) == [1.5, 3.0]
            gradient = parameters[0][1].grad
            assert gradient is not None
            if step:
                gradient.data = gradient.data.clamp(-1, 1)
            for _, parameter in parameters:
                if set_to_none:
                    parameter.grad = None
                else:
                    assert parameter.grad is not None
                    parameter.grad.zero_()

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_gradients_that_two_parameters_have_exchanged_add_up_where_they_are(as_view: bool) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = named("a", "b")
        (_, a), (_, b) = parameters
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view)
        for _ in range(2):
            a.grad = b.grad = None
            backward(reducer, parameters, group, (1.0, 2.0))
        a.grad, b.grad = b.grad, a.grad
        backward(reducer, parameters, group, (1.0, 2.0))
        assert values(parameters) == [4.5, 4.5]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_an_unused_gradient_stays_also_as_another_object_in_the_same_memory(as_view: bool) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = named("a", "b")
        (_, a), (_, b) = parameters
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view, find_unused_parameters=True)
        backward(reducer, parameters, group, (1.0, 2.0))
        assert b.grad is not None
        with torch.no_grad():
            b.grad.fill_(10.0 * group.rank)
        b.grad = b.grad.detach()
        a.grad = None
        reducer.prepare_for_backward()
        (a * (group.rank + 1)).sum().backward()
        assert values(parameters) == [1.5, 10.0 * group.rank]

    run_ranks(2, body)


def test_two_reducers_average_what_came_though_ranks_see_it_in_different_orders() -> None:
    """The first reducer's end must not write where the second has still to collect."""

    def body(group: ProcessGroup) -> None:
        parameters = named("a", "b", "c")
        groups = [group.split(0) for _ in range(2)]
        reducers = [Reducer(parameters, each, bucket_cap_bytes=0) for each in groups if each is not None]
        for step in range(4):
            for _, parameter in parameters:
                parameter.grad = None
            order = (0, 1, 2) if group.rank == 0 or step != 2 else (2, 0, 1)
            for reducer in reducers:
                reducer.prepare_for_backward()
            total = torch.zeros(())
            for index in order:
                total = total + (parameters[index][1] * (2.0 + 10 * group.rank) * (index + 1)).sum()
            total.backward()
            assert values(parameters) == [7.0, 14.0, 21.0]

    run_ranks(2, body)


def test_two_reducers_of_one_group_may_not_have_forwards_at_the_same_time() -> None:
    """In different orders on different ranks their buckets would mix."""

    def body(group: ProcessGroup) -> None:
        parameters = named("a", "b")
        first, second = (Reducer(parameters, group) for _ in range(2))
        first.prepare_for_backward()
        with pytest.raises(MisuseError, match="give each a group of its own"):
            second.prepare_for_backward()

    run_ranks(2, body)


@pytest.mark.parametrize("views", [(False, False), (True, False), (False, True), (True, True)])
def test_of_several_reducers_that_one_averages_whose_forward_came_last(views: tuple[bool, bool]) -> None:
    """A module was wrapped anew, and the old wrapper is still there, perhaps as garbage. Both may be used in turn."""

    def body(group: ProcessGroup) -> None:
        parameters = named("a", "b")
        counting = [Counting(group), Counting(group)]
        reducers = [Reducer(parameters, group, gradient_as_bucket_view=view) for view in views]
        for reducer, hook in zip(reducers, counting, strict=True):
            reducer.set_hook(hook)
        for step, used in enumerate([0, 0, 1, 1, 0, 1, 0, 0]):
            for _, parameter in parameters:
                parameter.grad = None
            before = [hook.calls for hook in counting]
            backward(reducers[used], parameters, group, (1.0 + step, 2.0))
            assert values(parameters) == [1.5 * (1.0 + step), 3.0]
            assert [hook.calls - was for hook, was in zip(counting, before, strict=True)] == [int(used == 0), int(used == 1)]
        reducers[1].close()
        backward(reducers[0], parameters, group, (1.0, 2.0))

    run_ranks(2, body)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("first_steps", [["wide", "near"], ["near", "wide"]])
def test_of_two_reducers_with_their_own_groups_that_one_averages_whose_forward_came_last(
    first_steps: list[str], view: bool
) -> None:
    """One averages over all ranks, the other over a part of the ranks, which takes other numbers of steps on each part."""

    def body(group: ProcessGroup) -> None:
        parameters = named("a", "b")
        near = group.split(group.rank)  # this rank alone
        assert near is not None
        reducers = {
            "wide": Reducer(parameters, group, gradient_as_bucket_view=view),
            "near": Reducer(parameters, near, gradient_as_bucket_view=view),
        }
        own, average = 1.0 + group.rank, 1.5
        for used in [*first_steps, *["near"] * (1 + group.rank), "wide", "wide", "near", "wide"]:
            for _, parameter in parameters:
                parameter.grad = None
            backward(reducers[used], parameters, group, (1.0, 2.0))
            assert values(parameters) == ([own, 2 * own] if used == "near" else [average, 2 * average])

    run_ranks(2, body)


def test_two_reducers_whose_groups_have_other_ranks_may_not_have_forwards_at_the_same_time() -> None:
    """The one that ends last would replace the other's averages."""

    def body(group: ProcessGroup) -> None:
        parameters = named("a", "b")
        near = group.split(group.rank)
        assert near is not None
        first, second = Reducer(parameters, group), Reducer(parameters, near)
        first.prepare_for_backward()
        with pytest.raises(MisuseError, match="on groups of other ranks their averages would differ"):
            second.prepare_for_backward()

    run_ranks(2, body)


def test_of_two_reducers_one_averages_a_second_backward() -> None:
    """Both have a forward before the first backward, and both are hooked when the second backward begins."""

    def body(group: ProcessGroup) -> None:
        parameters = named("a", "b")
        other_group = group.split(0)
        assert other_group is not None
        reducers = [Reducer(parameters, each) for each in (group, other_group)]
        for reducer in reducers:
            reducer.prepare_for_backward()
        for step in range(1, 4):
            total = torch.zeros(())
            for _, parameter in parameters:
                total = total + (parameter * (1.0 + group.rank)).sum()
            total.backward()
            assert values(parameters) == [1.5 * step, 1.5 * step]

    run_ranks(2, body)


def test_a_local_backward_of_one_reducer_is_not_reduced_by_another() -> None:
    def body(group: ProcessGroup) -> None:
        parameters = named("a")
        other_group = group.split(0)
        assert other_group is not None
        first, _ = Reducer(parameters, group), Reducer(parameters, other_group)
        first.prepare_for_backward(synchronizes=False)
        (parameters[0][1] * (1.0 + group.rank)).sum().backward()
        assert values(parameters) == [1.0 + group.rank]

    run_ranks(2, body)


def test_a_reducer_whose_backward_failed_steps_aside() -> None:
    """A script that goes on with a new wrapper may still hold the old one, in the traceback of the error."""

    def body(group: ProcessGroup) -> None:
        parameters = named("a", "b")
        old = Reducer(parameters, group)
        failing_backward(old, parameters)
        for _, parameter in parameters:
            parameter.grad = None
        new = Reducer(parameters, group)
        for _ in range(2):
            for _, parameter in parameters:
                parameter.grad = None
            backward(new, parameters, group, (1.0, 2.0))
            assert values(parameters) == [1.0, 2.0]
        with pytest.raises(MisuseError, match="never ended"):
            old.prepare_for_backward()

    run_ranks(1, body)


def test_a_reducer_whose_hooks_callback_failed_steps_aside() -> None:
    def hook(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        work = bucket.process_group().all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: 1 / 0)

    def body(group: ProcessGroup) -> None:
        parameters = named("a", "b")
        old = Reducer(parameters, group)
        old.set_hook(hook, None)
        with pytest.raises(ZeroDivisionError) as held:
            backward(old, parameters, group, (1.0, 2.0))
        for _, parameter in parameters:
            parameter.grad = None
        backward(Reducer(parameters, group), parameters, group, (1.0, 2.0))
        assert values(parameters) == [1.0, 2.0]
        assert held.tb is not None  # the traceback holds the frames of the old reducer

    run_ranks(1, body)


class Counting:
    """A hook that averages, and counts its calls."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self.calls = 0

    def __call__(self, _: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        self.calls += 1
        work = self._group.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / self._group.size)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in backward")


def failing_backward(reducer: Reducer, parameters: list[tuple[str, torch.nn.Parameter]]) -> Callable[[], None]:
    """A backward that fails after its first gradient; returned is another one, prepared for before."""
    (_, a), (_, b) = parameters
    reducer.prepare_for_backward()
    second = a.sum() + b.sum()
    first = Fails.apply(a).sum() + b.sum()  # type: ignore[no-untyped-call]
    with pytest.raises(ArithmeticError):
        first.backward()
    return lambda: second.backward()


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_backward_after_a_failed_one_is_refused_without_a_forward_too(as_view: bool) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = named("a", "b")
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view)
        again = failing_backward(reducer, parameters)
        with pytest.raises(MisuseError, match=r"never ended.*close or delete this one"):
            again()

    run_ranks(1, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize(("before", "now"), [((3,), (5,)), ((4, 3), (1, 3)), ((4, 20_000), (1, 20_000))])
def test_a_resized_parameter_is_refused_by_name(as_view: bool, before: tuple[int, ...], now: tuple[int, ...]) -> None:
    """Also if its gradient can be expanded to the old shape. Then other ranks would add the expanded gradient to theirs."""

    def body(group: ProcessGroup) -> None:
        parameters = named("a", "b", shape=before)
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view)
        reduced: list[GradBucket] = []

        def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            reduced.append(bucket)
            return group.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

        reducer.set_hook(hook)
        reducer.rebuild_buckets()
        parameters[1][1].data = torch.ones(now)
        # Where every node is held, for a hook of its own, autograd sees it first.
        told = (
            rf"shape {re.escape(str(list(before)))} for parameter 'b'.*found {re.escape(str(list(now)))}"
            if TELLS_OF_UNDEFINED_GRADIENTS
            else rf"got {re.escape(str(list(now)))} but expected .* {re.escape(str(list(before)))}"
        )
        with pytest.raises(RuntimeError, match=told):
            backward(reducer, parameters, group, (1.0, 2.0))
        assert not reduced

    run_ranks(1, body)


def test_hooks_on_nodes_do_not_pile_up_when_a_parameter_is_converted_in_each_step() -> None:
    def body(group: ProcessGroup) -> None:
        parameters = named("a")
        reducer = Reducer(parameters, group)
        for _ in range(5):
            parameters[0][1].data = parameters[0][1].data.double()
            parameters[0][1].data = parameters[0][1].data.float()
            parameters[0][1].grad = None
            backward(reducer, parameters, group, (1.0,))
        assert len(reducer._hooks._hooked) == 1
        assert len(reducer._hooks._handles) == (1 if TELLS_OF_UNDEFINED_GRADIENTS else 2)

    run_ranks(1, body)


# ---- forks of a rank; see Note [Forks] in `syncline.collectives.forks` ----


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_backward_in_a_fork_is_local(as_view: bool) -> None:
    """Evaluation with gradients, test-time adaptation. The rank's own next backward is averaged as ever."""

    def body(group: ProcessGroup) -> None:
        parameters = named("a", "b")
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view)
        for _ in range(2):
            backward(reducer, parameters, group, (1.0, 2.0))
        assert values(parameters) == [3.0, 6.0]

        def in_child() -> list[object]:
            for _, parameter in parameters:
                parameter.grad = None
            (parameters[0][1] * 7 + parameters[1][1] * 8).sum().backward()
            reducer.prepare_for_backward(synchronizes=False)
            (parameters[0][1] * 1).sum().backward()
            return [values(parameters), answer_of(reducer.prepare_for_backward), answer_of(reducer.check_finalized)]

        if group.rank == 0:
            found, *refused = in_fork(in_child)
            assert found == [8.0, 8.0]
            for call, text in zip(("prepare_for_backward", "check_finalized"), refused, strict=True):
                assert str(text).startswith(f"GroupClosedError: {call} on rank 0 of 2")
        for _, parameter in parameters:
            parameter.grad = None
        backward(reducer, parameters, group, (3.0, 4.0))
        assert values(parameters) == [4.5, 6.0]

    run_ranks(2, body)


def test_a_fork_within_a_backward_ends_it_alone() -> None:
    """A user's hook starts a process, such as one that writes to a log."""

    def body(group: ProcessGroup) -> None:
        parameters = named("a", "b")
        reducer = Reducer(parameters, group, bucket_cap_bytes=4)
        backward(reducer, parameters, group, (1.0, 2.0))
        forked: list[object] = []

        def start_process(_: torch.Tensor) -> None:
            if group.rank == 0 and not forked:
                read, write = os.pipe()
                forked.append(os.fork() or "fork")
                forked.extend((read, write))

        parameters[1][1].register_post_accumulate_grad_hook(start_process)
        for _, parameter in parameters:
            parameter.grad = None
        found = answer_of(lambda: backward(reducer, parameters, group, (3.0, 4.0))) or values(parameters)
        if forked and forked[0] == "fork":
            os.write(forked[2], pickle.dumps(found))
            os._exit(0)
        assert found == [4.5, 6.0]
        if forked:
            assert select.select([forked[1]], [], [], 20)[0], "the fork hangs"
            assert pickle.loads(os.read(forked[1], 1000)) == [3.0, 4.0]
            os.waitpid(forked[0], 0)

    run_ranks(2, body)


@pytest.mark.parametrize("in_a_forward", [False, True])
def test_a_failed_backward_does_not_go_on_while_the_script_keeps_its_error(in_a_forward: bool) -> None:
    """The backward misses b. Then a forward runs within another backward, or another backward has a gradient of b."""

    def body(group: ProcessGroup) -> None:
        parameters = named("a", "b")
        (_, a), (_, b) = parameters
        reducer = Reducer(parameters, group)
        reducer.prepare_for_backward()
        with pytest.raises(MisuseError, match="'b'") as kept:
            a.sum().backward()  # type: ignore[no-untyped-call]
        other = b * 2.0
        if in_a_forward:
            other = torch.ones(2, requires_grad=True) * 2.0
            other.register_hook(lambda _: reducer.prepare_for_backward())  # type: ignore[no-untyped-call]
        with pytest.raises(MisuseError, match="never ended"):
            other.sum().backward()  # type: ignore[no-untyped-call]
        assert kept.value is not None

    run_ranks(1, body)
