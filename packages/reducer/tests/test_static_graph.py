"""Graphs that never change: re-entrant checkpoints, parameters used several times, parameters never used."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from syncline.collectives import MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.reducer import Reducer, StaticUsage
from test_support.training_runs import VIEWS

pytestmark = pytest.mark.ranks

STEPS = 4


class Blocks(torch.nn.Module):
    """Re-entrant checkpoints: two of one block (so that its parameters get several gradients), one nested, one at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.inner, self.outer, self.last, self.unused = (torch.nn.Linear(3, 3) for _ in range(5))

    def nested(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(checkpoint(self.inner, hidden, use_reentrant=True))
        return self.outer(hidden)  # type: ignore[no-any-return]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            hidden = torch.tanh(checkpoint(self.shared, hidden, use_reentrant=True))
        hidden = checkpoint(self.nested, hidden, use_reentrant=True)
        return checkpoint(self.last, hidden, use_reentrant=True)  # type: ignore[no-any-return]


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 3, generator=generator, dtype=torch.float64).requires_grad_()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def train(
    model: torch.nn.Module, batch_of: Callable[[int], torch.Tensor], prepare: Callable[[], None] = lambda: None
) -> list[dict[str, torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        prepare()
        model(batch_of(step)).square().mean().backward()
        history.append(gradients(model))
        optimizer.step()
    return history


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("cap", [0, 1 << 20])
def test_training_equals_local_training_on_the_whole_batch(world_size: int, as_view: bool, cap: int) -> None:
    torch.manual_seed(3)
    initial = Blocks().double()

    def body(group: ProcessGroup) -> list[dict[str, torch.Tensor]]:
        model = copy.deepcopy(initial)
        reducer = Reducer(
            list(model.named_parameters()), group, bucket_cap_bytes=cap, gradient_as_bucket_view=as_view, static_graph=True
        )
        history = train(model, lambda step: batch(group.rank, step), reducer.prepare_for_backward)
        # From the second backward on, buckets do not wait for the end.
        if cap == 0:
            assert reducer.statistics.buckets[0].started < reducer.statistics.last_gradient
        return history

    whole = train(
        copy.deepcopy(initial),
        lambda step: torch.cat([batch(rank, step).detach() for rank in range(world_size)]).requires_grad_(),
    )
    for history in run_ranks(world_size, body):
        assert [set(step) for step in history] == [set(step) for step in whole]
        assert "shared.weight" in history[0]
        assert "unused.weight" not in history[0]
        torch.testing.assert_close(history, whole, rtol=1e-10, atol=1e-14)


def test_a_parameter_that_only_another_rank_uses() -> None:
    def body(group: ProcessGroup) -> None:
        ours, theirs, nobodys = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
        reducer = Reducer([("ours", ours), ("theirs", theirs), ("nobodys", nobodys)], group, static_graph=True)
        for step in range(3):
            ours.grad = theirs.grad = None
            reducer.prepare_for_backward()
            loss = (ours * (step + 1)).sum()
            (loss + (theirs * 4 * (step + 1)).sum() if group.rank == 1 else loss).backward()
            assert ours.grad is not None
            assert ours.grad.tolist() == [step + 1.0] * 2
            assert theirs.grad is not None
            assert theirs.grad.tolist() == [2.0 * (step + 1)] * 2
            assert nobodys.grad is None

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("first", "then", "complaint"),
    [
        pytest.param((1, 1), (1, 0), "got no gradient in it: 'b'. The graph is not static", id="fewer"),
        pytest.param((1, 0), (1, 1), "'b' became ready twice.*graph is not static", id="one that was unused"),
        pytest.param((2, 1), (1, 1), "got no gradient in it: 'a'. The graph is not static", id="used less often"),
        pytest.param((1, 1), (2, 1), "'a' became ready twice.*The graph is not static", id="used more often"),
    ],
)
def test_a_graph_that_was_not_static_after_all(first: tuple[int, int], then: tuple[int, int], complaint: str) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = [("a", torch.nn.Parameter(torch.ones(2))), ("b", torch.nn.Parameter(torch.ones(2)))]
        reducer = Reducer(parameters, group, static_graph=True)

        def backward(uses: tuple[int, int]) -> None:
            reducer.prepare_for_backward()
            hidden = torch.ones(2, requires_grad=True)
            total = torch.zeros(())
            for (_, parameter), times in zip(parameters, uses, strict=True):
                for _ in range(times):
                    total = total + checkpoint(lambda x, p=parameter: (x * p).sum(), hidden, use_reentrant=True)
            total.backward()

        backward(first)
        with pytest.raises(MisuseError, match=complaint):
            backward(then)

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_what_only_an_unsynchronised_backward_uses_is_refused_in_it(as_view: bool) -> None:
    """No later backward would reduce it, and replicas would drift apart."""

    def body(group: ProcessGroup) -> None:
        parameters = [("a", torch.nn.Parameter(torch.ones(2))), ("b", torch.nn.Parameter(torch.ones(2)))]
        (_, a), (_, b) = parameters
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view, static_graph=True)
        reducer.prepare_for_backward()
        a.sum().backward()
        reducer.prepare_for_backward(synchronizes=False)
        with pytest.raises(MisuseError, match=r"'b' on rank .*had none in the first backward.*find_unused_parameters=True"):
            (a.sum() + (b * (group.rank + 1)).sum()).backward()

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_what_was_used_only_before_the_first_reduction_is_reduced_once(as_view: bool) -> None:
    """Afterwards it has no gradient, not zeros, on which weight decay and momentum would act."""

    def body(group: ProcessGroup) -> None:
        a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        reducer = Reducer([("a", a), ("b", b)], group, gradient_as_bucket_view=as_view, static_graph=True)
        if group.rank == 1:
            reducer.prepare_for_backward(synchronizes=False)
            (b * 6).sum().backward()
        for step in range(3):
            reducer.prepare_for_backward()
            (a * (group.rank + step)).sum().backward()
            assert a.grad is not None
            assert a.grad.tolist() == [step + 0.5] * 2
            if step == 0:
                assert b.grad is not None
                assert b.grad.tolist() == [3.0, 3.0]
            else:
                assert b.grad is None
            a.grad = b.grad = None

    run_ranks(2, body)


