"""Gradients that lie in a bucket's memory; see Note [Lent gradients]."""

from __future__ import annotations

import random
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline.collectives import ProcessGroup, ReduceOp
from syncline.collectives.testing import run_ranks
from syncline.reducer import GradBucket, Reducer, lending
from syncline.reducer.bucket import Bucket
from syncline.reducer.holders import is_nobody_elses

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

    def warm_up(self) -> None:
        """Until the buckets are those that stay, and it was seen that gradients go."""
        for _ in range(3):
            self.step(0)

    def step(self, step: int) -> None:
        """As in training: what was there is gone before."""
        self.drop(*range(len(self.parameters)))
        self.backward(step)

    def drop(self, *indices: int) -> None:
        """As `zero_grad` does, of some."""
        for index in indices:
            self.parameters[index].grad = None

    def clear(self) -> None:
        """As `zero_grad(set_to_none=False)` does."""
        for parameter in self.parameters:
            assert parameter.grad is not None
            parameter.grad.zero_()

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
        for step in range(6):
            loop.step(step)
            loop.assert_averaged(step)
            if step > 1 or "find_unused_parameters" not in options:  # which does not rebuild
                assert loop.lent() == ([1, 3] if step > 1 else [])

    run_ranks(2, run)


@ranks
def test_a_lent_gradient_looks_like_any_other() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
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
        for _ in range(3):
            parameter.grad = None
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
        for step in range(6):
            held.clear()
            loop.step(step)
            loop.assert_averaged(step)
            assert loop.lent() == ([3] if step > 1 else [])
            assert first(held[0]) == loop.expected(1, step)
            if holder == "the gradient":
                assert held[0] is parameter.grad

    run_ranks(2, run)


@ranks
def test_gradients_that_are_kept_get_memory_of_their_own() -> None:
    """They are the same objects all the time, and lent again only after a while."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        kept = [parameter.grad for parameter in loop.parameters]
        assert loop.lent() == [1, 3]
        for step in range(1, 2 * lending.FIRST_PAUSE):
            loop.clear()
            loop.backward(step)
            loop.assert_averaged(step)
            assert all(parameter.grad is gradient for parameter, gradient in zip(loop.parameters, kept, strict=True))
            assert loop.lent() == []
        kept.clear()
        steps = 0
        while not loop.lent():
            loop.step(0)
            steps += 1
        assert lending.FIRST_PAUSE < steps < 2 * lending.FIRST_PAUSE

    run_ranks(2, run)


@ranks
def test_gradients_add_up() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        loop.step(1)
        loop.backward(1)
        for index, parameter in enumerate(loop.parameters):
            # What was averaged is the same on both ranks, and each adds its own to it.
            assert parameter.grad is not None
            assert parameter.grad.eq(2 * loop.expected(index, 1)).all()

    run_ranks(2, run)


@ranks
@pytest.mark.parametrize("is_late", [False, True])
def test_a_list_of_gradients_keeps_what_it_holds(is_late: bool) -> None:
    """It costs the bucket's own memory only if it begins when gradients were lent."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        if is_late:
            loop.warm_up()
        history = []
        for step in range(2 * lending.FIRST_PAUSE + 4):
            loop.step(step)
            loop.assert_averaged(step)
            history.append([parameter.grad for parameter in loop.parameters])
            is_at_home = loop.bucket.buffer.data_ptr() == loop.bucket._own_memory[0].data_ptr()
            assert is_at_home == (step == 0 or not is_late)
        for step, gradients in enumerate(history):
            for index, gradient in enumerate(gradients):
                assert gradient is not None
                assert gradient.eq(loop.expected(index, step)).all()

    run_ranks(2, run)


@ranks
@pytest.mark.parametrize("holder", HOLDERS)
def test_what_the_parameter_has_no_more_stays(holder: str) -> None:
    """On one rank: the other does what it does always."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        loop.step(1)
        own = loop.bucket.buffer.data_ptr()
        held = HOLDERS[holder](loop.parameters[1].grad) if group.rank == 1 else None
        for step in range(2, 6):
            loop.step(step)
            loop.assert_averaged(step)
            assert (loop.bucket.buffer.data_ptr() == own) == (held is None)
            assert held is None or first(held) == loop.expected(1, 1)
        del held
        for step in range(6, 10 + lending.FIRST_PAUSE):
            loop.step(step)
            loop.assert_averaged(step)
            assert loop.bucket.buffer.data_ptr() == own
        assert loop.lent() == [1, 3]

    run_ranks(2, run)


@ranks
@pytest.mark.parametrize("holder", ["a view", "an array", "its memory"])
def test_aliases_of_a_kept_gradient_stay_aliases(holder: str) -> None:
    """They see what is accumulated, what is averaged, and what is cleared through either of them."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        kept = loop.parameters[1].grad
        assert kept is not None
        held = HOLDERS[holder](kept)
        for step in range(1, 5):
            if holder == "a view":
                held.zero_()  # seven elements, of which `first` sees one
            loop.clear()
            loop.backward(step)
            loop.assert_averaged(step)
            assert loop.parameters[1].grad is kept
            assert first(held) == loop.expected(1, step)

    run_ranks(2, run)


