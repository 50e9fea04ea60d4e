"""Backwards that reach no hooked parameter: they are seen where they begin; see Note [One hook for a bucket]."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from syncline.collectives import MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.reducer import Reducer, claims
from syncline.reducer.claims import Claim
from syncline.reducer.output_watch import OutputWatch

pytestmark = pytest.mark.ranks

COUNT = 6
ALL = range(COUNT)
VIEWS = [pytest.param(False, id="copied"), pytest.param(True, id="as-view")]


@pytest.fixture(params=[{}, {"find_unused_parameters": True}, {"static_graph": True}], ids=["dynamic", "find-unused", "static"])
def graph_options(request: pytest.FixtureRequest) -> dict[str, bool]:
    """What is known of the graph."""
    return dict(request.param)


class Heads:
    """A reducer over six parameters in one bucket, of which the first and the last are hooked: 5 and 0."""

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
        """A loss that is watched."""
        self.reducer.prepare_for_backward(synchronizes=synchronizes)
        total = self.compute(indices)
        self.reducer.watch([total])
        return total

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def learn(self) -> None:
        """Until one hook is all that a bucket has."""
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

    def hooked(self) -> list[int]:
        """Those with a hook of their own; in a regular graph a bucket's last one has it at its node of the graph."""
        return [index for index, parameter in enumerate(self.parameters) if parameter._post_accumulate_grad_hooks]


# ---- seen ----


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_backward_that_waited_since_the_order_was_learnt(as_view: bool) -> None:
    """Its forward was before; now it reaches a parameter without a hook."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        first, waiting = heads.forward(), heads.forward([2])
        first.backward()  # type: ignore[no-untyped-call]
        heads.check(ALL)
        heads.zero_grad()
        last = heads.forward()
        assert heads.hooked() == [0, 5]
        waiting.backward()  # type: ignore[no-untyped-call]
        heads.check([2])
        heads.zero_grad()
        last.backward()  # type: ignore[no-untyped-call]
        heads.check(ALL)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_backward_of_a_forward_that_was_not_to_be_synchronized(as_view: bool, rank: int) -> None:
    """It is reduced with the next that is; before the order was learnt, and on one rank."""

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
def test_outputs_that_are_views_and_changed_in_place(as_view: bool) -> None:
    """Autograd gives them another node then."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        heads.learn()
        for index in (2, 3):
            heads.zero_grad()
            heads.reducer.prepare_for_backward()
            output = (heads.parameters[index] * (group.rank + 1.0)).view(2, 1)
            heads.reducer.watch([output])
            output.mul_(3).sum().backward()
            heads.check([index], times=3)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_two_outputs_reached_at_once_while_another_forward_waits(as_view: bool) -> None:
    """What was seen twice is reduced once."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        heads.learn()
        waiting = heads.forward([1])
        heads.reducer.prepare_for_backward()
        outputs = [heads.compute([2]), heads.compute([3])]
        heads.reducer.watch(outputs)
        torch.stack(outputs).sum().backward()
        heads.check([2, 3])
        heads.zero_grad()
        waiting.backward()  # type: ignore[no-untyped-call]
        heads.check([1])

    run_ranks(2, body)


def test_parameters_that_were_not_used_when_the_order_was_learnt_are_hooked() -> None:
    """A loss of such a parameter alone need not go through outputs."""

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
            elif step > 0:
                assert heads.hooked() == [0, 2, 3, 5]

    run_ranks(2, body)


# ---- not to be seen ----


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_reentrant_checkpoint_that_comes_later(as_view: bool) -> None:
    """With unused parameters it is an error, as from the first step on: autograd says that what is inside will not come."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        heads.learn()
        heads.reducer.prepare_for_backward()
        inputs = torch.ones(2, dtype=torch.float64, requires_grad=True)
        inner = checkpoint(lambda x: x * heads.parameters[2], inputs, use_reentrant=True)
        total = inner.sum() + heads.compute([5, 4, 3, 1, 0])
        heads.reducer.watch([total])
        with pytest.raises(MisuseError, match=r"gradient of parameter 'p2' became ready twice.*use_reentrant=False"):
            total.backward()

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_all_of_it_in_a_reentrant_checkpoint_later(as_view: bool) -> None:
    """So is that, also if no hooked parameter is reached."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        heads.learn()

        def forward(inputs: torch.Tensor) -> torch.Tensor:
            if not torch.is_grad_enabled():
                return inputs * heads.parameters[2]
            heads.reducer.prepare_for_backward()
            output = inputs * heads.parameters[2]
            heads.reducer.watch([output])
            return output

        inputs = torch.ones(2, dtype=torch.float64, requires_grad=True)
        output = checkpoint(forward, inputs, use_reentrant=True)
        with pytest.raises(MisuseError, match="cannot see into a re-entrant checkpoint"):
            output.sum().backward()

    run_ranks(2, body)


def test_after_a_forward_whose_outputs_nobody_gave_each_gradient_is_noted() -> None:
    def body(group: ProcessGroup) -> None:
        heads = Heads(group)
        heads.learn()
        heads.reducer.prepare_for_backward()
        heads.compute([2])
        heads.forward()
        assert heads.hooked() == list(ALL)

    run_ranks(2, body)


def test_after_one_backward_that_went_another_way_the_next_is_noted() -> None:
    """Without a forward between them."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True)
        heads.learn()
        heads.forward()
        heads.compute([0]).backward()  # type: ignore[no-untyped-call]
        heads.compute([2]).backward()  # type: ignore[no-untyped-call]
        heads.check([0, 2])

    run_ranks(2, body)


