"""Gradients that show that they are new; see Note [Gradients that are new]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from syncline.collectives import MisuseError, ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.reducer import GradBucket, Reducer
from syncline.reducer.newness import Newness

VIEWS = [pytest.param(False, id="copied"), pytest.param(True, id="as-view")]
COUNT = 4


def gradients() -> list[torch.Tensor | None]:
    """As autograd hands them over: one was written to before, say where several uses of a parameter were added up."""
    found: list[torch.Tensor | None] = [torch.zeros(2) for _ in range(COUNT)]
    assert found[1] is not None
    found[1].add_(1)
    return found


def changed(kind: str, views: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    found = gradients()
    one = found[2]
    assert one is not None
    if kind == "none":
        found[2] = None
    elif kind == "written to":
        one.add_(1)
    elif kind == "dtype":
        found[2] = one.double()
    elif kind == "differentiable":
        one.requires_grad_()
    elif kind == "view":
        found[2] = views[2]
    return found


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("kind", ["new", "none", "written to", "dtype", "differentiable", "view"])
def test_what_looks_new(kind: str, as_view: bool) -> None:
    views = list(torch.zeros(2 * COUNT).split(2))
    newness = Newness(torch.float32)
    assert newness.learn(gradients(), views if as_view else None)
    found = changed(kind, views)
    if kind == "view" and not as_view:
        views[2].add_(1)  # written to, as delivered ones are
    # Where delivered gradients are views, others may be written to, and another dtype is seen to where they become views.
    assert newness.shows(found, views if as_view else None) == (kind == "new" or (kind in ("written to", "dtype") and as_view))


@pytest.mark.parametrize("as_view", VIEWS)
def test_one_of_them(as_view: bool) -> None:
    views = list(torch.zeros(2 * COUNT).split(2))
    delivered = views if as_view else None
    newness = Newness(torch.float32)
    assert newness.learn(gradients(), delivered)
    assert newness.shows_one(0, torch.zeros(2), delivered)
    assert not newness.shows_one(0, None, delivered)
    assert not newness.shows_one(0, views[0].add_(1), delivered)


@pytest.mark.parametrize("as_view", VIEWS)
def test_nothing_is_learnt_from_gradients_that_are_not_there(as_view: bool) -> None:
    views = list(torch.zeros(2 * COUNT).split(2)) if as_view else None
    newness = Newness(torch.float32)
    assert not newness.learn([None, *gradients()[1:]], views)
    assert newness.learn(gradients(), views)


# ---- in a reducer ----


class Watched(torch.nn.Parameter):
    """Counts how often its gradient is read."""

    reads = 0

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        Watched.reads += 1
        return torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]


def make_parameters(numel: int = 2) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"p{i}", Watched(torch.ones(numel))) for i in range(COUNT)]


class Loop:
    """Trains parameters whose gradients are `factor * (index + 1)` on every rank."""

    def __init__(self, group: ProcessGroup, *, as_view: bool, numel: int = 2, **options: Any) -> None:
        self.parameters = make_parameters(numel)
        self.reducer = Reducer(self.parameters, group, gradient_as_bucket_view=as_view, **options)

    def clear(self) -> None:
        for _, parameter in self.parameters:
            parameter.grad = None

    def step(self, factor: float = 1.0, *, synchronizes: bool = True) -> int:
        """Forward and backward; returns how many gradients forward has read."""
        before = Watched.reads
        self.reducer.prepare_for_backward(synchronizes=synchronizes)
        read = Watched.reads - before
        total = torch.stack(
            [parameter.sum() * factor * (index + 1) for index, (_, parameter) in enumerate(self.parameters)]
        ).sum()
        self.reducer.watch([total])
        total.backward()  # type: ignore[no-untyped-call]
        return read

    def found(self) -> list[float]:
        return [float(parameter.grad[0]) for _, parameter in self.parameters if parameter.grad is not None]

    def learn(self) -> None:
        for _ in range(4):
            self.clear()
            self.step()
        self.clear()


def double(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def expected(factor: float) -> list[float]:
    return [factor * (index + 1) for index in range(COUNT)]


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize(
    ("options", "numel", "read"),
    [
        pytest.param({}, 2, 1, id="dynamic"),
        pytest.param({"static_graph": True}, 2, 1, id="static"),
        pytest.param({"find_unused_parameters": True}, 2, COUNT, id="find-unused"),
        pytest.param({}, 1 << 17, COUNT, id="lent"),
    ],
)
def test_forward_does_not_look_at_gradients_that_show_it(
    as_view: bool, options: dict[str, bool], numel: int, read: int
) -> None:
    def body(group: ProcessGroup) -> None:
        loop = Loop(group, as_view=as_view, numel=numel, **options)
        reads = []
        for _ in range(5):
            loop.clear()
            reads.append(loop.step())
            assert loop.found() == expected(1.0)
        assert reads[1] >= COUNT, "it has to be proven once"
        one_each = len(loop.reducer.buckets)
        assert reads[2:] == [COUNT if read == COUNT and not (as_view and numel > 2) else one_each] * 3

    run_ranks(1, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("kept", [range(COUNT), [0], [3]], ids=["all", "the-last", "the-first"])
@pytest.mark.parametrize("how", ["kept", "zeroed", "replaced"])
def test_gradients_that_are_there_already(as_view: bool, kept: Sequence[int], how: str) -> None:
    """They are added to, whatever they look like."""

    def body(group: ProcessGroup) -> None:
        loop = Loop(group, as_view=as_view)
        loop.learn()
        loop.step(2.0)
        base = loop.found()
        for factor in (3.0, 5.0, 7.0):
            for index, (_, parameter) in enumerate(loop.parameters):
                if index not in kept:
                    parameter.grad, base[index] = None, 0.0
                elif how == "zeroed":
                    assert parameter.grad is not None
                    parameter.grad.zero_()
                    base[index] = 0.0
                elif how == "replaced":
                    assert parameter.grad is not None
                    parameter.grad = parameter.grad / 2
                    base[index] /= 2
            loop.step(factor)
            base = [value + factor * (index + 1) for index, value in enumerate(base)]
            assert loop.found() == base

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("index", range(COUNT))
def test_a_users_hook_that_begins_to_change_gradients(as_view: bool, index: int) -> None:
    def body(group: ProcessGroup) -> None:
        loop = Loop(group, as_view=as_view)
        loop.learn()
        handle = loop.parameters[index][1].register_post_accumulate_grad_hook(double)  # type: ignore[no-untyped-call]
        wanted = expected(1.0)
        wanted[index] *= 2
        for _ in range(3):
            loop.step()
            assert loop.found() == wanted
            loop.clear()
        handle.remove()
        for _ in range(2):
            loop.step()
            assert loop.found() == expected(1.0)
            loop.clear()

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_backwards_that_are_not_synchronised_leave_new_gradients(as_view: bool) -> None:
    """So forward looks again, and sees them."""

    def body(group: ProcessGroup) -> None:
        loop = Loop(group, as_view=as_view)
        loop.learn()
        assert loop.step() == 1
        loop.clear()
        loop.step(2.0, synchronizes=False)
        loop.clear()
        assert loop.step(3.0) == COUNT
        loop.clear()
        loop.step(2.0, synchronizes=False)
        loop.step(3.0)
        assert loop.found() == expected(5.0)

    run_ranks(1, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_second_backward_through_one_graph(as_view: bool) -> None:
    def body(group: ProcessGroup) -> None:
        loop = Loop(group, as_view=as_view)
        loop.learn()
        loop.reducer.prepare_for_backward()
        total = torch.stack([parameter.sum() * (index + 1) for index, (_, parameter) in enumerate(loop.parameters)]).sum()
        loop.reducer.watch([total])
        for times in (1.0, 2.0, 3.0):
            total.backward(retain_graph=True)  # type: ignore[no-untyped-call]
            assert loop.found() == expected(times)
        loop.clear()
        loop.step()
        assert loop.found() == expected(1.0)

    run_ranks(2, body)


KEEP = {
    "kept": lambda gradient: gradient,
    "zeroed": lambda gradient: gradient.zero_(),
    "replaced": lambda gradient: gradient / 2,
    "detached": lambda gradient: gradient.detach(),
}


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("how", sorted(KEEP))
@pytest.mark.parametrize("only_from", [None, 0, 1, 2, 3], ids=lambda step: "all" if step is None else f"one-from-{step}")
def test_one_that_is_missing_is_named_also_where_gradients_are_kept_from_now_on(
    as_view: bool, static: bool, how: str, only_from: int | None
) -> None:
    """Of all parameters; or of that one only, wherever forward looks just then, unless it was replaced by hand."""
    if only_from is not None and how not in ("kept", "zeroed"):
        pytest.skip("counts as come; see README")

    def body(group: ProcessGroup) -> None:
        loop = Loop(group, as_view=as_view, static_graph=static)
        loop.learn()
        for _ in range(1 + (only_from or 0)):
            loop.clear()
            loop.step()
        for index, (_, parameter) in enumerate(loop.parameters):
            if only_from is None or index == 1:
                parameter.grad = KEEP[how](parameter.grad)  # type: ignore[no-untyped-call]
            else:
                parameter.grad = None
        loop.reducer.prepare_for_backward()
        total = torch.stack([parameter.sum() for index, (_, parameter) in enumerate(loop.parameters) if index != 1]).sum()
        loop.reducer.watch([total])
        with pytest.raises(MisuseError, match="got no gradient in it: 'p1'"):
            total.backward()  # type: ignore[no-untyped-call]

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("how", sorted(KEEP))
def test_gradients_that_are_kept_from_now_on_may_come_in_another_order(as_view: bool, how: str) -> None:
    def body(group: ProcessGroup) -> None:
        loop = Loop(group, as_view=as_view)
        loop.learn()
        loop.step(4.0)
        for _, parameter in loop.parameters:
            parameter.grad = KEEP[how](parameter.grad)  # type: ignore[no-untyped-call]
        base = loop.found()
        loop.reducer.prepare_for_backward()
        total = torch.zeros(())
        for _, parameter in loop.parameters:  # the first one's gradient comes last
            total = total + parameter.sum()
        loop.reducer.watch([total])
        total.backward()  # type: ignore[no-untyped-call]
        assert loop.found() == [value + 1 for value in base]

    run_ranks(2, body)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("change", ["zero_", "none", "replace"])
def test_a_communication_hook_may_change_what_was_collected(static: bool, change: str) -> None:
    """It is written back to in the end."""

    def body(group: ProcessGroup) -> None:
        loop = Loop(group, as_view=False, static_graph=static)

        def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            for parameter in bucket.parameters():
                if change == "zero_":
                    assert parameter.grad is not None
                    parameter.grad.zero_()
                else:
                    parameter.grad = None if change == "none" else torch.zeros_like(parameter)
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future

        loop.reducer.set_hook(hook)
        loop.learn()
        for _ in range(2):
            loop.step(2.0)
            assert loop.found() == expected(2.0)
            loop.clear()

    run_ranks(2, body)


@pytest.mark.parametrize("as_view", VIEWS)
def test_one_backward_in_which_a_users_hook_changes_gradients_costs_only_that(as_view: bool) -> None:
    """Afterwards it is looked for gradients in forward, and not at each gradient in backward."""

    def body(group: ProcessGroup) -> None:
        loop = Loop(group, as_view=as_view)
        loop.learn()
        handles = [
            parameter.register_post_accumulate_grad_hook(double)  # type: ignore[no-untyped-call]
            for _, parameter in loop.parameters
        ]
        loop.step()
        assert loop.found() == expected(2.0)
        for handle in handles:
            handle.remove()
        reads = []
        for _ in range(3):
            loop.clear()
            reads.append(loop.step())
            assert loop.found() == expected(1.0)
        assert reads == ([1] * 3 if as_view else [COUNT] * 3), "0 if each gradient is noted"

    run_ranks(1, body)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize("takes_any", [False, True])
def test_a_gradient_of_another_dtype_is_named(as_view: bool, index: int, takes_any: bool) -> None:
    """Of a parameter that keeps its dtype: it asks for another one of its gradient, or takes any, which a hook makes use of."""

    def body(group: ProcessGroup) -> None:
        loop = Loop(group, as_view=as_view)
        parameter = loop.parameters[index][1]
        if takes_any:
            parameter.grad_dtype = None
        loop.learn()

        def widen(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.double()

        if takes_any:
            parameter.register_post_accumulate_grad_hook(widen)  # type: ignore[no-untyped-call]
        else:
            parameter.grad_dtype = torch.float64
        with pytest.raises(MisuseError, match=f"expected a gradient of torch.float32 for parameter 'p{index}'"):
            loop.step()

    run_ranks(1, body)
