"""Averages in training loops of all kinds: orders, kept gradients, no synchronisation, conversions, hooks."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest
import torch

from syncline.collectives import ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.reducer import GradBucket, Reducer
from test_support.chosen_gradients import (
    FORWARD,
    ONE_EACH,
    PAIRS,
    REVERSED,
    CountingGroup,
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


@pytest.mark.parametrize("as_view", VIEWS)
def test_losses_that_are_kept_change_nothing(as_view: bool, graph: dict[str, bool]) -> None:
    """Their graphs hold parameters and nodes of all steps."""

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

    run_ranks(2, body)


def test_users_hooks_on_gradients_stay_after_the_rebuild(graph: dict[str, bool]) -> None:
    """Hooks on gradients are called once a step, also after the rebuild."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        seen: list[int] = []
        parameters[1][1].register_hook(lambda _: seen.append(1))
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, **graph)
        parameters[2][1].register_hook(lambda _: seen.append(2))
        train(reducer, parameters, group, [REVERSED] * 4)
        assert seen == [2, 1] * 4

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
def test_a_failed_forward_changes_nothing(as_view: bool, graph: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
        for steps in (1, 2, 2):
            set_to_none(parameters)
            reducer.prepare_for_backward()
            reducer.cancel_forward()
            train(reducer, parameters, group, [REVERSED] * steps)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("after", range(4))
def test_gradients_that_are_only_computed_are_not_averaged(as_view: bool, after: int, graph: dict[str, bool]) -> None:
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


def test_two_reducers_may_share_parameters_whose_gradients_are_copied(graph: dict[str, bool]) -> None:
    """What the first has averaged is the same on all ranks, so the second changes nothing; each can be closed."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        options = {"bucket_cap_bytes": PAIRS, **graph}
        first = Reducer(parameters, group, **options)  # type: ignore[arg-type]
        train(first, parameters, group, [REVERSED] * 3)
        other_group = group.split(0)
        assert other_group is not None
        second = Reducer(parameters[:2], other_group, **options)  # type: ignore[arg-type]
        for step in range(4):
            set_to_none(parameters)
            for reducer in (first, second):
                reducer.prepare_for_backward()
            loss(parameters, group.rank, step, REVERSED).backward()  # type: ignore[no-untyped-call]
            for index, (_, parameter) in enumerate(parameters):
                assert parameter.grad is not None
                assert parameter.grad.tolist() == average(2, index, step)
        second.close()
        train(first, parameters, group, [REVERSED] * 3)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("after", [0, 1, 3])
@pytest.mark.parametrize("static", [False, True])
def test_a_backward_within_a_users_hook_is_part_of_the_outer_one(as_view: bool, after: int, static: bool) -> None:
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
def test_parameters_that_are_used_now_and_then_are_averaged(as_view: bool, seed: int) -> None:
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
def test_buckets_overlap_with_backward(as_view: bool, cap: int, graph: dict[str, bool]) -> None:
    """When the last gradient is computed, all buckets but its own are being reduced."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        counted = CountingGroup(group)
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
def test_another_order_changes_no_values(as_view: bool, cap: int, graph: dict[str, bool]) -> None:
    """Also if it changes on one rank only."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=cap, gradient_as_bucket_view=as_view, **graph)
        changed = FORWARD if group.rank == 0 else REVERSED
        train(reducer, parameters, group, [REVERSED, REVERSED, REVERSED, changed, changed, REVERSED, *[[2, 0, 3, 1]] * 2])

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_each_rank_may_have_its_own_order(as_view: bool, graph: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters(8)
        reducer = Reducer(parameters, group, bucket_cap_bytes=2 * PAIRS, gradient_as_bucket_view=as_view, **graph)
        arrival = [list(range(7, -1, -1)), list(range(8)), [2, 0, 3, 6, 7, 1, 5, 4]][group.rank]
        train(reducer, parameters, group, [arrival] * 5)

    run_ranks(3, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("kept_from", [1, 2, 4])
@pytest.mark.parametrize("then", [REVERSED, FORWARD], ids=["same-order", "another-order"])
def test_gradients_that_are_kept_add_up(as_view: bool, kept_from: int, then: Sequence[int], graph: dict[str, bool]) -> None:
    """Without `zero_grad` the averages add up."""

    def body(group: ProcessGroup) -> None:
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

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_what_was_added_up_without_synchronisation_is_reduced(as_view: bool, graph: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
        train(reducer, parameters, group, [REVERSED] * 3)
        set_to_none(parameters)
        reducer.prepare_for_backward(synchronizes=False)
        assert not reducer.has_local_gradients
        loss(parameters, group.rank, 3, [2, 1]).backward()  # it may leave some out
        assert reducer.has_local_gradients
        forward(reducer, parameters, group, 4, REVERSED).backward()
        assert not reducer.has_local_gradients
        for index, (_, parameter) in enumerate(parameters):
            assert parameter.grad is not None
            extra = average(2, index, 3)[0] if index in (1, 2) else 0
            assert parameter.grad.tolist() == [average(2, index, 4)[0] + extra] * 2

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_gradients_that_are_pieces_of_one_tensor_are_averaged(as_view: bool, graph: dict[str, bool]) -> None:
    """They share memory; each bucket writes its own piece."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=ONE_EACH, gradient_as_bucket_view=as_view, **graph)
        factors = torch.arange(1.0, 9.0, dtype=torch.float64) * (group.rank + 1)
        for _ in range(4):
            set_to_none(parameters)
            reducer.prepare_for_backward()
            total = (torch.cat([parameter for _, parameter in parameters]) * factors).sum()
            total.backward()
            for index, (_, parameter) in enumerate(parameters):
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [1.5 * (2 * index + 1), 1.5 * (2 * index + 2)]

    run_ranks(2, body)


def test_pieces_of_one_tensor_that_hooks_change_are_averaged(graph: dict[str, bool]) -> None:
    """Hooks change pieces that share memory, also those in other buckets."""

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
            total.backward()
            for _, parameter in parameters:
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [3.0, 3.0]

    run_ranks(2, body)


def test_a_closed_reducer_averages_nothing(graph: dict[str, bool]) -> None:
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


def test_a_first_forward_in_inference_mode_changes_nothing(graph: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, **graph)
        with torch.inference_mode():
            reducer.prepare_for_backward()
        train(reducer, parameters, group, [REVERSED] * 3)

    run_ranks(1, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_hooks_of_a_group_and_ranks_that_shadow_backward(as_view: bool, graph: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, **graph)
        reducer.set_hook(lambda _, bucket: group.all_reduce(bucket.buffer().div_(2), async_op=True).get_future())
        train(reducer, parameters, group, [REVERSED] * 3)
        set_to_none(parameters)
        if group.rank == 0:
            reducer.shadow_backward()
        else:
            forward(reducer, parameters, group, 3, REVERSED).backward()
            for index, (_, parameter) in enumerate(parameters):
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [coefficient(1, index, 3) / 2] * 2
        train(reducer, parameters, group, [REVERSED] * 2, first_step=4)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_four_ranks_with_delays_and_changing_orders(as_view: bool, graph: dict[str, bool]) -> None:
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
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("converted", [[0], [1], [0, 1, 2, 3]])
def test_parameters_that_are_converted_in_each_forward_are_averaged(
    as_view: bool, converted: Sequence[int], static: bool
) -> None:
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
            total.backward()
            for index, (_, parameter) in enumerate(parameters):
                assert parameter.grad is not None
                assert parameter.grad.tolist() == average(2, index, step), (step, index)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("cap", [ONE_EACH, PAIRS, 1 << 20])
@pytest.mark.parametrize("static", [False, True])
def test_parameters_that_are_converted_there_and_back_are_averaged(as_view: bool, cap: int, static: bool) -> None:
    """They get other nodes in the graph."""

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
@pytest.mark.parametrize("seed", range(12))
def test_random_loops_give_the_averages(as_view: bool, seed: int, graph: dict[str, bool]) -> None:
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
            total.backward()  # type: ignore[no-untyped-call]
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