def test_an_unsynchronized_backward_before_all_others_says_nothing(graph_options: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        heads = Heads(group, **graph_options)
        heads.forward(synchronizes=False).backward()  # type: ignore[no-untyped-call]
        heads.learn()
        assert heads.hooked() == ([0, 5] if "find_unused_parameters" in graph_options else [5])

    run_ranks(2, body)


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["dynamic", "find-unused"])
@pytest.mark.parametrize("when", ["learning", "later"])
def test_backwards_that_go_another_way_have_each_gradient_noted(when: str, options: dict[str, bool]) -> None:
    """If one was seen while the order was learnt, or later by a hooked parameter."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, **options)
        if when == "later":
            heads.learn()
            assert heads.hooked() == ([0, 5] if options else [5])
        for _ in range(3):
            heads.forward()
            heads.zero_grad()
            heads.compute(range(COUNT - 1, -1, -1)).backward()  # type: ignore[no-untyped-call]
            heads.check(ALL)
        heads.zero_grad()
        heads.forward()
        assert heads.hooked() == list(ALL)
        if options:
            heads.compute([2]).backward()  # type: ignore[no-untyped-call]
            heads.check([2])
        else:
            with pytest.raises(MisuseError, match="no gradient"):
                heads.compute([2]).backward()  # type: ignore[no-untyped-call]

    run_ranks(2, body)


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
def test_an_undefined_gradient_in_a_reentrant_checkpoint(as_view: bool) -> None:
    """Autograd says nothing of what is inside, so each gradient is noted; the undefined one counts as zeros."""

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
            heads.reducer.watch([total])
            total.backward()
            assert [parameter.grad is not None for parameter in heads.parameters] == [True] * COUNT
            gradient = heads.parameters[2].grad
            assert gradient is not None
            assert gradient.tolist() == [0.0 if step == 3 else 1.5] * 2

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("when", ["learning", "later"])
def test_a_penalty_on_gradients_that_has_its_own_backward(when: str, as_view: bool) -> None:
    """What `create_graph=True` computes leads to parameters past the outputs."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, find_unused_parameters=True, gradient_as_bucket_view=as_view)
        if when == "later":
            heads.learn()
        for _ in range(3):
            heads.zero_grad()
            heads.reducer.prepare_for_backward()
            features = heads.parameters[1] * (group.rank + 1.0)
            output = (features * heads.parameters[2]).sum() + heads.compute([5, 4, 3, 0])
            heads.reducer.watch([output, features])
            (slope,) = torch.autograd.grad(output, features, create_graph=True)
            (slope * (group.rank + 1.0)).sum().backward()
            found = [None if parameter.grad is None else parameter.grad.tolist() for parameter in heads.parameters]
            assert found == [None, None, [1.5] * 2, None, None, None]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_second_backward_that_reaches_less(as_view: bool) -> None:
    """What gradients there are from the first is no proof."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, gradient_as_bucket_view=as_view)
        heads.learn()
        heads.reducer.prepare_for_backward()
        outputs = [heads.compute(range(COUNT)), heads.compute([5, 4, 3, 1, 0])]
        heads.reducer.watch(outputs)
        outputs[0].backward()  # type: ignore[no-untyped-call]
        heads.check(ALL)
        with pytest.raises(MisuseError, match="no gradient in it: 'p2'"):
            outputs[1].backward()  # type: ignore[no-untyped-call]

    run_ranks(2, body)


# ---- what goes wrong on the way ----


class Fails(torch.autograd.Function):
    """As a loss that checks its gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]  # torch's is less precise
        raise ArithmeticError("not a number")


