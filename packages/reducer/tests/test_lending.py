"""Gradients that lie in a bucket's memory; see Note [Lent gradients]."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline.collectives import ProcessGroup
from syncline.collectives.testing import run_ranks
from syncline.reducer import Reducer, lending
from syncline.reducer.bucket import Bucket

LARGE = lending.LEAST_LENT_BYTES // 4
SIZES = [3, LARGE, 5, LARGE + 1]
WEIGHTS = [1.0, 2.0, 3.0, 4.0]

ranks = pytest.mark.ranks


def parameters_of(sizes: list[int]) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"p{index}", torch.nn.Parameter(torch.ones(size))) for index, size in enumerate(sizes)]


class Loop:
    """A rank that trains: the gradient of parameter i in step s is `WEIGHTS[i] * (s + rank)`, everywhere."""

    def __init__(self, group: ProcessGroup, sizes: list[int] = SIZES, **options: Any) -> None:
        self.group = group
        self.named = parameters_of(sizes)
        self.parameters = [parameter for _, parameter in self.named]
        self.reducer = Reducer(self.named, group, **options)

    def backward(self, step: int, used: Callable[[int], bool] = lambda _: True) -> None:
        self.reducer.prepare_for_backward()
        terms = [
            (parameter * (WEIGHTS[index] * (step + self.group.rank))).sum()
            for index, parameter in enumerate(self.parameters)
            if used(index)
        ]
        loss = torch.stack(terms).sum()
        self.reducer.watch([loss])
        loss.backward()

    def step(self, step: int) -> None:
        """As in training: what was there is gone before."""
        for parameter in self.parameters:
            parameter.grad = None
        self.backward(step)

    def expected(self, index: int, step: int) -> float:
        return WEIGHTS[index] * (step + (self.group.size - 1) / 2)

    def assert_averaged(self, step: int) -> None:
        for index, parameter in enumerate(self.parameters):
            assert parameter.grad is not None
            assert parameter.grad.eq(self.expected(index, step)).all(), (index, step)

    @property
    def bucket(self) -> Bucket:
        (bucket,) = self.reducer.buckets
        assert isinstance(bucket, Bucket)
        return bucket

    def lent(self) -> list[int]:
        """The parameters whose gradients lie in the bucket."""
        start, stop = self.bucket.buffer.data_ptr(), self.bucket.buffer.data_ptr() + self.bucket.buffer.nbytes
        return [
            index
            for index, parameter in enumerate(self.parameters)
            if parameter.grad is not None and start <= parameter.grad.data_ptr() < stop
        ]


@ranks
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_large_gradients_are_not_copied_back(options: dict[str, bool]) -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group, **options)
        for step in range(5):
            loop.step(step)
            loop.assert_averaged(step)
            assert loop.lent() == [1, 3]

    run_ranks(2, run)


@ranks
def test_a_lent_gradient_looks_like_any_other() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.step(0)
        gradient = loop.parameters[1].grad
        assert gradient is not None
        assert type(gradient) is torch.Tensor
        assert not gradient._is_view()
        assert not gradient.requires_grad
        assert gradient.untyped_storage().nbytes() == gradient.nbytes
        gradient.detach_()
        other = loop.parameters[3].grad
        assert other is not None
        before = other._version
        gradient.mul_(2)
        assert other._version == before

    run_ranks(2, run)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_lent_gradient_has_the_parameters_strides(layout: torch.memory_format) -> None:
    def run(group: ProcessGroup) -> None:
        parameter = torch.nn.Parameter(torch.ones(64, 8, 16, 32).to(memory_format=layout))
        reducer = Reducer([("p", parameter)], group)
        reducer.prepare_for_backward()
        (parameter * 2).sum().backward()
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride()
        assert parameter.grad.data_ptr() == reducer.buckets[0].buffer.data_ptr()

    run_ranks(1, run)


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the gradient": lambda gradient: gradient,
    "a view": lambda gradient: gradient.view(-1)[:7],
    "an array": lambda gradient: gradient.numpy(),
    "a graph": lambda gradient: (torch.ones(1, requires_grad=True) * gradient).sum(),
    "its memory": lambda gradient: gradient.untyped_storage(),
}


def first(held: Any) -> float:
    """The first element of what somebody holds."""
    if isinstance(held, torch.UntypedStorage):
        return float(torch.empty(0).set_(held)[0])
    if isinstance(held, torch.Tensor) and held.grad_fn is not None:
        leaf = held.grad_fn.next_functions[0][0].next_functions[0][0].variable  # type: ignore[union-attr]
        (gradient,) = torch.autograd.grad(held, [leaf], retain_graph=True)
        return float(gradient) / LARGE
    return float(held[0])


@ranks
@pytest.mark.parametrize("holder", [name for name in HOLDERS if name != "a graph"])
def test_who_holds_a_gradient_in_backward_sees_the_average(holder: str) -> None:
    """As if it was copied back, which it is."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        held: list[Any] = []
        parameter = loop.parameters[1]
        parameter.register_post_accumulate_grad_hook(lambda parameter: held.append(HOLDERS[holder](parameter.grad)))
        for step in range(4):
            held.clear()
            loop.step(step)
            loop.assert_averaged(step)
            assert loop.lent() == [3]
            assert first(held[0]) == loop.expected(1, step)
            if holder == "the gradient":
                assert held[0] is parameter.grad

    run_ranks(2, run)


