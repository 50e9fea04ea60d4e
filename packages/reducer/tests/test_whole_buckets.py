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
from syncline.reducer import GradBucket, Reducer

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
        reducer.prepare_for_backward()
        loss(parameters, group.rank, step, arrival).backward()
        for index, (_, parameter) in enumerate(parameters):
            assert parameter.grad is not None
            assert parameter.grad.tolist() == average(group.size, index, step), (step, index)


def noting(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> list[int]:
    """Which parameters have, or ever had, a hook of their own: its cost stays when it is removed."""
    return [index for index, (_, parameter) in enumerate(parameters) if parameter._post_accumulate_grad_hooks is not None]


@pytest.mark.parametrize("as_view", VIEWS)
def test_only_the_first_parameter_and_the_last_of_each_bucket_are_hooked(as_view: bool) -> None:
    def body(group: ProcessGroup) -> None:
        static, dynamic = make_parameters(8), make_parameters(8)
        reducers = [
            Reducer(static, group, bucket_cap_bytes=2 * PAIRS, gradient_as_bucket_view=as_view, static_graph=True),
            Reducer(dynamic, group, bucket_cap_bytes=2 * PAIRS, gradient_as_bucket_view=as_view),
        ]
        for reducer, parameters in zip(reducers, (static, dynamic), strict=True):
            train(reducer, parameters, group, [list(range(7, -1, -1))] * 4)
        assert noting(static) == [0, 4, 7]
        assert noting(dynamic) == list(range(8))

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

    def body(group: ProcessGroup) -> list[int]:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=cap, gradient_as_bucket_view=as_view, static_graph=True)
        changed = FORWARD if group.rank == 0 else REVERSED
        train(reducer, parameters, group, [REVERSED, REVERSED, REVERSED, changed, changed, REVERSED, *[[2, 0, 3, 1]] * 2])
        return noting(parameters)

    assert run_ranks(2, body) == [FORWARD] * 2