def test_a_backward_that_fails_before_its_first_gradient(graph_options: dict[str, bool]) -> None:
    """Nothing has begun, and the next step goes on."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, **graph_options)
        heads.learn()
        heads.reducer.prepare_for_backward()
        inner = Fails.apply(heads.compute(range(COUNT)))  # type: ignore[no-untyped-call]
        total = inner * 1
        heads.reducer.watch([total])
        with pytest.raises(ArithmeticError, match="not a number"):
            total.backward()
        heads.reducer.check_finalized()
        heads.learn()

    run_ranks(2, body)


def test_a_missing_gradient_is_named_though_users_have_hooks() -> None:
    def body(group: ProcessGroup) -> None:
        heads = Heads(group)
        for parameter in heads.parameters:
            parameter.register_post_accumulate_grad_hook(lambda _: None)  # type: ignore[no-untyped-call]
        heads.learn()
        with pytest.raises(MisuseError, match="no gradient in it: 'p2'"):
            heads.forward([5, 4, 3, 1, 0]).backward()  # type: ignore[no-untyped-call]

    run_ranks(2, body)


# ---- what stays behind ----


def test_a_loss_that_is_kept_keeps_neither_reducer_nor_buckets(graph_options: dict[str, bool]) -> None:
    def body(group: ProcessGroup) -> None:
        heads = Heads(group, **graph_options)
        heads.learn()
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


def test_a_tensor_that_every_forward_returns_is_hooked_once() -> None:
    passed: list[int] = []

    class Counted(OutputWatch):
        def __init__(self, number: int) -> None:
            super().__init__(lambda: None)
            self._number = number

        def _pass(self, *_: object) -> None:
            passed.append(self._number)
            super()._pass()

    watch, other = Counted(1), Counted(2)
    output = torch.ones(2, requires_grad=True) * 2
    for _ in range(5):
        for each in (watch, other):
            each.expect()
            each.watch([output])
    output.sum().backward(retain_graph=True)
    assert sorted(passed) == [1, 2]
    assert not watch.is_blind
    del other, each
    output.sum().backward()
    assert sorted(passed) == [1, 1, 2]


def test_parameters_may_be_swapped_while_they_are_averaged() -> None:
    """As `load_state_dict` does when `torch.__future__` says so; it refuses tensors that are referenced weakly."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group)
        torch.utils.swap_tensors(heads.parameters[2], torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)))
        assert heads.parameters[2].tolist() == [0.0, 0.0]

    run_ranks(1, body)


# ---- claims ----


def test_claims_on_the_same_parameters() -> None:
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(4)]
    first, second, apart = Claim(parameters[:2]), Claim(parameters[1:3]), Claim(parameters[3:])
    assert [claim.is_shared for claim in (first, second, apart)] == [True, True, False]
    second.give_up()
    assert not first.is_shared
    third = Claim(parameters[:1])
    assert first.is_shared
    del third
    assert not first.is_shared


@pytest.mark.parametrize("views", [(True, False), (False, True), (True, True)])
def test_two_reducers_of_one_memory(views: tuple[bool, bool]) -> None:
    """One would read what the other is about to average: that is refused, until the other is gone."""

    def body(group: ProcessGroup) -> None:
        heads = Heads(group, gradient_as_bucket_view=views[0])
        heads.learn()
        names = [f"p{index}" for index in ALL]
        other = Reducer(list(zip(names, heads.parameters, strict=True)), group, gradient_as_bucket_view=views[1])
        for reducer in (heads.reducer, other):
            with pytest.raises(MisuseError, match="another reducer averages some of the same parameters"):
                reducer.prepare_for_backward()
        other.close()
        heads.learn()

    run_ranks(2, body)


def test_a_reducer_that_is_only_garbage_disturbs_nobody() -> None:
    def body(group: ProcessGroup) -> None:
        heads = Heads(group, gradient_as_bucket_view=True)
        circle: list[Any] = [Reducer([("p2", heads.parameters[2])], group, gradient_as_bucket_view=True)]
        circle.append(circle)
        del circle
        heads.learn()

    gc.disable()
    try:
        run_ranks(2, body)
    finally:
        gc.enable()


def test_a_claim_is_given_up_while_another_is_made() -> None:
    """The garbage collector may do so on the thread that makes it, or on another one."""
    claim = Claim([torch.nn.Parameter(torch.ones(1))])
    with claims._lock:
        claim.give_up()
        thread = threading.Thread(target=claim.give_up)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