@ranks
def test_gradients_that_are_kept_get_memory_of_their_own() -> None:
    """They are the same objects all the time, and lent again only after a while."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.step(0)
        kept = [parameter.grad for parameter in loop.parameters]
        assert loop.lent() == [1, 3]
        for step in range(1, 2 * lending.FIRST_PAUSE):
            for parameter in loop.parameters:
                assert parameter.grad is not None
                parameter.grad.zero_()
            loop.backward(step)
            loop.assert_averaged(step)
            assert all(parameter.grad is gradient for parameter, gradient in zip(loop.parameters, kept, strict=True))
            assert loop.lent() == []
        loop.step(0)
        assert loop.lent() == [1, 3]

    run_ranks(2, run)


@ranks
def test_gradients_add_up() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.step(1)
        loop.backward(1)
        for index, parameter in enumerate(loop.parameters):
            # What was averaged is the same on both ranks, and each adds its own to it.
            assert parameter.grad is not None
            assert parameter.grad.eq(2 * loop.expected(index, 1)).all()

    run_ranks(2, run)


@ranks
def test_a_list_of_gradients_keeps_what_it_holds() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        history = []
        for step in range(2 * lending.FIRST_PAUSE + 4):
            loop.step(step)
            loop.assert_averaged(step)
            history.append([parameter.grad for parameter in loop.parameters])
            assert loop.bucket.buffer.data_ptr() == loop.bucket._own_memory[0].data_ptr()
        for step, gradients in enumerate(history):
            for index, gradient in enumerate(gradients):
                assert gradient is not None
                assert gradient.eq(loop.expected(index, step)).all()

    run_ranks(2, run)


@ranks
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_cannot_be_moved_stays(holder: str) -> None:
    """On one rank: the other does what it does always."""
    can_be_moved = holder in ("the gradient", "a graph")

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.step(0)
        loop.step(1)  # with the buckets that will stay
        own = loop.bucket.buffer.data_ptr()
        held = HOLDERS[holder](loop.parameters[1].grad) if group.rank == 1 else None
        for step in range(2, 6):
            loop.step(step)
            loop.assert_averaged(step)
            assert (loop.bucket.buffer.data_ptr() == own) == (held is None or can_be_moved)
            assert held is None or first(held) == loop.expected(1, 1)
        del held
        for step in range(6, 8 + lending.FIRST_PAUSE):
            loop.step(step)
            loop.assert_averaged(step)
            assert loop.bucket.buffer.data_ptr() == own
        assert loop.lent() == [1, 3]

    run_ranks(2, run)


@ranks
def test_who_sits_out_keeps_gradients() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.step(1)
        loop.step(2)
        kept = [parameter.grad for parameter in loop.parameters]
        if group.rank == 1:
            loop.reducer.sit_out()
            loop.assert_averaged(2)
            assert all(parameter.grad is gradient for parameter, gradient in zip(loop.parameters, kept, strict=True))
        else:
            loop.step(3)

    run_ranks(2, run)


@ranks
def test_gradients_of_unused_parameters_stay() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group, find_unused_parameters=True)
        loop.step(1)
        loop.step(2)
        for index in (0, 2, 3):
            loop.parameters[index].grad = None
        loop.backward(3, lambda index: index != 1)
        assert loop.lent() == []  # after one was moved
        lending_again = lending.FIRST_PAUSE + 1
        for _ in range(lending_again):
            for index in (0, 2, 3):
                loop.parameters[index].grad = None
            loop.backward(3, lambda index: index != 1)
        assert loop.lent() == [3]
        for index, step in enumerate([3, 2, 3, 3]):
            gradient = loop.parameters[index].grad
            assert gradient is not None
            assert gradient.eq(loop.expected(index, step)).all()

    run_ranks(2, run)


class Marked(torch.Tensor):
    """Somebody's own kind of tensor."""