@pytest.mark.parametrize("as_view", VIEWS)
def test_each_rank_has_its_own_order(as_view: bool) -> None:
    def body(group: ProcessGroup) -> list[int]:
        parameters = make_parameters(8)
        reducer = Reducer(parameters, group, bucket_cap_bytes=2 * PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
        arrival = [list(range(7, -1, -1)), list(range(8)), [2, 0, 3, 6, 7, 1, 5, 4]][group.rank]
        train(reducer, parameters, group, [arrival] * 5)
        return noting(parameters)

    assert all(len(found) < 8 for found in run_ranks(3, body))


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("kept_from", [1, 2, 4])
@pytest.mark.parametrize("then", [REVERSED, FORWARD], ids=["same-order", "another-order"])
def test_gradients_that_are_kept_are_noted_one_by_one(as_view: bool, kept_from: int, then: Sequence[int]) -> None:
    """That a gradient is there says nothing then."""

    def body(group: ProcessGroup) -> list[int]:
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

    assert run_ranks(2, body) == [FORWARD] * 2


@pytest.mark.parametrize("as_view", VIEWS)
def test_what_was_added_up_without_synchronisation_is_reduced(as_view: bool) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
        train(reducer, parameters, group, [REVERSED] * 3)
        set_to_none(parameters)
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
@pytest.mark.parametrize(
    ("twice", "when", "complaint"),
    [
        pytest.param(4, 0, r"'p4' became ready twice", id="its-buckets-last"),
        pytest.param(6, 0, r"gradient of .*'p6'.* came on rank \d.*being reduced already", id="another"),
        pytest.param(6, 5, None, id="before-it-was-collected"),
    ],
)
def test_a_gradient_that_comes_twice(as_view: bool, twice: int, when: int, complaint: str | None) -> None:
    """It is an error, if the bucket is being reduced already; else both are reduced."""
    order = list(range(7, -1, -1))

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters(8)
        reducer = Reducer(parameters, group, bucket_cap_bytes=2 * PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
        train(reducer, parameters, group, [order] * 3)

        def again(_: torch.Tensor) -> None:
            handle.remove()
            with torch.enable_grad():
                (parameters[twice][1] * 5).sum().backward()

        handle = parameters[when][1].register_hook(again)
        set_to_none(parameters)
        reducer.prepare_for_backward()
        if complaint is not None:
            with pytest.raises(MisuseError, match=f"{complaint}.*The graph is not static"):
                loss(parameters, group.rank, 3, order).backward()
        else:
            loss(parameters, group.rank, 3, order).backward()
            assert parameters[twice][1].grad is not None
            assert parameters[twice][1].grad.tolist() == [average(2, twice, 3)[0] + 5] * 2

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_gradient_that_replaces_one_that_was_taken_away(as_view: bool) -> None:
    """Taken away alone it is given anew; see `Bucket.deliver`."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
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
def test_gradients_that_are_pieces_of_one_tensor(as_view: bool) -> None:
    """To write one bucket back changes the version of another's."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=ONE_EACH, gradient_as_bucket_view=as_view, static_graph=True)
        factors = torch.arange(1.0, 9.0, dtype=torch.float64) * (group.rank + 1)
        for _ in range(4):
            set_to_none(parameters)
            reducer.prepare_for_backward()
            (torch.cat([parameter for _, parameter in parameters]) * factors).sum().backward()
            for index, (_, parameter) in enumerate(parameters):
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [1.5 * (2 * index + 1), 1.5 * (2 * index + 2)]

    run_ranks(2, body)


@pytest.mark.parametrize("converted_after", [0, 3])  # after 1, buckets are built anew, for the new dtype
def test_a_parameter_that_was_converted_is_named(converted_after: int) -> None:
    """Its node in the graph is another one then, and whatever was hooked on the old one is lost."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, static_graph=True)
        train(reducer, parameters, group, [REVERSED] * converted_after)
        for _, parameter in parameters:
            parameter.grad = None
            parameter.data = parameter.data.float()
        reducer.prepare_for_backward()
        with pytest.raises(MisuseError, match=r"expected a gradient of torch.float64 for parameter 'p\d'.*found torch.float32"):
            loss(parameters, group.rank, 3, REVERSED).backward()

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
            reducer.prepare_for_backward()
            loss(parameters, group.rank, step, REVERSED).backward()
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
            reducer.prepare_for_backward()  # from step 3 on there are gradients, so that each is noted again
            loss(parameters, group.rank, step, [3, 2, 0]).backward()
        parameters[1][1].requires_grad_(True)
        reducer.prepare_for_backward()
        with pytest.raises(MisuseError, match="'p1' became ready twice"):
            loss(parameters, group.rank, 6, [3, 2, 0, 1]).backward()

    run_ranks(2, body)


def test_what_was_closed_stays_closed() -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, static_graph=True)
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
@pytest.mark.parametrize("converted", [[0], [1], [0, 1, 2, 3]])
def test_parameters_that_are_converted_in_forward(as_view: bool, converted: Sequence[int]) -> None:
    """There and back, as rounding of weights and offloading do: each has a new node then, in each step."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
        for step in range(4):
            set_to_none(parameters)
            reducer.prepare_for_backward()
            for index in converted:
                parameters[index][1].data = parameters[index][1].data.float()
                parameters[index][1].data = parameters[index][1].data.double()
            loss(parameters, group.rank, step, REVERSED).backward()
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
            reducer.prepare_for_backward()
            loss(parameters, group.rank, step, order).backward()

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


def test_pieces_of_one_tensor_that_hooks_change() -> None:
    """What changes one changes the version of all, also of those in other buckets."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=ONE_EACH, static_graph=True)

        def double(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(2)

        for _, parameter in parameters:
            parameter.register_post_accumulate_grad_hook(double)  # type: ignore[no-untyped-call]
        for _ in range(4):
            set_to_none(parameters)
            reducer.prepare_for_backward()
            (torch.cat([parameter for _, parameter in parameters]) * (group.rank + 1)).sum().backward()
            for _, parameter in parameters:
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [3.0, 3.0]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_communication_hook_may_give_parameters_their_gradients(as_view: bool) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True)

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
def test_a_gradient_that_a_users_hook_takes_away_once(as_view: bool) -> None:
    """It counts as zeros; and what was taken away in the middle of a bucket is no reason to complain."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
        steps = iter(range(10))

        def take_away_once(parameter: torch.Tensor) -> None:
            if next(steps) == 3 and group.rank == 1:
                parameter.grad = None

        parameters[1][1].register_post_accumulate_grad_hook(take_away_once)  # type: ignore[no-untyped-call]
        train(reducer, parameters, group, [REVERSED] * 3)
        set_to_none(parameters)
        reducer.prepare_for_backward()
        loss(parameters, group.rank, 3, REVERSED).backward()
        assert parameters[1][1].grad is not None
        assert parameters[1][1].grad.tolist() == [coefficient(0, 1, 3) / 2] * 2
        train(reducer, parameters, group, [REVERSED] * 2, first_step=4)

    run_ranks(2, body)


def test_a_forward_in_inference_mode_while_the_graph_is_learnt() -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, static_graph=True)
        with torch.inference_mode():
            reducer.prepare_for_backward()
        train(reducer, parameters, group, [REVERSED] * 3)

    run_ranks(1, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_hooks_of_a_group_and_ranks_that_sit_out(as_view: bool) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters()
        reducer = Reducer(parameters, group, bucket_cap_bytes=PAIRS, gradient_as_bucket_view=as_view, static_graph=True)
        reducer.set_hook(lambda _, bucket: group.all_reduce(bucket.buffer().div_(2), async_op=True).get_future())
        train(reducer, parameters, group, [REVERSED] * 3)
        set_to_none(parameters)
        if group.rank == 0:
            reducer.sit_out()
        else:
            reducer.prepare_for_backward()
            loss(parameters, group.rank, 3, REVERSED).backward()
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
            reducer.prepare_for_backward()
            loss(parameters, group.rank, step, [3, 2, 0]).backward()
            assert parameters[1][1].grad is None
            for index in (0, 2, 3):
                gradient = parameters[index][1].grad
                assert gradient is not None
                assert gradient.tolist() == average(2, index, step)
        assert noting(parameters) == [0, 1, 3]
        set_to_none(parameters)
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
            set_to_none(parameters)
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


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("seed", range(12))
def test_whatever_loops_do_with_gradients(as_view: bool, seed: int) -> None:
    """Gradients set to None, to zero, or kept, before or after forward; steps without synchronisation; two forwards before two
    backwards; another order on any rank."""
    count, steps = 6, 8
    pick = random.Random(seed)
    cap, absent = pick.choice([ONE_EACH, PAIRS, 48, 1 << 20]), pick.choice([None, None, 2])
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
        reducer = Reducer(parameters, group, bucket_cap_bytes=cap, gradient_as_bucket_view=as_view, static_graph=True)
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
            loss(parameters, group.rank, step, order[group.rank]).backward()
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
