"""Backwards that begin elsewhere than a forward's outputs, end early, or run within others: all are averaged."""

from __future__ import annotations

import gc
import time
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from syncline.collectives import MisuseError, ProcessGroup, ReduceOp, TransportError
from syncline.collectives.engine import host_group
from syncline.collectives.testing import run_ranks
from syncline.reducer import GradBucket, Reducer
from test_support.chosen_gradients import CountingGroup
from test_support.training_runs import VIEWS

pytestmark = pytest.mark.ranks

COUNT = 6
ALL = range(COUNT)


@pytest.fixture(
    params=[{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=["complete", "find-unused", "static"]
)
def graph(request: pytest.FixtureRequest) -> dict[str, bool]:
    """What is known of the graph."""
    return dict(request.param)


class Heads:
    """A model of six parameters in one bucket, of which a loss may use any."""

    def __init__(self, group: ProcessGroup, **options: Any) -> None:
        self.rank = group.rank
        self.parameters = [torch.nn.Parameter(torch.ones(2, dtype=torch.float64)) for _ in ALL]
        names = [f"p{index}" for index in ALL]
        self.reducer = Reducer(list(zip(names, self.parameters, strict=True)), group, **options)

    def compute(self, indices: Sequence[int]) -> torch.Tensor:
        """A loss; the gradients of its parameters, 1 on rank 0 and 2 on rank 1, come in the order of the indices."""
        total = torch.zeros((), dtype=torch.float64)
        for index in reversed(indices):
            total = total + (self.parameters[index] * (self.rank + 1.0)).sum()
        return total

    def forward(self, indices: Sequence[int] = range(COUNT - 1, -1, -1), *, synchronizes: bool = True) -> torch.Tensor:
        """A loss whose backward is reduced."""
        self.reducer.prepare_for_backward(synchronizes=synchronizes)
        return self.compute(indices)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def train(self) -> None:
        """Three steps, after which the buckets are those that stay."""
        for _ in range(3):
            self.zero_grad()
            self.forward().backward()  # type: ignore[no-untyped-call]
            self.check(ALL)
        self.zero_grad()

    def check(self, indices: Sequence[int], times: float = 1.0) -> None:
        """These have the average of 1 and 2, or so many times that, and others nothing."""
        for index, parameter in enumerate(self.parameters):
            found = None if parameter.grad is None else parameter.grad.tolist()
            assert found == ([1.5 * times] * 2 if index in indices else None), index

    def check_own(self) -> None:
        """All have this rank's gradients, not averaged."""
        for parameter in self.parameters:
            assert parameter.grad is not None
            assert parameter.grad.tolist() == [self.rank + 1.0] * 2


# ---- tensors that forward kept aside ----


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("index", ALL)
def test_a_backward_from_a_tensor_that_forward_kept_aside_is_averaged(as_view: bool, steps: int, index: int) -> None:
    """It goes neither through the outputs nor through any parameter that other backwards end with."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        for _ in range(steps):
            heads.zero_grad()
            heads.forward().backward()  # type: ignore[no-untyped-call]
            heads.check(ALL)
        for _ in range(2):
            heads.zero_grad()
            heads.forward([other for other in ALL if other != index])
            kept_aside = heads.compute([index])
            kept_aside.backward()  # type: ignore[no-untyped-call]
            heads.check([index])
        heads.train()

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize(("static", "steps"), [(False, 0), (False, 1), (False, 3), (True, 1), (True, 3)])
def test_a_backward_from_a_tensor_that_was_kept_aside_names_what_is_missing(as_view: bool, steps: int, static: bool) -> None:
    """Without unused parameters it must reach all, in a static graph from the second step on."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, gradient_as_bucket_view=as_view, static_graph=static)
        for _ in range(steps):
            heads.zero_grad()
            heads.forward().backward()  # type: ignore[no-untyped-call]
        heads.zero_grad()
        heads.forward()
        with pytest.raises(MisuseError, match="got no gradient in it: 'p0', 'p1', 'p3', 'p4', 'p5'"):
            heads.compute([2]).backward()  # type: ignore[no-untyped-call]

    run_ranks(2, body)


# ---- when buckets start ----


def started_before_each(heads: Heads, counting: CountingGroup, order: Sequence[int]) -> list[int]:
    """How many buckets have started before each gradient of a step whose gradients come in this order."""
    found: list[int] = []
    before = counting.issued
    handles = [parameter.register_hook(lambda _: found.append(counting.issued - before)) for parameter in heads.parameters]
    heads.zero_grad()
    heads.forward(order).backward()  # type: ignore[no-untyped-call]
    heads.check(ALL)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("static", [False, True])
def test_a_bucket_whose_last_gradient_is_another_than_expected_starts_before_the_end(as_view: bool, static: bool) -> None:
    """It waits for the gradient of another bucket that follows, and from the next backward on for none."""

    def body(group: ProcessGroup) -> None:
        counting = CountingGroup(group)
        pairs = {"bucket_cap_bytes": 32, "first_bucket_cap_bytes": 32}
        heads = Heads(counting, gradient_as_bucket_view=as_view, static_graph=static, **pairs)  # type: ignore[arg-type]
        heads.train()
        assert [bucket.indices for bucket in heads.reducer.buckets] == [[5, 4], [3, 2], [1, 0]]
        assert started_before_each(heads, counting, [5, 4, 3, 2, 1, 0]) == [0, 0, 1, 1, 2, 2]
        other_order = [4, 5, 2, 3, 0, 1]
        assert started_before_each(heads, counting, other_order) == [0, 0, 0, 1, 1, 2]
        for _ in range(2):
            assert started_before_each(heads, counting, other_order) == [0, 0, 1, 1, 2, 2]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_the_last_bucket_is_learnt_at_the_end_of_backward(as_view: bool) -> None:
    """Whatever gradient comes last in backward, its bucket is reduced."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, gradient_as_bucket_view=as_view)
        heads.train()
        for last in ALL:
            for _ in range(2):
                heads.zero_grad()
                heads.forward([*(index for index in ALL if index != last), last]).backward()  # type: ignore[no-untyped-call]
                heads.check(ALL)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("nested_in", [2, 3])
def test_a_bucket_waits_for_users_hooks_that_run_a_backward_of_their_own(as_view: bool, nested_in: int) -> None:
    """The order has changed, and the hook on the bucket's last gradient lets others come before it has changed this one."""

    def body(group: ProcessGroup) -> None:
        pairs = {"bucket_cap_bytes": 32, "first_bucket_cap_bytes": 32}
        heads = Heads(group, gradient_as_bucket_view=as_view, **pairs)
        heads.train()
        is_on = False

        def reach_others_and_double(parameter: torch.Tensor) -> None:
            if is_on:
                with torch.enable_grad():
                    heads.compute([1]).backward()  # type: ignore[no-untyped-call]
                assert parameter.grad is not None
                parameter.grad.mul_(2)

        heads.parameters[nested_in].register_post_accumulate_grad_hook(reach_others_and_double)  # type: ignore[no-untyped-call]
        heads.train()
        is_on = True
        last_but_one = 5 - nested_in
        for _ in range(2):
            heads.zero_grad()
            heads.forward([5, 4, last_but_one, nested_in, 0]).backward()  # type: ignore[no-untyped-call]
            found = [parameter.grad.tolist()[0] for parameter in heads.parameters if parameter.grad is not None]
            assert found == [1.5 * (2 if index == nested_in else 1) for index in ALL]

    run_ranks(2, body)


# ---- backwards that begin, end or run elsewhere ----


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_backward_whose_forward_was_before_the_rebuild_is_averaged(as_view: bool) -> None:
    """Its forward was before the rebuild of the buckets."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        first, waiting = heads.forward(), heads.forward([2])
        first.backward()  # type: ignore[no-untyped-call]
        heads.check(ALL)
        heads.zero_grad()
        last = heads.forward()
        waiting.backward()  # type: ignore[no-untyped-call]
        heads.check([2])
        heads.zero_grad()
        last.backward()  # type: ignore[no-untyped-call]
        heads.check(ALL)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_backward_of_an_unsynchronized_forward_is_averaged_with_the_next(as_view: bool, rank: int) -> None:
    """On one rank it runs when the other has a backward that is reduced, and is reduced with it."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        waiting = heads.forward([2], synchronizes=False)
        heads.forward().backward()  # type: ignore[no-untyped-call]
        heads.zero_grad()
        last = heads.forward([3])
        (waiting if group.rank == rank else last).backward()  # type: ignore[no-untyped-call]
        found = [None if parameter.grad is None else parameter.grad.tolist() for parameter in heads.parameters]
        here, there = (rank + 1) / 2, (2 - rank) / 2
        assert found == [None, None, [here] * 2, [there] * 2, None, None]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_backward_from_views_that_were_changed_in_place_is_averaged(as_view: bool) -> None:
    """Autograd gives them another node then."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        heads.train()
        for index in (2, 3):
            heads.zero_grad()
            heads.reducer.prepare_for_backward()
            output = (heads.parameters[index] * (group.rank + 1.0)).view(2, 1)
            output.mul_(3).sum().backward()
            heads.check([index], times=3)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_backward_from_two_outputs_leaves_out_a_forward_that_waits(as_view: bool) -> None:
    """One backward through both is one reduction."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        heads.train()
        waiting = heads.forward([1])
        heads.reducer.prepare_for_backward()
        outputs = [heads.compute([2]), heads.compute([3])]
        torch.stack(outputs).sum().backward()
        heads.check([2, 3])
        heads.zero_grad()
        waiting.backward()  # type: ignore[no-untyped-call]
        heads.check([1])

    run_ranks(2, body)


def test_a_parameter_may_be_used_first_after_the_first_steps() -> None:
    """A loss of such a parameter alone, without a forward of its own."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True)
        used = [5, 4, 1, 0]
        for step in range(5):
            heads.zero_grad()
            heads.forward(used).backward()  # type: ignore[no-untyped-call]
            heads.check(used)
            if step > 2:
                heads.compute([2]).backward()  # type: ignore[no-untyped-call]
                heads.check([*used, 2])

    run_ranks(2, body)


def test_two_backwards_without_a_forward_between_them_are_averaged() -> None:
    """Without a forward between them."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True)
        heads.train()
        heads.forward()
        heads.compute([0]).backward()  # type: ignore[no-untyped-call]
        heads.compute([2]).backward()  # type: ignore[no-untyped-call]
        heads.check([0, 2])

    run_ranks(2, body)


def test_an_unsynchronized_backward_may_be_the_first(graph: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        heads = Heads(group, **graph)
        heads.forward(synchronizes=False).backward()  # type: ignore[no-untyped-call]
        heads.check_own()
        heads.train()

    run_ranks(2, body)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["complete", "find-unused"])
@pytest.mark.parametrize("when", ["first steps", "later"])
def test_backwards_from_other_tensors_than_the_forwards_are_averaged(when: str, options: dict[str, bool]) -> None:
    """Backwards from tensors that the prepared forward has not computed."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, **options)
        if when == "later":
            heads.train()
        for _ in range(3):
            heads.forward()
            heads.zero_grad()
            heads.compute(range(COUNT - 1, -1, -1)).backward()  # type: ignore[no-untyped-call]
            heads.check(ALL)
        heads.zero_grad()
        heads.forward()
        if options:
            heads.compute([2]).backward()  # type: ignore[no-untyped-call]
            heads.check([2])
        else:
            with pytest.raises(MisuseError, match="no gradient"):
                heads.compute([2]).backward()  # type: ignore[no-untyped-call]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("when", ["first steps", "later"])
def test_a_penalty_on_gradients_that_has_its_own_backward_is_averaged(when: str, as_view: bool) -> None:
    """What `create_graph=True` computes leads to parameters past the outputs."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        if when == "later":
            heads.train()
        for _ in range(3):
            heads.zero_grad()
            heads.reducer.prepare_for_backward()
            features = heads.parameters[1] * (group.rank + 1.0)
            output = (features * heads.parameters[2]).sum() + heads.compute([5, 4, 3, 0])
            (slope,) = torch.autograd.grad(output, features, create_graph=True)
            (slope * (group.rank + 1.0)).sum().backward()
            found = [None if parameter.grad is None else parameter.grad.tolist() for parameter in heads.parameters]
            assert found == [None, None, [1.5] * 2, None, None, None]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_second_backward_that_reaches_less_names_what_is_missing(as_view: bool) -> None:
    """A gradient that is there from the first backward does not count for the second."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, gradient_as_bucket_view=as_view)
        heads.train()
        heads.reducer.prepare_for_backward()
        outputs = [heads.compute(range(COUNT)), heads.compute([5, 4, 3, 1, 0])]
        outputs[0].backward()  # type: ignore[no-untyped-call]
        heads.check(ALL)
        with pytest.raises(MisuseError, match="no gradient in it: 'p2'"):
            outputs[1].backward()  # type: ignore[no-untyped-call]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_reentrant_checkpoint_among_unused_parameters_is_an_error(as_view: bool) -> None:
    """With unused parameters it is an error, as from the first step on: autograd says that what is inside will not come."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        heads.train()
        heads.reducer.prepare_for_backward()
        inputs = torch.ones(2, dtype=torch.float64, requires_grad=True)
        inner = checkpoint(lambda x: x * heads.parameters[2], inputs, use_reentrant=True)
        total = inner.sum() + heads.compute([5, 4, 3, 1, 0])
        with pytest.raises(MisuseError, match=r"gradient of parameter 'p2' became ready twice.*use_reentrant=False"):
            total.backward()

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_forward_within_a_reentrant_checkpoint_is_an_error_among_unused_parameters(as_view: bool) -> None:
    """So it is when the whole forward runs in the checkpoint."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        heads.train()

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled():
                return inputs * heads.parameters[2]
            heads.reducer.prepare_for_backward()
            return inputs * heads.parameters[2]

        inputs = torch.ones(2, dtype=torch.float64, requires_grad=True)
        output = checkpoint(forward, inputs, use_reentrant=True)
        with pytest.raises(MisuseError, match="cannot see into a re-entrant checkpoint"):
            output.sum().backward()

    run_ranks(2, body)


@pytest.mark.parametrize("index", [0, COUNT - 1])
def test_a_reentrant_checkpoint_whose_inputs_need_no_gradient_is_named_as_the_cause(index: int) -> None:
    """Autograd does not go into it: torch warns of that in forward, where the warning may be far from the error."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group)
        heads.reducer.prepare_for_backward()
        inputs = torch.ones(2, dtype=torch.float64)
        inner = checkpoint(lambda x: x * heads.parameters[index], inputs, use_reentrant=True)
        total = inner.sum() + heads.compute([one for one in ALL if one != index])
        with pytest.raises(MisuseError, match=rf"(?s)got no gradient in it: 'p{index}'\. .*use use_reentrant=False"):
            total.backward()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")
        run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:Trying to prepend a node to itself:UserWarning")  # torch 2.6, of its own graphs
def test_a_backward_under_compiled_autograd_is_refused_and_a_plain_one_after_it_is_not(graph: dict[str, bool]) -> None:
    """It drops what is queued for the end of backward. One that is not reduced needs no end."""
    from torch._dynamo import compiled_autograd

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, **graph)

        def under_compiled_autograd(total: torch.Tensor) -> None:
            with compiled_autograd._enable(lambda traced: traced):
                total.backward()

        for _ in range(2):
            with pytest.raises(MisuseError, match=r"under compiled autograd.*compiled_autograd=False"):
                under_compiled_autograd(heads.forward())
            heads.zero_grad()
            heads.forward().backward()
            assert [parameter.grad.tolist() for parameter in heads.parameters] == [[1.0, 1.0]] * COUNT  # type: ignore[union-attr]
            under_compiled_autograd(heads.forward(synchronizes=False))
            heads.forward().backward()
            assert [parameter.grad.tolist() for parameter in heads.parameters] == [[3.0, 3.0]] * COUNT  # type: ignore[union-attr]
            heads.zero_grad()

    run_ranks(1, body)


class Undefined(torch.autograd.Function):
    """Gives no gradient if asked to."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, undefined: bool) -> torch.Tensor:
        ctx.undefined = undefined
        return inputs + weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]  # torch's is less precise
        return gradient, None if ctx.undefined else gradient, None


@pytest.mark.parametrize("as_view", VIEWS)
def test_an_undefined_gradient_in_a_reentrant_checkpoint_counts_as_zeros(as_view: bool) -> None:
    """It counts as zeros."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, gradient_as_bucket_view=as_view)
        for step in range(5):
            heads.zero_grad()
            heads.reducer.prepare_for_backward()

            def part(inputs: torch.Tensor, undefined: bool = step == 3) -> torch.Tensor:
                return Undefined.apply(inputs, heads.parameters[2], undefined)  # type: ignore[no-any-return,no-untyped-call]

            inputs = torch.zeros(2, dtype=torch.float64, requires_grad=True)
            inner = checkpoint(part, inputs, use_reentrant=True)
            total = heads.compute([5, 4, 3, 1, 0]) + inner.sum() * (group.rank + 1.0)
            total.backward()
            assert [parameter.grad is not None for parameter in heads.parameters] == [True] * COUNT
            gradient = heads.parameters[2].grad
            assert gradient is not None
            assert gradient.tolist() == [0.0 if step == 3 else 1.5] * 2

    run_ranks(2, body)


class Fails(torch.autograd.Function):
    """As a loss that checks its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]  # torch's is less precise
        raise ArithmeticError("not a number")


def test_a_backward_that_fails_before_its_first_gradient_changes_nothing(graph: dict[str, bool]) -> None:
    """Nothing has begun, and the next step goes on."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, **graph)
        heads.train()
        heads.reducer.prepare_for_backward()
        inner = Fails.apply(heads.compute(range(COUNT)))  # type: ignore[no-untyped-call]
        total = inner * 1
        with pytest.raises(ArithmeticError, match="not a number"):
            total.backward()
        heads.reducer.check_finalized()
        heads.train()

    run_ranks(2, body)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_backward_that_fails_without_synchronisation_leaves_the_next_one_averaged(
    graph: dict[str, bool], goes_on: bool
) -> None:
    """Also if no forward is announced between the two, because the script runs the bare module."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, **graph)
        for _ in range(4):
            heads.train()
        heads.reducer.keep_local(True)
        inputs = torch.ones(2, dtype=torch.float64, requires_grad=True)
        ending = Fails.apply(inputs).sum()  # type: ignore[no-untyped-call]
        with pytest.raises(ArithmeticError, match="not a number"):
            (heads.compute(ALL) + ending).backward()
        assert heads.parameters[0].grad is not None  # it has failed after the gradients had come
        if goes_on:
            heads.compute(ALL).backward()  # type: ignore[no-untyped-call]
        heads.reducer.keep_local(False)
        heads.zero_grad()
        heads.compute(ALL).backward()  # type: ignore[no-untyped-call]
        heads.check(ALL)
        assert not heads.reducer.has_local_gradients

    run_ranks(2, body)


def test_what_is_local_may_be_asked_within_a_backward(graph: dict[str, bool]) -> None:
    """A communication hook runs under the reducer's lock, a hook on a tensor between two gradients of a bucket."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, **graph)
        seen: list[bool] = []

        def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            seen.append(heads.reducer.has_local_gradients)
            future = group.all_reduce(bucket.buffer(), ReduceOp.AVG, async_op=True).get_future()
            return future.then(lambda done: done.value()[0])

        heads.reducer.set_hook(hook)
        heads.train()
        seen.clear()
        last, first = heads.forward([5, 4, 3]), heads.compute([2, 1, 0])
        last.register_hook(lambda _: seen.append(heads.reducer.has_local_gradients))
        (last + first).backward()  # type: ignore[no-untyped-call]
        heads.check(ALL)
        assert seen == [False] * 2

    run_ranks(2, body)


def test_a_missing_gradient_is_named_though_users_have_hooks() -> None:
    def body(group: ProcessGroup) -> None:
        heads = Heads(group)
        for parameter in heads.parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
        heads.train()
        with pytest.raises(MisuseError, match="no gradient in it: 'p2'"):
            heads.forward([5, 4, 3, 1, 0]).backward()  # type: ignore[no-untyped-call]

    run_ranks(2, body)


def test_a_loss_that_is_kept_keeps_neither_reducer_nor_buckets(graph: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        heads = Heads(group, **graph)
        heads.train()
        kept = heads.forward()
        reducer, bucket = weakref.ref(heads.reducer), weakref.ref(heads.reducer.buckets[0])
        del heads.reducer
        assert reducer() is None
        end_s = time.monotonic() + 10
        while bucket() is not None and time.monotonic() < end_s:  # the group's thread drops its last callback a moment later
            time.sleep(0.001)
        assert bucket() is None
        kept.backward()  # type: ignore[no-untyped-call]

    gc.disable()  # it shall need no help
    try:
        run_ranks(2, body)
    finally:
        gc.enable()


def test_a_reducer_is_freed_although_its_group_has_failed() -> None:
    """The traceback of the group's error has the frames of the backward, and these hold the reducer."""

    def body(group: ProcessGroup) -> weakref.ref[Reducer]:
        heads = Heads(group)
        if group.rank == 1:
            group.abort()
        else:
            with pytest.raises(TransportError):
                heads.forward().backward()  # type: ignore[no-untyped-call]
        return weakref.ref(heads.reducer)

    gone = run_ranks(2, body)
    host_group._given_up.clear()
    end_s = time.monotonic() + 10
    while any(reducer() for reducer in gone) and time.monotonic() < end_s:  # the threads end a moment later
        gc.collect()
    assert [reducer() for reducer in gone] == [None, None]


def test_parameters_may_be_swapped_while_they_are_averaged() -> None:
    """As `load_state_dict` does when `torch.__future__` says so; torch refuses that for tensors with weak references."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group)
        torch.utils.swap_tensors(heads.parameters[2], torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)))
        assert heads.parameters[2].tolist() == [0.0, 0.0]

    run_ranks(1, body)


@pytest.mark.parametrize("views", [(True, False), (False, True), (True, True)])
def test_two_reducers_with_views_may_not_share_a_backward(views: tuple[bool, bool]) -> None:
    """That is refused if either averages in views of its buckets, whatever their groups, until the other one is closed."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, gradient_as_bucket_view=views[0])
        heads.train()
        names = [f"p{index}" for index in ALL]
        part = group.split(0)
        assert part is not None
        other = Reducer(list(zip(names, heads.parameters, strict=True)), part, gradient_as_bucket_view=views[1])
        other.prepare_for_backward()
        with pytest.raises(MisuseError, match="another reducer averages some of the same parameters"):
            heads.reducer.prepare_for_backward()
        other.close()
        heads.train()

    run_ranks(2, body)


def test_a_reducer_that_is_garbage_disturbs_no_other() -> None:
    def body(group: ProcessGroup) -> None:
        heads = Heads(group, gradient_as_bucket_view=True)
        circle: list[Any] = [Reducer([("p2", heads.parameters[2])], group, gradient_as_bucket_view=True)]
        circle.append(circle)
        del circle
        heads.train()

    gc.disable()
    try:
        run_ranks(2, body)
    finally:
        gc.enable()


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("first", [(5,), (0, 3), ALL])
@pytest.mark.parametrize("delays", [False, True])
def test_a_backward_in_a_hook_of_another_one_is_averaged_with_it(
    as_view: bool, depth: int, first: Sequence[int], delays: bool
) -> None:
    """The hook of an auxiliary loss runs before any gradient of the outer backward is there."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, gradient_as_bucket_view=as_view, delayed=[f"p{first[0]}"] if delays else [])
        for _ in range(3):
            heads.zero_grad()
            heads.reducer.prepare_for_backward()
            rest = heads.compute([index for index in ALL if index not in first])
            total = heads.compute(first)
            for _ in range(depth):  # autograd begins with the nodes that were made last
                outer = torch.ones((), dtype=torch.float64, requires_grad=True) * 1
                outer.register_hook(lambda _, inner=total: inner.backward())
                total = outer
            (total + rest).backward()
            for parameter in heads.parameters:
                assert parameter.grad is not None
                assert parameter.grad.tolist() == [1.5, 1.5]

    run_ranks(2, body)


def test_a_backward_in_a_hook_of_another_models_backward_has_averages_when_it_returns(graph: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        heads = Heads(group, **graph)
        found: list[list[float]] = []

        def train(_: torch.Tensor) -> None:
            heads.zero_grad()
            with torch.enable_grad():
                heads.forward(ALL).backward()
            found.extend(parameter.grad.tolist() for parameter in heads.parameters if parameter.grad is not None)

        for _ in range(3):
            other = torch.ones(2, requires_grad=True) * 2
            other.register_hook(train)
            other.sum().backward()  # type: ignore[no-untyped-call]
        assert found == [[1.5, 1.5]] * 3 * COUNT

    run_ranks(2, body)


def test_gradients_that_are_missing_after_a_backward_in_a_hook_are_named() -> None:
    def body(group: ProcessGroup) -> None:
        heads = Heads(group)
        heads.reducer.prepare_for_backward()
        rest, inner, outer = heads.compute([0, 2]), heads.compute([1]), torch.ones(2, requires_grad=True) * 2
        outer.register_hook(lambda _: inner.backward())  # type: ignore[no-untyped-call]
        with pytest.raises(MisuseError, match=r"got no gradient in it: 'p3', 'p4', 'p5'"):
            (outer.sum() + rest).backward()
        group.abort()

    run_ranks(2, body)