@ranks
def test_a_kept_gradient_that_was_shared_stays_shared() -> None:
    """Its storage is the one that was lent, and lies elsewhere now; other processes may read it."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        own = loop.bucket.buffer.data_ptr()
        gradient = loop.parameters[1].grad
        assert gradient is not None
        gradient.share_memory_()  # type: ignore[no-untyped-call]
        shared = gradient.data_ptr()
        for step in range(1, 4):
            loop.clear()
            loop.backward(step)
            loop.assert_averaged(step)
            assert loop.parameters[1].grad is gradient
            assert gradient.data_ptr() == shared
            assert loop.bucket.buffer.data_ptr() == own

    run_ranks(2, run)


@ranks
def test_a_kept_gradient_that_was_given_other_memory_keeps_that() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        gradient = loop.parameters[1].grad
        assert gradient is not None
        view = gradient[:3]
        flat = torch.zeros(LARGE + 1)
        gradient.data = flat[:LARGE]
        del gradient
        loop.drop(0, 2, 3)
        loop.backward(1)
        loop.assert_averaged(1)
        assert flat[:LARGE].eq(loop.expected(1, 1)).all()
        assert view.eq(loop.expected(1, 0)).all()

    run_ranks(2, run)


@ranks
@pytest.mark.parametrize("holder", ["the gradient", "a view"])
def test_who_sits_out_keeps_gradients(holder: str) -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        loop.step(2)
        kept = [parameter.grad for parameter in loop.parameters]
        view = HOLDERS[holder](loop.parameters[1].grad)
        if group.rank == 1:
            with torch.inference_mode():
                loop.reducer.sit_out()
            loop.assert_averaged(2)
            assert all(parameter.grad is gradient for parameter, gradient in zip(loop.parameters, kept, strict=True))
            assert not any(parameter.grad.is_inference() for parameter in loop.parameters if parameter.grad is not None)
        else:
            loop.step(3)
        loop.step(4)
        loop.assert_averaged(4)
        del view

    run_ranks(2, run)


@ranks
def test_gradients_of_unused_parameters_stay() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group, find_unused_parameters=True)
        loop.warm_up()
        loop.step(2)
        loop.drop(0, 2, 3)
        loop.backward(3, lambda index: index != 1)
        assert loop.lent() == []  # after one was moved
        lending_again = lending.FIRST_PAUSE + 2
        for _ in range(lending_again):
            loop.drop(0, 2, 3)
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
        loop.warm_up()
        loop.step(1)
        loop.assert_averaged(1)
        assert isinstance(parameter.grad, Marked)
        assert loop.lent() == [3]

    run_ranks(2, run)


@ranks
def test_they_outlive_the_reducer_and_its_group() -> None:
    def run(group: ProcessGroup) -> list[torch.Tensor | None]:
        loop = Loop(group)
        loop.warm_up()
        loop.step(1)
        loop.reducer.close()
        return [parameter.grad for parameter in loop.parameters]

    for gradients in run_ranks(2, run):
        for index, gradient in enumerate(gradients):
            assert gradient is not None
            assert gradient.eq(WEIGHTS[index] * 1.5).all()


@ranks
def test_gradients_are_not_held_weakly() -> None:
    """`torch.utils.swap_tensors`, as in `Module.to`, refuses tensors with weak references."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        for _ in range(4):
            loop.step(1)
            for parameter in loop.parameters:
                assert parameter.grad is not None
                assert not weakref.getweakrefcount(parameter.grad)

    run_ranks(1, run)


