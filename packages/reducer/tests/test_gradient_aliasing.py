"""Large gradients in their bucket's memory; see Note [Aliased gradients]."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from syncline.collectives import MisuseError, ProcessGroup, ReduceOp
from syncline.collectives.testing import run_ranks
from syncline.reducer import GradBucket, Reducer, gradient_aliasing
from syncline.reducer.bucket import Bucket

pytestmark = pytest.mark.ranks

LARGE = gradient_aliasing.LEAST_ALIASED_BYTES // 4
SIZES = [3, LARGE, 5, LARGE + 1]
WEIGHTS = [1.0, 2.0, 3.0, 4.0]
ALIASED = [1, 3]  # the large ones
OPTIONS = [{}, {"static_graph": True}, {"find_unused_parameters": True}]


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
        loss.backward()

    def warm_up(self) -> None:
        """Until the buckets are those that stay."""
        for _ in range(2):
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

    def aliased(self) -> list[int]:
        """The parameters whose gradients lie in the bucket."""
        start, stop = self.bucket.buffer.data_ptr(), self.bucket.buffer.data_ptr() + self.bucket.buffer.nbytes
        return [
            index
            for index, parameter in enumerate(self.parameters)
            if parameter.grad is not None and start <= parameter.grad.data_ptr() < stop
        ]


USERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a view": lambda gradient: gradient.view(-1)[:7],
    "a detached tensor": lambda gradient: gradient.detach(),
    "an array": lambda gradient: gradient.numpy(),
    "its storage": lambda gradient: gradient.untyped_storage(),
}
KEEPERS = {
    **USERS,
    "the gradient": lambda gradient: gradient,
    "a graph": lambda gradient: (torch.ones(1, requires_grad=True) * gradient).sum(),
}


def first(kept: Any) -> float:
    """The first element of what somebody keeps."""
    if isinstance(kept, torch.UntypedStorage):
        return float(torch.empty(0).set_(kept)[0])
    if isinstance(kept, torch.Tensor) and kept.grad_fn is not None:
        leaf = kept.grad_fn.next_functions[0][0].next_functions[0][0].variable  # type: ignore[union-attr]
        (gradient,) = torch.autograd.grad(kept, [leaf], retain_graph=True)
        return float(gradient) / LARGE
    return float(kept[0])


# ---- which gradients are moved, and what they are afterwards ----


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_large_gradients_are_moved_in_every_step(options: dict[str, bool]) -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group, **options)
        for step in range(6):
            loop.step(step)
            loop.assert_averaged(step)
            assert loop.aliased() == ALIASED

    run_ranks(2, run)


def test_gradients_of_views_are_the_views() -> None:
    """With `gradient_as_bucket_view` there is nothing to move."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group, gradient_as_bucket_view=True)
        for step in range(3):
            loop.step(step)
            loop.assert_averaged(step)
            assert loop.aliased() == [0, 1, 2, 3]

    run_ranks(2, run)


def test_a_moved_gradient_is_the_object_that_autograd_made() -> None:
    """With its version, its attributes and its hooks."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        made: list[tuple[torch.Tensor, int]] = []
        called: list[float] = []

        def mark(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            gradient.mark = "mine"  # type: ignore[attr-defined]
            gradient.requires_grad_().register_hook(lambda upstream: called.append(float(upstream[0])))
            gradient.requires_grad_(False)
            made[:] = [(gradient, gradient._version)]

        loop.parameters[1].register_post_accumulate_grad_hook(mark)  # type: ignore[no-untyped-call]
        for step in range(3):
            loop.step(step)
            ((gradient, version),) = made
            assert loop.aliased() == ALIASED
            assert loop.parameters[1].grad is gradient
            assert gradient._version == version
            assert gradient.mark == "mine"  # type: ignore[attr-defined]
            (gradient.requires_grad_() * (step + 2.0)).sum().backward()
            assert called.pop() == step + 2.0
            gradient.requires_grad_(False)
            gradient.grad = None
            del gradient  # who keeps it lets the bucket use other memory

    run_ranks(2, run)


def test_a_moved_gradient_looks_like_any_other() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        gradient, other = (loop.parameters[index].grad for index in ALIASED)
        assert gradient is not None
        assert other is not None
        assert type(gradient) is torch.Tensor
        assert not gradient._is_view()
        assert not gradient.requires_grad
        assert gradient.untyped_storage().nbytes() == gradient.nbytes
        gradient.detach_()
        before = other._version
        gradient.mul_(2)
        assert other._version == before

    run_ranks(2, run)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_moved_gradient_has_the_parameters_strides(layout: torch.memory_format) -> None:
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


def test_moved_gradients_are_not_held_weakly() -> None:
    """`torch.utils.swap_tensors`, as in `Module.to`, refuses tensors with weak references."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        for _ in range(4):
            loop.step(1)
            for parameter in loop.parameters:
                assert parameter.grad is not None
                assert not weakref.getweakrefcount(parameter.grad)

    run_ranks(1, run)


