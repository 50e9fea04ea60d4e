"""Gradients that show that they are new; see Note [Gradients that are new]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from syncline.collectives import ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.reducer import Reducer
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
    # Where delivered gradients are views, others may be written to.
    assert newness.shows(found, views if as_view else None) == (kind == "new" or (kind == "written to" and as_view))


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


def expected(factor: float) -> list[float]:
    return [factor * (index + 1) for index in range(COUNT)]


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize(
    ("options", "numel", "read"),
    [
        pytest.param({}, 2, 0, id="dynamic"),
        pytest.param({"static_graph": True}, 2, 0, id="static"),
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
        assert reads[2:] == [0 if as_view and numel > 2 else read] * 3

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

        def double(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad.mul_(2)

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
        assert loop.step() == 0
        loop.clear()
        loop.step(2.0, synchronizes=False)
        assert loop.step(3.0) > 0
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