def keep_buffer(state: list[torch.Tensor], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that looks again later."""
    state[:] = [bucket.buffer()]
    work = bucket.process_group().all_reduce(bucket.buffer(), ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


@ranks
def test_nothing_is_lent_that_a_communication_hook_was_shown() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        kept: list[torch.Tensor] = []
        loop.reducer.set_hook(keep_buffer, kept)
        for step in range(4):
            loop.step(step)
            assert loop.lent() == []
            loop.clear()
            assert kept[0].eq(loop.expected(1, step)).any()  # not cleared with them

    run_ranks(2, run)


@ranks
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_random_loops(seed: int, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """What each rank does with its gradients between steps is its own matter, and does not show."""
    monkeypatch.setattr(lending, "LEAST_LENT_BYTES", 20)  # of 5 elements and more
    monkeypatch.setattr(lending, "FIRST_PAUSE", 2)

    def run(group: ProcessGroup) -> None:
        draw = random.Random(f"{seed} {group.rank}")
        loop = Loop(group, [3, 5, 64, 9], bucket_cap_bytes=100, first_bucket_cap_bytes=50, **options)
        aliases: list[list[tuple[Any, torch.Tensor]]] = [[] for _ in loop.parameters]  # of gradients, and which gradient it is
        gone: list[tuple[Any, list[float]]] = []  # of gradients that no parameter has, and what they were
        for step in range(60):
            for parameter, held in zip(loop.parameters, aliases, strict=True):
                if draw.random() < 0.7:
                    gone += [(alias, values(alias)) for alias, _ in held]
                    held.clear()
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()
            loop.backward(step)
            loop.assert_averaged(step)
            for index, (parameter, held) in enumerate(zip(loop.parameters, aliases, strict=True)):
                assert parameter.grad is not None
                assert all(gradient is parameter.grad for _, gradient in held)
                assert all(set(values(alias)) == {loop.expected(index, step)} for alias, _ in held)
                if draw.random() < 0.2:
                    held.append((draw.choice(list(ALIASES.values()))(parameter.grad), parameter.grad))
            assert all(values(alias) == were for alias, were in gone)
            if draw.random() < 0.2:
                gone.clear()
            if draw.random() < 0.1:
                time.sleep(0.002)

    run_ranks(2, run)


ALIASES = {name: hold for name, hold in HOLDERS.items() if name in ("the gradient", "a view", "an array")}


def values(alias: Any) -> list[float]:
    return [float(value) for value in alias]


def test_who_refers_to_a_gradient() -> None:
    parameter = torch.nn.Parameter(torch.ones(4))

    def is_alone() -> bool:
        return is_nobody_elses([parameter.grad], 0)

    for name, hold in HOLDERS.items():
        parameter.grad = torch.zeros(4)
        assert is_alone()
        held = hold(parameter.grad)
        assert not is_alone()
        del held
        assert is_alone() or name == "an array"  # of which nobody sees the end
    assert not is_nobody_elses([None], 0)
    array = torch.zeros(4).numpy()
    parameter.grad = torch.from_numpy(array)
    assert not is_alone()  # nobody can see the array


def left(what: str, gradient: torch.Tensor) -> Any:
    """Leave something on it; nothing that is returned refers to it, unless weakly."""
    if what == "an attribute":
        gradient.mark = 1  # type: ignore[attr-defined]
    elif what == "that it needs a gradient":
        gradient.requires_grad_()
    elif what == "a hook":
        gradient.requires_grad_().register_hook(lambda _: None)
        gradient.requires_grad_(False)
    elif what == "that other processes have it":
        gradient.share_memory_()  # type: ignore[no-untyped-call]
    return weakref.ref(gradient) if what == "a weak reference" else None


LEFT = ["an attribute", "that it needs a gradient", "a hook", "that other processes have it", "a weak reference"]


@pytest.mark.parametrize("what", LEFT)
def test_what_was_left_on_a_gradient_is_seen(what: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(4))
    parameter.grad = torch.zeros(4)
    assert is_nobody_elses([parameter.grad], 0)
    reference = left(what, parameter.grad)
    assert not is_nobody_elses([parameter.grad], 0)
    del reference


@ranks
def test_pauses_get_shorter_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lending, "FIRST_PAUSE", 2)

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        seen = loop.bucket._lending
        assert seen is not None
        for _ in range(3):
            while not loop.lent():
                loop.step(1)
            loop.backward(1)  # it is still there
        assert seen._next_pause == 16
        for _ in range(8 + lending.CLEAN_PAUSES * (16 + 8 + 4 + 2)):
            loop.step(1)
        assert seen._next_pause == 2

    run_ranks(1, run)