def test_the_memory_that_autograd_allocated_is_freed() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        storages: list[StorageWeakRef] = []

        def note(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            storages.append(StorageWeakRef(parameter.grad.untyped_storage()))
            assert not storages[-1].expired()

        loop.parameters[1].register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
        loop.warm_up()
        assert loop.aliased() == ALIASED
        assert [storage.expired() for storage in storages] == [True, True]

    run_ranks(1, run)


# ---- gradients that are copied ----


@pytest.mark.parametrize("user", USERS)
def test_who_uses_a_gradients_memory_in_backward_sees_the_average(user: str) -> None:
    """The gradient is copied back, and used together with what was made of it."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        kept: list[Any] = []
        parameter = loop.parameters[1]
        parameter.register_post_accumulate_grad_hook(lambda parameter: kept.append(USERS[user](parameter.grad)))
        for step in range(6):
            kept.clear()
            loop.step(step)
            loop.assert_averaged(step)
            assert loop.aliased() == [3]
            assert first(kept[0]) == loop.expected(1, step)

    run_ranks(2, run)


def test_who_keeps_a_gradient_in_backward_sees_the_average() -> None:
    """The object itself may be moved."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        kept: list[torch.Tensor] = []
        loop.parameters[1].register_post_accumulate_grad_hook(lambda parameter: kept.append(parameter.grad))
        for step in range(6):
            loop.step(step)
            loop.assert_averaged(step)
            assert kept[-1] is loop.parameters[1].grad
            for earlier, gradient in enumerate(kept):
                assert gradient.eq(loop.expected(1, earlier)).all()

    run_ranks(2, run)


class Marked(torch.Tensor):
    """Somebody's own kind of tensor."""


def with_other_strides(gradient: torch.Tensor) -> torch.Tensor:
    wide = torch.empty(gradient.numel(), 2)
    wide[:, 0] = gradient
    return wide[:, 0]


def in_inference_mode(gradient: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return gradient.clone()


def shared(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.clone().share_memory_()  # type: ignore[no-untyped-call, no-any-return]


REPLACEMENTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "another type": lambda gradient: gradient.as_subclass(Marked),
    "other strides": with_other_strides,
    "an inference tensor": in_inference_mode,
    "memory of an array": lambda gradient: torch.from_numpy(gradient.numpy().copy()),
    "shared memory": shared,
    "a piece of a larger tensor": lambda gradient: torch.cat([gradient, gradient])[: gradient.numel()],
}


@pytest.mark.parametrize("replacement", REPLACEMENTS)
def test_other_gradients_than_autograds_own_are_copied(replacement: str) -> None:
    """They stay what they are, and where they are."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        places: list[tuple[torch.Tensor, int]] = []

        def replace(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            parameter.grad = REPLACEMENTS[replacement](parameter.grad)
            places[:] = [(parameter.grad, parameter.grad.data_ptr())]

        loop.parameters[1].register_post_accumulate_grad_hook(replace)  # type: ignore[no-untyped-call]
        for step in range(3):
            loop.step(step)
            loop.assert_averaged(step)
            ((gradient, place),) = places
            assert loop.parameters[1].grad is gradient
            assert gradient.data_ptr() == place
            assert loop.aliased() == [3]

    run_ranks(2, run)


def test_nothing_is_moved_where_storage_users_cannot_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_aliasing, "CAN_COUNT_STORAGE_USERS", False)

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        for step in range(4):
            loop.step(step)
            loop.assert_averaged(step)
            assert loop.aliased() == []
        loop.clear()
        loop.backward(4)
        loop.assert_averaged(4)

    run_ranks(2, run)


def keep_buffer(state: list[torch.Tensor], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that looks again later."""
    state[:] = [bucket.buffer()]
    work = bucket.process_group().all_reduce(bucket.buffer(), ReduceOp.AVG, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def test_nothing_is_moved_into_memory_that_a_communication_hook_was_shown() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        kept: list[torch.Tensor] = []
        loop.reducer.set_hook(keep_buffer, kept)
        for step in range(4):
            loop.step(step)
            assert loop.aliased() == []
            loop.clear()
            assert kept[0].eq(loop.expected(1, step)).any()  # not cleared with them

    run_ranks(2, run)


def test_gradients_that_were_moved_before_a_communication_hook_was_set_stay_right() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        assert loop.aliased() == ALIASED
        loop.reducer.set_hook(keep_buffer, [])
        assert loop.aliased() == []
        loop.assert_averaged(0)
        for step in range(1, 4):
            loop.clear()
            loop.backward(step)
            loop.assert_averaged(step)
        loop.step(4)
        loop.assert_averaged(4)
        assert loop.aliased() == []

    run_ranks(2, run)


# ---- gradients that are kept ----


def test_kept_gradients_stay_in_the_buckets_memory() -> None:
    """`zero_grad(set_to_none=False)`: the same objects all the time, and nothing is copied for the large ones."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        kept = [parameter.grad for parameter in loop.parameters]
        places = [gradient.data_ptr() for gradient in kept if gradient is not None]
        for step in range(1, 6):
            loop.clear()
            loop.backward(step)
            loop.assert_averaged(step)
            assert loop.aliased() == ALIASED
            for parameter, gradient, place in zip(loop.parameters, kept, places, strict=True):
                assert parameter.grad is gradient
                assert gradient is not None
                assert gradient.data_ptr() == place

    run_ranks(2, run)


def test_gradients_that_were_kept_since_before_the_rebuild_are_averaged() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.step(0)
        kept = [parameter.grad for parameter in loop.parameters]
        for step in range(1, 4):
            loop.clear()
            loop.backward(step)
            loop.assert_averaged(step)
            assert loop.aliased() == ALIASED
            assert all(parameter.grad is gradient for parameter, gradient in zip(loop.parameters, kept, strict=True))

    run_ranks(2, run)


@pytest.mark.parametrize("user", USERS)
def test_who_uses_a_kept_gradient_across_the_rebuild_sees_the_averages(user: str) -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.step(0)
        gradient = loop.parameters[1].grad
        assert gradient is not None
        used = USERS[user](gradient)
        for step in range(1, 4):
            loop.clear()
            loop.backward(step)
            loop.assert_averaged(step)
            assert first(used) == loop.expected(1, step)

    run_ranks(2, run)


def test_gradients_add_up() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        loop.step(1)
        for count in (2, 3):
            loop.backward(1)
            for index, parameter in enumerate(loop.parameters):
                # What was averaged is the same on both ranks, and each adds its own to it.
                assert parameter.grad is not None
                assert parameter.grad.eq(count * loop.expected(index, 1)).all()
        assert loop.aliased() == ALIASED

    run_ranks(2, run)


def test_what_was_accumulated_without_synchronisation_is_averaged_where_it_is() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        loop.step(1)
        loop.reducer.prepare_for_backward(synchronizes=False)
        torch.stack([parameter.sum() * group.rank for parameter in loop.parameters]).sum().backward()
        loop.backward(1)
        for index, parameter in enumerate(loop.parameters):
            assert parameter.grad is not None
            assert parameter.grad.eq(2 * loop.expected(index, 1) + 0.5).all()
        assert loop.aliased() == ALIASED

    run_ranks(2, run)


@pytest.mark.parametrize("user", USERS)
def test_who_uses_the_memory_of_a_kept_gradient_sees_all_that_happens_to_it(user: str) -> None:
    """What is accumulated, what is averaged, and what is cleared through either of them."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        gradient = loop.parameters[1].grad
        assert gradient is not None
        kept = USERS[user](gradient)
        for step in range(1, 5):
            if user == "a view":
                kept.fill_(9.0)
                assert gradient[:7].eq(9.0).all()
            loop.clear()
            loop.backward(step)
            loop.assert_averaged(step)
            assert loop.parameters[1].grad is gradient
            assert first(kept) == loop.expected(1, step)

    run_ranks(2, run)


def test_a_kept_gradient_that_was_shared_stays_shared() -> None:
    """Its memory is another one then, which other processes may read."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        own = loop.bucket.buffer.data_ptr()
        gradient = loop.parameters[1].grad
        assert gradient is not None
        gradient.share_memory_()  # type: ignore[no-untyped-call]
        place = gradient.data_ptr()
        for step in range(1, 4):
            loop.clear()
            loop.backward(step)
            loop.assert_averaged(step)
            assert loop.parameters[1].grad is gradient
            assert gradient.is_shared()  # type: ignore[no-untyped-call]
            assert gradient.data_ptr() == place
            assert loop.bucket.buffer.data_ptr() == own
        loop.step(4)
        loop.assert_averaged(4)
        assert gradient.eq(loop.expected(1, 3)).all()
        assert loop.aliased() == ALIASED

    run_ranks(2, run)


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


# ---- gradients that somebody else keeps ----


@pytest.mark.parametrize("since", [0, 3])
def test_a_list_of_old_gradients_keeps_their_values(since: int) -> None:
    """Meanwhile the bucket uses other memory, and comes back to its own when the list is gone."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        for step in range(since):
            loop.step(step)
        history: list[tuple[int, list[torch.Tensor | None]]] = []
        for step in range(since, since + 6):
            loop.step(step)
            loop.assert_averaged(step)
            history.append((step, [parameter.grad for parameter in loop.parameters]))
        assert not loop.bucket._is_in_own_memory
        for step, gradients in history:
            for index, gradient in enumerate(gradients):
                assert gradient is not None
                assert gradient.eq(loop.expected(index, step)).all()
        history.clear()
        del gradients, gradient
        for step in (10, 11):
            loop.step(step)
            loop.assert_averaged(step)
            assert loop.bucket._is_in_own_memory
            assert loop.aliased() == ALIASED

    run_ranks(2, run)


@pytest.mark.parametrize("keeper", KEEPERS)
def test_what_was_made_of_an_old_gradient_keeps_its_value(keeper: str) -> None:
    """On one rank; the other goes on in its own memory."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        loop.step(1)
        kept = KEEPERS[keeper](loop.parameters[1].grad) if group.rank == 1 else None
        for step in range(2, 6):
            loop.step(step)
            loop.assert_averaged(step)
            assert loop.bucket._is_in_own_memory == (kept is None)
            assert kept is None or first(kept) == loop.expected(1, 1)
        del kept
        for step in range(6, 9):
            loop.step(step)
            loop.assert_averaged(step)
            assert loop.bucket._is_in_own_memory
        assert loop.aliased() == ALIASED

    run_ranks(2, run)


def test_a_gradient_that_another_parameter_was_given_keeps_its_value() -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        loop.step(1)
        outside = torch.nn.Parameter(torch.zeros(LARGE))
        outside.grad = loop.parameters[1].grad
        for step in range(2, 5):
            loop.step(step)
            loop.assert_averaged(step)
            assert outside.grad is not None
            assert outside.grad.eq(loop.expected(1, 1)).all()

    run_ranks(2, run)


@pytest.mark.parametrize("keeper", ["the gradient", "a view"])
def test_a_rank_that_shadows_a_backward_keeps_its_gradients(keeper: str) -> None:
    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        loop.step(2)
        before = [parameter.grad for parameter in loop.parameters]
        kept = KEEPERS[keeper](loop.parameters[1].grad)
        if group.rank == 1:
            with torch.inference_mode():
                loop.reducer.shadow_backward()
            loop.assert_averaged(2)
            assert all(parameter.grad is gradient for parameter, gradient in zip(loop.parameters, before, strict=True))
            assert not any(parameter.grad.is_inference() for parameter in loop.parameters if parameter.grad is not None)
        else:
            loop.step(3)
        loop.step(4)
        loop.assert_averaged(4)
        assert first(kept) == loop.expected(1, 2) if group.rank == 1 else True

    run_ranks(2, run)


def test_gradients_of_unused_parameters_stay() -> None:
    """They stay where they are, with their values, while others are moved."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group, find_unused_parameters=True)
        loop.warm_up()
        loop.step(2)
        for _ in range(3):
            loop.drop(0, 2, 3)
            loop.backward(3, lambda index: index != 1)
            assert loop.aliased() == ALIASED
            for index, step in enumerate([3, 2, 3, 3]):
                gradient = loop.parameters[index].grad
                assert gradient is not None
                assert gradient.eq(loop.expected(index, step)).all()
            del gradient  # who keeps it lets the bucket use other memory

    run_ranks(2, run)


def test_gradients_of_parameters_that_only_this_rank_does_not_use_are_averaged() -> None:
    """What such a parameter holds counts, as on the other rank."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group, find_unused_parameters=True)
        loop.warm_up()
        loop.step(2)
        loop.drop(0, 2, 3)
        loop.backward(3, lambda index: index != 1 or group.rank == 0)
        gradient = loop.parameters[1].grad
        assert gradient is not None
        assert gradient.eq(loop.expected(1, 2) + WEIGHTS[1] * 3 / 2).all()

    run_ranks(2, run)


def test_moved_gradients_outlive_the_reducer_and_its_group() -> None:
    def run(group: ProcessGroup) -> list[torch.Tensor | None]:
        loop = Loop(group)
        loop.warm_up()
        loop.step(1)
        assert loop.aliased() == ALIASED
        loop.reducer.close()
        return [parameter.grad for parameter in loop.parameters]

    for gradients in run_ranks(2, run):
        gc.collect()
        for index, gradient in enumerate(gradients):
            assert gradient is not None
            assert gradient.eq(WEIGHTS[index] * 1.5).all()


def test_moved_gradients_are_refused_by_name_like_others() -> None:
    """A parameter that is converted has gradients for which its bucket was not made."""

    def run(group: ProcessGroup) -> None:
        loop = Loop(group)
        loop.warm_up()
        loop.drop(0, 1, 2, 3)
        loop.parameters[1].data = loop.parameters[1].data.double()
        with pytest.raises(MisuseError, match=r"expected a gradient of torch\.float32 for parameter 'p1'.*torch\.float64"):
            loop.backward(1)

    run_ranks(2, run)


# ---- random loops ----

RANDOM_KEEPERS = {name: keep for name, keep in KEEPERS.items() if name not in ("a graph", "its storage")}


def values(kept: Any) -> list[float]:
    return [float(value) for value in kept]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_random_loops(seed: int, options: dict[str, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """What each rank does with its gradients between steps is its own matter, and changes no values."""
    monkeypatch.setattr(gradient_aliasing, "LEAST_ALIASED_BYTES", 20)  # of 5 elements and more

    def run(group: ProcessGroup) -> None:
        draw = random.Random(f"{seed} {group.rank}")
        loop = Loop(group, [3, 5, 64, 9], bucket_cap_bytes=100, first_bucket_cap_bytes=50, **options)
        current: list[list[tuple[Any, torch.Tensor]]] = [[] for _ in loop.parameters]  # what was made of which gradient
        old: list[tuple[Any, list[float]]] = []  # what was made of gradients that no parameter has, and its values
        moved = 0
        for step in range(60):
            for parameter, kept in zip(loop.parameters, current, strict=True):
                if draw.random() < 0.7:
                    old += [(each, values(each)) for each, _ in kept]
                    kept.clear()
                    parameter.grad = None
                elif parameter.grad is not None:
                    parameter.grad.zero_()
            loop.backward(step)
            loop.assert_averaged(step)
            moved += any(bucket._aliasing.in_place([p.grad for p in bucket.parameters]) for bucket in loop.reducer.buckets)  # type: ignore[union-attr]
            for index, (parameter, kept) in enumerate(zip(loop.parameters, current, strict=True)):
                assert parameter.grad is not None
                assert all(gradient is parameter.grad for _, gradient in kept)
                assert all(set(values(each)) == {loop.expected(index, step)} for each, _ in kept)
                if draw.random() < 0.2:
                    kept.append((draw.choice(list(RANDOM_KEEPERS.values()))(parameter.grad), parameter.grad))
            assert all(values(each) == were for each, were in old)
            if draw.random() < 0.2:
                old.clear()
        assert moved > 10

    run_ranks(2, run)