@ranks
def test_gradients_of_another_type_are_copied() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        parameter = loop.parameters[1]

        def mark(parameter: torch.nn.Parameter) -> None:
            assert parameter.grad is not None
            parameter.grad = parameter.grad.as_subclass(Marked)

        parameter.register_post_accumulate_grad_hook(mark)
        loop.step(1)
        loop.assert_averaged(1)
        assert isinstance(parameter.grad, Marked)
        assert loop.lent() == [3]

    run_ranks(2, run)


@ranks
def test_they_outlive_the_reducer_and_its_group() -> None:
    def run(group: ProcessGroup) -> list[torch.Tensor | None]:
        loop = Loop(group)
        loop.step(1)
        loop.reducer.close()
        return [parameter.grad for parameter in loop.parameters]

    for gradients in run_ranks(2, run):
        for index, gradient in enumerate(gradients):
            assert gradient is not None
            assert gradient.eq(WEIGHTS[index] * 1.5).all()


@ranks
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_random_loops(seed: int, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """What each rank does with its gradients after a step is its own matter, and late."""
    monkeypatch.setattr(lending, "LEAST_LENT_BYTES", 20)  # of 5 elements and more
    monkeypatch.setattr(lending, "FIRST_PAUSE", 2)

    def run(group: ProcessGroup) -> None:
        draw = random.Random(f"{seed} {group.rank}")
        loop = Loop(group, [3, 5, 64, 9], bucket_cap_bytes=100, first_bucket_cap_bytes=50, **options)
        held: list[tuple[Any, list[float]]] = []
        for step in range(40):
            loop.step(step)
            loop.assert_averaged(step)
            for index, parameter in enumerate(loop.parameters):
                gradient = parameter.grad
                assert gradient is not None
                what = draw.choice(["nothing", "nothing", "nothing", "the gradient", "a view", "an array", "let go", "scale"])
                if what in HOLDERS:
                    thing = HOLDERS[what](gradient)
                    held.append((thing, [loop.expected(index, step)] * len(thing)))
                elif what == "scale":
                    gradient.mul_(0)
                    held = [(thing, [float(value) for value in thing]) for thing, _ in held]
                elif what == "let go":
                    held.clear()
            del gradient
            for thing, values in held:
                assert [float(value) for value in thing] == values
            if draw.random() < 0.1:
                time.sleep(0.002)

    run_ranks(2, run)


def test_who_refers_to_a_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))

    def is_alone() -> bool:
        return lending.is_nobody_elses([parameter.grad], 0)

    for name, hold in HOLDERS.items():
        parameter.grad = torch.zeros(4)
        assert is_alone()
        held = hold(parameter.grad)
        assert not is_alone()
        del held
        assert is_alone() or name == "an array"  # of which nobody sees the end
    assert not lending.is_nobody_elses([None], 0)
    array = torch.zeros(4).numpy()
    parameter.grad = torch.from_numpy(array)
    assert not is_alone()  # nobody can see the array