def test_unsynchronised_backwards_may_use_less_than_the_first() -> None:
    def body(group: ProcessGroup) -> None:
        a, b = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        reducer = Reducer([("a", a), ("b", b)], group, static_graph=True)
        for step in range(3):
            a.grad = b.grad = None
            reducer.prepare_for_backward(synchronizes=False)
            (a * (group.rank + step)).sum().backward()
            reducer.prepare_for_backward()
            ((a + 2 * b) * (group.rank + 10)).sum().backward()
            assert a.grad is not None
            assert b.grad is not None
            assert a.grad.tolist() == [step + 0.5 + 10.5] * 2
            assert b.grad.tolist() == [21.0] * 2

    run_ranks(2, body)


def test_a_block_that_is_checkpointed_re_entrantly_once_needs_no_static_graph() -> None:
    """The first gradient arrives in the inner backward, whose end is not the end; see Note [The outermost backward]."""

    initial = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def body(group: ProcessGroup) -> None:
        model = copy.deepcopy(initial)
        first, last = model
        reducer = Reducer(list(model.named_parameters()), group)
        for step in range(2):
            model.zero_grad()
            reducer.prepare_for_backward()
            hidden = first(torch.full((1, 2), group.rank + step + 1.0))
            checkpoint(last, hidden, use_reentrant=True).sum().backward()
            assert last.bias.grad is not None
            assert last.bias.grad.tolist() == [1.0, 1.0]
            alone = copy.deepcopy(model)
            alone.zero_grad()
            alone(torch.full((1, 2), step + 1.5)).sum().backward()
            torch.testing.assert_close(gradients(model), gradients(alone))

    run_ranks(2, body)


def test_the_first_backward_teaches_counts_that_the_others_are_held_to() -> None:
    """Without ranks."""

    class Alone:
        device_types = frozenset({"cpu"})

    usage = StaticUsage([torch.nn.Parameter(torch.ones(1))] * 3, Alone())  # type: ignore[arg-type]  # it is not used here
    assert list(usage.begin()) == []
    assert usage.needed([0, 1]) is None
    assert [list(usage.arrived([index], ())) for index in (0, 2, 0)] == [[], [], []]
    assert list(usage.ended()) == [0, 1, 2]
    usage.reset()
    assert list(usage.begin()) == [1]
    assert (usage.needed([0, 1]), usage.needed([2])) == (2, 1)
    assert [list(usage.arrived(indices, ())) for indices in ([0, 2], [0])] == [[2], [0]]
    assert list(usage.ended()) == []
    assert usage.locally_unused([0, 1]) == {1}


class UndefinedUntil(torch.autograd.Function):
    """The identity; its gradient is None as long as told so."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, is_undefined: list[bool]) -> torch.Tensor:
        ctx.is_undefined = is_undefined
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        return (None if ctx.is_undefined[0] else gradient), None


def test_a_gradient_that_was_undefined_in_the_first_backward_is_refused_by_name() -> None:
    def body(group: ProcessGroup) -> None:
        a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
        reducer = Reducer([("a", a), ("b", b)], group, static_graph=True)
        is_undefined = [True]

        def backward() -> None:
            a.grad = None
            reducer.prepare_for_backward()
            (a.sum() * (group.rank + 1) + UndefinedUntil.apply(b, is_undefined).sum()).backward()  # type: ignore[no-untyped-call]

        for _ in range(3):
            backward()
            assert a.grad is not None
            assert a.grad.tolist() == [1.5, 1.5]
            assert b.grad is None
        is_undefined[0] = False
        with pytest.raises(MisuseError, match=r"gradient of parameter 'b'.*had none in the first backward"):
            backward()

    run_ranks(2, body)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_gradient_that_is_undefined_on_one_rank_only_is_averaged_in_every_step(set_to_none: bool) -> None:
    def body(group: ProcessGroup) -> None:
        a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
        reducer = Reducer([("a", a), ("b", b)], group, static_graph=True)
        for _ in range(4):
            reducer.prepare_for_backward()
            (a.sum() + UndefinedUntil.apply(b, [group.rank == 0]).sum()).backward()  # type: ignore[no-untyped-call]
            assert a.grad is not None
            assert b.grad is not None
            assert (a.grad.tolist(), b.grad.tolist()) == ([1.0, 1.0], [0.5, 0.5])
            for parameter in (a, b):
                if set_to_none:
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("delayed", [(), ("b",)])
def test_a_gradient_that_is_undefined_on_one_rank_only_may_come_without_synchronisation(
    delayed: tuple[str, ...], as_view: bool
) -> None:
    """Rank 0's gradient of b is undefined in the first backward, and has a value later."""

    def body(group: ProcessGroup) -> None:
        a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
        reducer = Reducer([("a", a), ("b", b)], group, static_graph=True, delayed=delayed, gradient_as_bucket_view=as_view)
        is_undefined = [group.rank == 0]
        for step, synchronizes in enumerate((True, False, True, False, True)):
            reducer.prepare_for_backward(synchronizes=synchronizes)
            (a.sum() + UndefinedUntil.apply(b, is_undefined).sum()).backward()  # type: ignore[no-untyped-call]
            is_undefined[0] = False
            if synchronizes:
                assert b.grad is not None
                assert b.grad.tolist() == [step + 0.5] * 2

    run_ranks(2, body)


def test_a_gradient_that_is_always_undefined_may_be_so_without_synchronisation_too() -> None:
    def body(group: ProcessGroup) -> None:
        a, b = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
        reducer = Reducer([("a", a), ("b", b)], group, static_graph=True)
        for synchronizes in (True, False, True):
            reducer.prepare_for_backward(synchronizes=synchronizes)
            (a.sum() + UndefinedUntil.apply(b, [True]).sum()).backward()  # type: ignore[no-untyped-call]
            assert b.grad is None

    run_ranks(2, body)


def test_no_rank_may_shadow_the_backward_from_which_the_graph_is_learnt() -> None:
    def body(group: ProcessGroup) -> None:
        reducer = Reducer([("a", torch.nn.Parameter(torch.ones(2)))], group, static_graph=True)
        with pytest.raises(MisuseError, match="every rank must have gradients in the first backward"):
            reducer.shadow_backward()

    run_ranks(2, body)
