from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from syncline.collectives import (
    CollectiveTimeout,
    InvalidArgumentError,
    MisuseError,
    ProcessGroup,
    ReduceOp,
    Work,
)
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.threads import create_groups
from syncline.reducer import GradBucket, Reducer
from test_support.training_runs import VIEWS

pytestmark = pytest.mark.ranks

WORLD_SIZES = [1, 2, 3, 4]
ONE_EACH = 0  # a cap of 0 bytes: every parameter has a bucket to itself
BOUNDED_WAIT_S = 20.0  # only a test that fails waits so long

Log = list[tuple[str, object]]


class RecordingGroup:
    """A group that notes when each all_reduce is issued and when it has finished, and is otherwise the group it wraps."""

    def __init__(self, group: ProcessGroup, log: Log) -> None:
        self._group = group
        self._log = log
        self._issued = 0
        self.finished: list[threading.Event] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = ReduceOp.SUM, *, async_op: bool = False) -> Work:
        number, self._issued = self._issued, self._issued + 1
        event = threading.Event()
        self.finished.append(event)
        self._log.append(("started", number))
        work = self._group.all_reduce(tensor, op, async_op=async_op)

        def note(_: object) -> None:
            self._log.append(("finished", number))
            event.set()

        work.get_future().add_done_callback(note)
        return work

    def settle(self) -> None:
        """Wait for the last notes: a future wakes its waiters before it runs its callbacks."""
        for event in self.finished:
            assert event.wait(BOUNDED_WAIT_S)


def make_parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[tuple[str, torch.nn.Parameter]]:
    return [(f"p{i}", torch.nn.Parameter(torch.ones(shape, dtype=dtype))) for i, shape in enumerate(shapes)]


def coefficient(rank: int, index: int, parameter: torch.Tensor, step: int = 0) -> torch.Tensor:
    """Differs by rank, parameter, element and step; small integers, so that sums are exact in any dtype but halves."""
    place = torch.arange(parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
    return (rank + 1) * (place + 10 * index + 1) + 100 * step


def average(world_size: int, index: int, parameter: torch.Tensor, step: int = 0) -> torch.Tensor:
    return torch.stack([coefficient(rank, index, parameter, step) for rank in range(world_size)]).mean(0)


def linear_loss(
    parameters: Sequence[tuple[str, torch.nn.Parameter]], rank: int, *, arrival: Sequence[int] | None = None, step: int = 0
) -> torch.Tensor:
    """A loss whose gradients are the coefficients. They arrive in the order given: autograd visits the latest node first."""
    order = list(range(len(parameters))) if arrival is None else arrival
    total = torch.zeros((), dtype=torch.float64)
    for index in reversed(order):
        parameter = parameters[index][1]
        total = total + (parameter * coefficient(rank, index, parameter, step)).sum().double()
    return total


def backward(reducer: Reducer, loss: Callable[[], torch.Tensor]) -> None:
    reducer.prepare_for_backward()
    loss().backward()


def started(log: Log) -> list[object]:
    """The numbers of the all_reduces that were issued."""
    return [number for event, number in log if event == "started"]


def gradients(parameters: Sequence[tuple[str, torch.nn.Parameter]]) -> list[torch.Tensor]:
    found = [parameter.grad for _, parameter in parameters]
    return [gradient.clone() for gradient in found if gradient is not None]


# ---- the values ----


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("caps", [(ONE_EACH, ONE_EACH), (8, 100), (1 << 20, 25 << 20)], ids=["one-each", "some", "one"])
def test_gradients_are_the_closed_form_average(world_size: int, as_view: bool, caps: tuple[int, int]) -> None:
    def body(group: ProcessGroup) -> list[list[torch.Tensor]]:
        parameters = make_parameters((3,), (2, 3), (), (5,), (1, 4))
        reducer = Reducer(
            parameters,
            group,
            first_bucket_cap_bytes=caps[0],
            bucket_cap_bytes=caps[1],
            gradient_as_bucket_view=as_view,
        )
        found = []
        for step in range(3):
            for _, parameter in parameters:
                parameter.grad = None
            backward(reducer, lambda step=step: linear_loss(parameters, group.rank, step=step))  # type: ignore[misc]
            found.append(gradients(parameters))
            aliased = [p.grad is view for b in reducer.buckets for p, view in zip(b.parameters, b.views, strict=True)]
            assert aliased == [as_view] * len(parameters)
        return found

    expected = [
        [
            average(world_size, i, parameter, step)
            for i, (_, parameter) in enumerate(make_parameters((3,), (2, 3), (), (5,), (1, 4)))
        ]
        for step in range(3)
    ]
    for found in run_ranks(world_size, body):
        for ours, theirs in zip(found, expected, strict=True):
            for gradient, mean in zip(ours, theirs, strict=True):
                torch.testing.assert_close(gradient, mean, rtol=1e-15, atol=0)


def make_network() -> torch.nn.Sequential:
    torch.manual_seed(7)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)
    )


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("cap", [ONE_EACH, 256, 1 << 20])
def test_training_equals_local_training_on_the_whole_batch(world_size: int, as_view: bool, cap: int) -> None:
    steps, share = 5, 4
    initial = make_network().double()
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(steps, world_size * share, 5, generator=generator, dtype=torch.float64)
    targets = torch.randn(steps, world_size * share, 3, generator=generator, dtype=torch.float64)

    def train(
        network: torch.nn.Sequential, rows: slice, prepare: Callable[[], None] = lambda: None
    ) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        history = []
        for step in range(steps):
            optimizer.zero_grad()
            prepare()
            torch.nn.functional.mse_loss(network(inputs[step, rows]), targets[step, rows]).backward()
            history.append(gradients(list(network.named_parameters())))
            optimizer.step()
        return [parameter.detach() for parameter in network.parameters()], history

    def body(group: ProcessGroup) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
        network = copy.deepcopy(initial)
        reducer = Reducer(list(network.named_parameters()), group, bucket_cap_bytes=cap, gradient_as_bucket_view=as_view)
        rows = slice(group.rank * share, (group.rank + 1) * share)
        return train(network, rows, reducer.prepare_for_backward)

    whole_parameters, whole_history = train(copy.deepcopy(initial), slice(None))
    results = run_ranks(world_size, body)

    for parameters, history in results:
        torch.testing.assert_close(parameters, whole_parameters, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(history, whole_history, rtol=1e-12, atol=1e-14)
        for step in range(steps):
            assert all(torch.equal(a, b) for a, b in zip(history[step], results[0][1][step], strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("as_view", VIEWS)
def test_gradients_of_irregular_values_are_bitwise_equal_on_all_ranks(dtype: torch.dtype, as_view: bool) -> None:
    def body(group: ProcessGroup) -> list[torch.Tensor]:
        parameters = make_parameters((50, 7), (13,), dtype=dtype)
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view)
        generator = torch.Generator().manual_seed(group.rank)
        noise = [torch.randn(parameter.shape, generator=generator).to(dtype) for _, parameter in parameters]
        backward(reducer, lambda: sum((p * n).sum() for (_, p), n in zip(parameters, noise, strict=True)))  # type: ignore[arg-type, return-value]
        return [*gradients(parameters), *noise]

    results = run_ranks(4, body)

    for index in range(2):
        assert results[0][index].dtype == dtype
        assert all(torch.equal(result[index], results[0][index]) for result in results)
        mean = torch.stack([result[2 + index].double() for result in results]).mean(0)
        torch.testing.assert_close(results[0][index].double(), mean, rtol=torch.finfo(dtype).eps, atol=1e-7)


@pytest.mark.parametrize("as_view", VIEWS)
def test_dtypes_do_not_share_buckets_and_are_kept(as_view: bool) -> None:
    dtypes = [torch.float32, torch.float64, torch.float32, torch.bfloat16]

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        parameters = [(f"p{i}", torch.nn.Parameter(torch.ones(3, dtype=dtype))) for i, dtype in enumerate(dtypes)]
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view)
        reducer.rebuild_buckets()
        assert sorted(sorted(bucket.indices) for bucket in reducer.buckets) == [[0, 2], [1], [3]]
        assert [bucket.buffer.dtype for bucket in reducer.buckets] == [dtypes[b.indices[0]] for b in reducer.buckets]
        backward(reducer, lambda: linear_loss(parameters, group.rank))
        return gradients(parameters)

    for found in run_ranks(2, body):
        for index, gradient in enumerate(found):
            assert gradient.dtype == dtypes[index]
            assert gradient.tolist() == average(2, index, torch.ones(3)).tolist()


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_channels_last_parameter_keeps_its_strides(as_view: bool) -> None:
    def body(group: ProcessGroup) -> list[torch.Tensor]:
        shape = (2, 3, 4, 5)
        first = torch.nn.Parameter(torch.ones(shape, dtype=torch.float64).to(memory_format=torch.channels_last))
        parameters = [("conv", first), *make_parameters((3,))]
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view)
        backward(reducer, lambda: linear_loss(parameters, group.rank))
        assert first.grad is not None
        assert first.grad.stride() == first.stride() != torch.ones(shape).stride()
        return gradients(parameters)

    for found in run_ranks(2, body):
        assert torch.equal(found[0], average(2, 0, found[0]))
        assert torch.equal(found[1], average(2, 1, found[1]))


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("keeps_gradients", [False, True], ids=["new gradients", "kept gradients"])
@pytest.mark.parametrize("changes_before", [0, 1, 2, 3], ids=["at once", "before the rebuild", "after the rebuild", "later"])
@pytest.mark.parametrize("who", ["one rank", "all ranks"])
def test_strides_that_change_mix_no_gradients(as_view: bool, keeps_gradients: bool, changes_before: int, who: str) -> None:
    """Equal elements must be at equal places of the buffer on all ranks, although nobody reports the change.

    `module.to(memory_format=...)` also gives the gradients, which may be views of the buckets, other memory.
    """

    def body(group: ProcessGroup) -> None:
        first = torch.nn.Parameter(torch.ones(2, 3, 4, 5, dtype=torch.float64))
        parameters = [("conv", first), *make_parameters((3,))]
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view)
        for iteration in range(5):
            for _, parameter in parameters:
                if keeps_gradients and parameter.grad is not None:
                    parameter.grad.zero_()
                else:
                    parameter.grad = None
            if iteration == changes_before and (group.rank == 1 or who == "all ranks"):
                first.data = first.data.to(memory_format=torch.channels_last)
                if first.grad is not None:
                    first.grad.data = first.grad.data.to(memory_format=torch.channels_last)
            backward(reducer, lambda: linear_loss(parameters, group.rank))
            for index, gradient in enumerate(gradients(parameters)):
                assert torch.equal(gradient, average(2, index, gradient))
            # Fused optimizers expect the strides of the parameter.
            assert first.grad is not None
            assert first.grad.stride() == first.stride()

    run_ranks(2, body)


# ---- accumulation ----


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("warm", [False, True], ids=["first", "after-a-step"])
def test_what_was_accumulated_without_synchronisation_is_averaged_later(world_size: int, as_view: bool, warm: bool) -> None:
    def body(group: ProcessGroup) -> tuple[list[torch.Tensor], list[object]]:
        parameters = make_parameters((3,), (2, 2))
        log: Log = []
        reducer = Reducer(
            parameters,
            RecordingGroup(group, log),  # type: ignore[arg-type]  # a stand-in
            bucket_cap_bytes=ONE_EACH,
            gradient_as_bucket_view=as_view,
        )
        if warm:
            backward(reducer, lambda: linear_loss(parameters, group.rank, step=9))
            for _, parameter in parameters:
                parameter.grad = None
        before = started(log)
        for step in range(2):
            reducer.prepare_for_backward(synchronizes=False)
            linear_loss(parameters, group.rank, step=step).backward()
            own = sum(coefficient(group.rank, 0, parameters[0][1], s) for s in range(step + 1))
            assert torch.equal(gradients(parameters)[0], own), "not averaged yet"  # type: ignore[arg-type]
        assert started(log) == before
        backward(reducer, lambda: linear_loss(parameters, group.rank, step=2))
        return gradients(parameters), started(log)[len(before) :]

    for found, buckets in run_ranks(world_size, body):
        assert len(buckets) == 2
        for index, gradient in enumerate(found):
            expected = sum(average(world_size, index, gradient, step) for step in range(3))
            torch.testing.assert_close(gradient, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("keep", [True, False], ids=["zeroed-in-place", "added-up"])
def test_gradients_that_are_kept_between_steps(as_view: bool, keep: bool) -> None:
    """`zero_grad(set_to_none=False)` keeps the tensors; no zero_grad at all adds average to average."""

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        parameters = make_parameters((3,), (2, 2))
        reducer = Reducer(parameters, group, bucket_cap_bytes=ONE_EACH, gradient_as_bucket_view=as_view)
        for step in range(3):
            if keep:
                for _, parameter in parameters:
                    if parameter.grad is not None:
                        parameter.grad.zero_()
            backward(reducer, lambda step=step: linear_loss(parameters, group.rank, step=step))  # type: ignore[misc]
        return gradients(parameters)

    for found in run_ranks(2, body):
        for index, gradient in enumerate(found):
            steps = [2] if keep else [0, 1, 2]
            assert torch.equal(gradient, sum(average(2, index, gradient, step) for step in steps))  # type: ignore[arg-type]


# ---- when buckets are built ----


def test_constructing_a_reducer_communicates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank may copy a wrapped module, and use the copy without backward, while the others train."""

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters((5,), (3,))
        asked: list[int] = []
        allocate = group.allocate
        monkeypatch.setattr(group, "allocate", lambda *args: asked.append(args[0]) or allocate(*args))
        reducer = Reducer(parameters, group)
        _copy = Reducer(make_parameters((5,), (3,)), group, static_graph=True) if group.rank == 0 else None
        assert not asked, "to allocate is a collective"
        for step in range(3):
            for _, parameter in parameters:
                parameter.grad = None
            backward(reducer, lambda s=step: linear_loss(parameters, group.rank, step=s))  # type: ignore[misc]
            for index, gradient in enumerate(gradients(parameters)):
                torch.testing.assert_close(gradient, average(2, index, gradient, step), rtol=1e-15, atol=0)
        assert asked == [8, 8], "at the first forward, and at the second, in the order of the gradients"

    run_ranks(2, body)


@pytest.mark.parametrize("options", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_the_first_backward_builds_them_if_no_forward_has(options: Any) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters((1,), (2,), (3,))
        reducer = Reducer(parameters, group, bucket_cap_bytes=ONE_EACH, **options)
        linear_loss(parameters, group.rank).backward()  # type: ignore[no-untyped-call]
        assert [bucket.indices for bucket in reducer.buckets] == [[2], [1], [0]]
        for index, gradient in enumerate(gradients(parameters)):
            torch.testing.assert_close(gradient, average(2, index, gradient), rtol=1e-15, atol=0)

    run_ranks(2, body)


def test_parameters_that_are_converted_before_the_first_forward_have_buckets_of_their_dtype() -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters((1,), (2,), (3,))
        reducer = Reducer(parameters, group)
        parameters[1][1].data = parameters[1][1].data.float()
        backward(reducer, lambda: linear_loss(parameters, group.rank))
        assert sorted(sorted(bucket.indices) for bucket in reducer.buckets) == [[0, 2], [1]]
        for index, gradient in enumerate(gradients(parameters)):
            torch.testing.assert_close(gradient, average(2, index, gradient))

    run_ranks(2, body)


# ---- the rebuild ----


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("as_view", VIEWS)
def test_buckets_are_rebuilt_once_in_the_order_in_which_rank_0s_gradients_arrived(world_size: int, as_view: bool) -> None:
    arrivals = [[2, 0, 3, 1], [0, 1, 2, 3], [3, 1, 2, 0]]

    def body(group: ProcessGroup) -> list[list[list[int]]]:
        parameters = make_parameters((1,), (2,), (3,), (4,))
        reducer = Reducer(parameters, group, bucket_cap_bytes=ONE_EACH, gradient_as_bucket_view=as_view)
        assert not reducer.buckets, "none before the first forward, which all ranks run"
        assert not reducer.rebuild_buckets(), "built, but not in the order of the gradients"
        history = [[bucket.indices for bucket in reducer.buckets]]
        for step in range(3):
            # From the second backward on they arrive in yet another order: too late to matter.
            arrival = arrivals[group.rank] if step == 0 else [1, 0, 2, 3]
            for _, parameter in parameters:
                parameter.grad = None
            backward(reducer, lambda a=arrival, s=step: linear_loss(parameters, group.rank, arrival=a, step=s))  # type: ignore[misc]
            history.append([bucket.indices for bucket in reducer.buckets])
            for index, gradient in enumerate(gradients(parameters)):
                torch.testing.assert_close(gradient, average(world_size, index, gradient, step), rtol=1e-15, atol=0)
        return history

    before, after = [[3], [2], [1], [0]], [[2], [0], [3], [1]]
    assert run_ranks(world_size, body) == [[before, before, after, after]] * world_size


def test_aliases_survive_the_rebuild_with_their_values() -> None:
    def body(group: ProcessGroup) -> list[torch.Tensor]:
        parameters = make_parameters((1,), (2,), (3,))
        reducer = Reducer(parameters, group, bucket_cap_bytes=24, gradient_as_bucket_view=True)
        backward(reducer, lambda: linear_loss(parameters, group.rank, arrival=[1, 0, 2]))
        old, before = reducer.buckets, gradients(parameters)
        parameters[2][1].grad = None

        reducer.prepare_for_backward()

        new = reducer.buckets
        assert new is not old
        assert [bucket.indices for bucket in new] != [bucket.indices for bucket in old]
        views = {index: view for bucket in new for index, view in zip(bucket.indices, bucket.views, strict=True)}
        assert parameters[0][1].grad is views[0]
        assert parameters[1][1].grad is views[1]
        assert parameters[2][1].grad is None, "what had no gradient gets none"
        assert torch.equal(views[0], before[0])
        assert torch.equal(views[1], before[1])
        linear_loss(parameters, group.rank, step=1).backward()
        return gradients(parameters)

    for found in run_ranks(2, body):
        for index, gradient in enumerate(found):
            steps = [0, 1] if index < 2 else [1]
            assert torch.equal(gradient, sum(average(2, index, gradient, step) for step in steps))  # type: ignore[arg-type]


class AllocatingGroup:
    """A group that counts, at each allocation, the buffers that it has allocated before and that still exist."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._buffers: list[weakref.ref[torch.Tensor]] = []
        self.living: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.living.append(sum(buffer() is not None for buffer in self._buffers))
        tensor = self._group.allocate(numel, dtype, device)
        self._buffers.append(weakref.ref(tensor))
        return tensor


@pytest.mark.parametrize("as_view", VIEWS)
def test_the_rebuild_gives_up_the_old_buckets_before_it_allocates_new_ones(as_view: bool) -> None:
    def body(group: ProcessGroup) -> list[int]:
        parameters = make_parameters((1,), (2,))
        watched = AllocatingGroup(group)
        reducer = Reducer(parameters, watched, bucket_cap_bytes=ONE_EACH, gradient_as_bucket_view=as_view)  # type: ignore[arg-type]
        for _ in range(3):
            backward(reducer, lambda: linear_loss(parameters, group.rank))
            for _, parameter in parameters:
                parameter.grad = None
        assert reducer.has_rebuilt_buckets
        return watched.living

    assert run_ranks(2, body) == [[0, 1, 0, 1]] * 2


def test_a_rebuild_that_failed_is_tried_again() -> None:
    class FailingGroup(AllocatingGroup):
        def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
            if len(self.living) == 3:
                self.living.append(0)
                raise MemoryError("no room for a bucket")
            return super().allocate(numel, dtype, device)

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        parameters = make_parameters((1,), (2,))
        reducer = Reducer(parameters, FailingGroup(group), bucket_cap_bytes=ONE_EACH, gradient_as_bucket_view=True)  # type: ignore[arg-type]
        backward(reducer, lambda: linear_loss(parameters, group.rank))
        with pytest.raises(MemoryError, match="no room"):
            reducer.prepare_for_backward()
        backward(reducer, lambda: linear_loss(parameters, group.rank, step=1))
        assert reducer.has_rebuilt_buckets
        return gradients(parameters)

    for found in run_ranks(2, body):
        for index, gradient in enumerate(found):
            assert torch.equal(gradient, sum(average(2, index, gradient, step) for step in (0, 1)))  # type: ignore[arg-type]


def test_a_backward_without_synchronisation_does_not_count_as_the_first() -> None:
    def body(group: ProcessGroup) -> list[list[int]]:
        parameters = make_parameters((1,), (2,))
        reducer = Reducer(parameters, group, bucket_cap_bytes=ONE_EACH)
        reducer.prepare_for_backward(synchronizes=False)
        linear_loss(parameters, group.rank, arrival=[0, 1]).backward()
        reducer.prepare_for_backward()
        return [bucket.indices for bucket in reducer.buckets]

    assert run_ranks(2, body) == [[[1], [0]]] * 2


# ---- the order of events ----


class WaitInBackward(torch.autograd.Function):
    """The identity; its backward does not go on before an event is set, and notes whether it was."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, event: Callable[[], threading.Event], log: Log) -> torch.Tensor:
        ctx.event, ctx.log = event, log
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.log.append(("waited", ctx.event().wait(BOUNDED_WAIT_S)))
        return gradients[0], None, None


def wait_in_backward(tensor: torch.Tensor, event: Callable[[], threading.Event], log: Log) -> torch.Tensor:
    waiting: torch.Tensor = WaitInBackward.apply(tensor, event, log)
    return waiting


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("as_view", VIEWS)
def test_bucket_0_is_reduced_before_the_last_gradient_is_ready(world_size: int, as_view: bool) -> None:
    """The first layer's backward waits for the reduction of the last layer's gradient: without overlap it waits in vain."""

    def body(group: ProcessGroup) -> tuple[Log, list[torch.Tensor]]:
        log: Log = []
        parameters = make_parameters((4,), (4,))
        (_, early), (_, late) = parameters
        for index, parameter in enumerate((early, late)):
            parameter.register_post_accumulate_grad_hook(lambda _, i=index: log.append(("ready", i)))
        recording = RecordingGroup(group, log)
        reducer = Reducer(
            parameters,
            recording,  # type: ignore[arg-type]  # a stand-in
            bucket_cap_bytes=ONE_EACH,
            gradient_as_bucket_view=as_view,
        )
        factor = float(group.rank + 1)
        backward(reducer, lambda: (wait_in_backward(early * factor, lambda: recording.finished[0], log) * late).sum())
        recording.settle()
        return log, gradients(parameters)

    expected = [
        ("ready", 1),
        ("started", 0),
        ("finished", 0),
        ("waited", True),
        ("ready", 0),
        ("started", 1),
        ("finished", 1),
    ]
    mean_factor = (world_size + 1) / 2
    for log, found in run_ranks(world_size, body):
        assert log == expected
        for gradient in found:
            torch.testing.assert_close(gradient, torch.full((4,), mean_factor, dtype=torch.float64))


def test_buckets_start_in_order_on_every_rank_whatever_becomes_ready_first() -> None:
    """Every rank has another order of arrival, and rank 1 computes nothing until rank 0 has all its gradients.

    Rank 0 starts bucket 0 with its first gradient: were the reduction not asynchronous, neither could go on.
    """
    world_size, count = 4, 6
    arrivals = [[5, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5], [2, 5, 0, 3, 1, 4], [5, 0, 4, 1, 3, 2]]
    rank_0_is_done = threading.Event()

    def body(group: ProcessGroup) -> tuple[list[int], Log, list[torch.Tensor]]:
        log: Log = []
        parameters = make_parameters(*[(i + 1,) for i in range(count)])
        arrived: list[int] = []
        for index, (_, parameter) in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, i=index: arrived.append(i))
        recording = RecordingGroup(group, log)
        reducer = Reducer(parameters, recording, bucket_cap_bytes=ONE_EACH)  # type: ignore[arg-type]  # a stand-in

        waits: Log = []

        def release(_: torch.Tensor) -> None:
            if group.rank == 0 and len(arrived) == count:
                rank_0_is_done.set()

        for _, parameter in parameters:
            parameter.register_post_accumulate_grad_hook(release)
        loss = linear_loss(parameters, group.rank, arrival=arrivals[group.rank])
        if group.rank == 1:
            loss = wait_in_backward(loss, lambda: rank_0_is_done, waits)
        reducer.prepare_for_backward()
        loss.backward()
        recording.settle()
        assert waits == ([("waited", True)] if group.rank == 1 else [])
        return arrived, log, gradients(parameters)

    for rank, (arrived, log, found) in enumerate(run_ranks(world_size, body)):
        assert arrived == arrivals[rank], "the test's own premise"
        assert started(log) == list(range(count))
        assert [entry for entry in log if entry[0] == "finished"] == [("finished", k) for k in range(count)]
        for index, gradient in enumerate(found):
            assert torch.equal(gradient, average(world_size, index, gradient))


def test_statistics_tell_one_iteration() -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters((3,), (2,))
        reducer = Reducer(parameters, group, bucket_cap_bytes=ONE_EACH)
        for _ in range(2):
            backward(reducer, lambda: linear_loss(parameters, group.rank))
            seen = reducer.statistics
            assert [times.nbytes for times in seen.buckets] == [bucket.buffer.nbytes for bucket in reducer.buckets]
            assert sorted(times.nbytes for times in seen.buckets) == [16, 24]
            finished = [times.finished for times in seen.buckets]
            assert None not in finished
            for times in seen.buckets:
                assert seen.forward_started < seen.backward_started <= times.ready <= times.started
                assert times.started <= (times.finished or 0.0) <= seen.finished
            assert seen.backward_started <= seen.last_gradient <= seen.finished
            assert seen.last_gradient <= seen.finalize_started
            assert seen.finished - seen.finalize_started <= seen.waited_s <= seen.finished - seen.last_gradient

    run_ranks(2, body)


# ---- hooks ----


def test_each_backward_has_statistics_of_its_own() -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters((3,))
        reducer = Reducer(parameters, group)
        reducer.prepare_for_backward()
        loss = linear_loss(parameters, group.rank)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        first = reducer.statistics
        loss.backward()  # type: ignore[no-untyped-call]
        assert reducer.statistics is not first
        assert len(first.buckets) == len(reducer.statistics.buckets) == 1
        assert reducer.statistics.forward_started >= first.finished

    run_ranks(2, body)


@pytest.mark.parametrize("cap", [np.int64(8), np.int32(8), [np.int16(8), 8], np.array([8, 8])], ids=repr)
def test_limits_may_be_integers_of_numpy(cap: Any) -> None:
    (group,) = create_groups(1)
    parameters = [(name, torch.nn.Parameter(torch.ones(2))) for name in "abc"]
    reducer = Reducer(parameters, group, bucket_cap_bytes=cap, first_bucket_cap_bytes=np.int64(100))
    assert reducer.first_bucket_sizes == [8, 8, 8]


@pytest.mark.parametrize("count", [0, -1])
def test_a_divisor_below_one_is_refused(count: int) -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match=f"at least 1, or None, found {count}"):
            Reducer(make_parameters((3,)), group).divide_by(count)

    run_ranks(1, body)


def test_a_parameter_without_dimensions_cannot_be_sparse() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match="'p0' has no dimension"):
            Reducer(make_parameters(()), group, sparse=[True])

    run_ranks(1, body)


def future_of(value: Any) -> torch.futures.Future[Any]:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("in_place", [True, False])
def test_a_hook_reduces_instead_and_sees_undivided_gradients(as_view: bool, in_place: bool) -> None:
    def body(group: ProcessGroup) -> tuple[list[tuple[int, bool]], list[torch.Tensor]]:
        parameters = make_parameters((3,), (2, 2), (1,))
        reducer = Reducer(parameters, group, bucket_cap_bytes=ONE_EACH, gradient_as_bucket_view=as_view)
        calls = []

        def hook(state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            assert state == "the state"
            assert bucket.process_group() is group
            calls.append((bucket.index(), bucket.is_last()))
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                index = next(i for i, (_, p) in enumerate(parameters) if p is parameter)
                assert torch.equal(gradient, coefficient(group.rank, index, parameter))
            buffer = bucket.buffer() if in_place else bucket.buffer().clone()
            work = group.all_reduce(buffer, ReduceOp.MAX, async_op=True)
            return work.get_future().then(lambda done: done.value()[0] * (1 if in_place else 2))

        reducer.set_hook(hook, "the state")
        backward(reducer, lambda: linear_loss(parameters, group.rank))
        return calls, gradients(parameters)

    for calls, found in run_ranks(3, body):
        assert calls == [(0, False), (1, False), (2, True)]
        for index, gradient in enumerate(found):
            assert torch.equal(gradient, coefficient(2, index, gradient) * (1 if in_place else 2))


def test_a_hook_may_return_what_a_work_does() -> None:
    """`Work.get_future()` is a future of a list of one tensor."""

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        parameters = make_parameters((3,))
        reducer = Reducer(parameters, group)
        reducer.set_hook(lambda _, bucket: group.all_reduce(bucket.buffer(), async_op=True).get_future())  # type: ignore[arg-type, return-value]
        backward(reducer, lambda: linear_loss(parameters, group.rank))
        return gradients(parameters)

    for (gradient,) in run_ranks(2, body):
        assert torch.equal(gradient, 2 * average(2, 0, gradient))


def test_a_hook_that_never_finishes_ends_in_an_error_that_names_the_parameters() -> None:
    (group,) = create_groups(1, timeout_s=0.05)
    parameters = make_parameters((3,), (2,))
    reducer = Reducer(parameters, group)
    reducer.set_hook(lambda _state, _bucket: torch.futures.Future())
    with pytest.raises(CollectiveTimeout, match=r"(?s)bucket 0 did not finish within 0\.05 s.*rank 0.*'p1', 'p0'"):
        backward(reducer, lambda: linear_loss(parameters, 0))
    group.close()


@pytest.mark.parametrize("as_view", VIEWS)
def test_a_hook_that_leaves_a_buffer_of_another_dtype_in_place_may_return_that_dtype(as_view: bool) -> None:
    def body(group: ProcessGroup) -> list[torch.Tensor]:
        parameters = make_parameters((3,))
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view)

        def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            bucket.set_buffer(bucket.buffer().half())
            return group.all_reduce(bucket.buffer(), ReduceOp.AVG, async_op=True).get_future().then(lambda d: d.value()[0])

        reducer.set_hook(hook)
        backward(reducer, lambda: linear_loss(parameters, group.rank))
        return gradients(parameters)

    for (gradient,) in run_ranks(2, body):
        assert gradient.dtype == torch.float64
        torch.testing.assert_close(gradient, average(2, 0, gradient), rtol=1e-3, atol=0)


class HookError(Exception):
    pass


def raise_in_hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    raise HookError("from the hook")


def fail_in_future(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_exception(HookError("from the future"))  # type: ignore[arg-type]  # torch says "result: T"
    return future


@pytest.mark.parametrize(
    ("hook", "error", "complaint"),
    [
        pytest.param(
            lambda _, bucket: bucket.buffer(), MisuseError, "must return a torch.futures.Future.*found Tensor", id="tensor"
        ),
        pytest.param(lambda _, bucket: None, MisuseError, "must return a torch.futures.Future.*found NoneType", id="nothing"),
        pytest.param(
            lambda _, bucket: future_of(bucket.buffer()[:2]),
            MisuseError,
            "given a bucket of 3 elements and returned 2.*Parameters in it: p0",
            id="wrong size",
        ),
        pytest.param(
            lambda _, bucket: future_of(bucket.buffer().half()),
            MisuseError,
            r"bucket of torch\.float64.*returned one of torch\.float16",
            id="another dtype",
        ),
        pytest.param(lambda _, bucket: future_of("text"), MisuseError, "a future of str; expected the reduced", id="no tensor"),
        pytest.param(lambda _, bucket: future_of([]), MisuseError, "a future of list; expected the reduced", id="empty list"),
        pytest.param(raise_in_hook, HookError, "from the hook", id="raises"),
        pytest.param(fail_in_future, HookError, "from the future", id="its future fails"),
    ],
)
@pytest.mark.parametrize("as_view", VIEWS)
def test_a_hook_that_breaks_its_contract(hook: Any, error: type[Exception], complaint: str, as_view: bool) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters((3,))
        reducer = Reducer(parameters, group, gradient_as_bucket_view=as_view)
        reducer.set_hook(hook)
        with pytest.raises(error, match=complaint):
            backward(reducer, lambda: linear_loss(parameters, group.rank))
        assert_refuses_to_go_on(reducer)

    run_ranks(2, body)


def assert_refuses_to_go_on(reducer: Reducer) -> None:
    with pytest.raises(
        MisuseError, match=r"prepare_for_backward on rank \d of \d.*never ended.*or the DistributedOptimizer, anew"
    ):
        reducer.prepare_for_backward()
    with pytest.raises(MisuseError, match=r"set_hook on rank \d of \d"):
        reducer.set_hook(raise_in_hook)


# ---- what cannot be reduced ----


def test_parameters_that_got_no_gradient_are_named() -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters((3,), (2,), (1,), (4,))
        reducer = Reducer(parameters, group, bucket_cap_bytes=ONE_EACH)
        with pytest.raises(MisuseError, match=rf"rank {group.rank} of 2.*these parameters got no gradient in it: 'p0', 'p2'\."):
            backward(reducer, lambda: linear_loss(parameters, group.rank, arrival=[3, 1]))
        assert_refuses_to_go_on(reducer)

    run_ranks(2, body)


def test_a_gradient_that_is_ready_twice_is_named() -> None:
    """A layer that runs twice, each time in a re-entrant checkpoint of its own."""

    def body(group: ProcessGroup) -> None:
        layer, head = torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)
        model = torch.nn.ModuleDict({"layer": layer, "head": head})
        reducer = Reducer(list(model.named_parameters()), group)
        reducer.prepare_for_backward()
        hidden = torch.ones(2, 3, requires_grad=True)
        for _ in range(2):
            hidden = checkpoint(layer, hidden, use_reentrant=True)
        with pytest.raises(
            MisuseError, match=rf"'layer\.(weight|bias)' became ready twice.*rank {group.rank} of 2.*checkpoint"
        ):
            head(hidden).sum().backward()
        assert_refuses_to_go_on(reducer)

    run_ranks(2, body)


def test_a_sparse_gradient_is_refused_by_name() -> None:
    def body(group: ProcessGroup) -> None:
        table = torch.nn.Embedding(5, 3, sparse=True)
        reducer = Reducer([(f"table.{name}", parameter) for name, parameter in table.named_parameters()], group)
        with pytest.raises(
            MisuseError, match=r"dense gradient for parameter 'table\.weight' on rank .*found layout torch\.sparse_coo"
        ):
            backward(reducer, lambda: table(torch.tensor([1, 2])).sum())

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.filterwarnings("ignore:backward.create_graph=True.*not differentiated through:UserWarning")
@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("shape", [(3,), (300, 300)])  # of these, gradients would lie in the bucket's memory
def test_create_graph_averages_and_keeps_the_graph(shape: tuple[int, ...], as_view: bool) -> None:
    def body(group: ProcessGroup) -> None:
        named = make_parameters(shape, (2,))
        reducer = Reducer(named, group, gradient_as_bucket_view=as_view)
        (_, parameter), (_, other) = named
        for _ in range(3):
            with torch.no_grad():
                parameter.fill_(2.0)
            reducer.prepare_for_backward()
            ((group.rank + 1) * parameter**3).sum().add(other.sum()).backward(create_graph=True)
            gradient = parameter.grad
            assert gradient is not None
            assert torch.equal(gradient, torch.full(shape, 1.5 * 3 * 4)), "the mean over both ranks"
            (second,) = torch.autograd.grad(gradient.sum(), parameter)
            assert torch.equal(second, torch.full(shape, (group.rank + 1) * 6 * 2.0 / 2)), "of this rank's part of the mean"
            assert not other.grad.requires_grad, "no graph leads to a constant"  # type: ignore[union-attr]
            parameter.grad = other.grad = None  # torch's own warning: the gradient and its graph refer to one another

    run_ranks(2, body)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_create_graph_says_what_it_does_not_do() -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters((3,))
        reducer = Reducer(parameters, group)
        reducer.prepare_for_backward()
        with pytest.warns(UserWarning, match="already divided by the number of ranks: add up the parts of all ranks"):
            (parameters[0][1] ** 3).sum().backward(create_graph=True)
        parameters[0][1].grad = None

    run_ranks(1, body)


def test_an_error_in_backward_is_the_callers_and_is_remembered() -> None:
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
            return tensor.view_as(tensor)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise HookError("from the model")

    def body(group: ProcessGroup) -> None:
        parameters = make_parameters((3,), (3,))
        (_, early), (_, late) = parameters
        reducer = Reducer(parameters, group, bucket_cap_bytes=ONE_EACH)
        with pytest.raises(HookError, match="from the model"):
            backward(reducer, lambda: (Broken.apply(early * 2) * late).sum())
        assert_refuses_to_go_on(reducer)

    run_ranks(2, body)


def test_construction_refuses_nothing_to_reduce() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(MisuseError, match="at least one parameter"):
            Reducer([], group)
        frozen = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        with pytest.raises(MisuseError, match=r"'fc\.weight' does not require a gradient"):
            Reducer([("fc.weight", frozen)], group)

    run_ranks(1, body)


# ---- the end ----


@pytest.mark.parametrize("how", ["close", "end of life"])
def test_parameters_are_free_again_after_the_end(how: str) -> None:
    def body(group: ProcessGroup) -> None:
        parameters = make_parameters((3,))
        log: Log = []
        reducer = Reducer(parameters, RecordingGroup(group, log))  # type: ignore[arg-type]  # a stand-in
        backward(reducer, lambda: linear_loss(parameters, group.rank))
        assert started(log) == [0]
        averaged = gradients(parameters)
        alive = weakref.ref(reducer)
        if how == "close":
            reducer.close()
        del reducer
        gc.collect()
        assert alive() is None, "the parameters' hooks do not keep it"

        assert torch.equal(gradients(parameters)[0], averaged[0]), "the gradients stay"
        parameters[0][1].grad = None
        linear_loss(parameters, group.rank).backward()
        assert torch.equal(gradients(parameters)[0], coefficient(group.rank, 0, parameters[0][1]))
        assert started(log) == [0]

    run_ranks(2, body)


def test_a_new_reducer_works_after_a_failed_one() -> None:
    """The remedy that the error names."""

    def body(group: ProcessGroup) -> list[torch.Tensor]:
        parameters = make_parameters((3,), (2,))
        reducer = Reducer(parameters, group, bucket_cap_bytes=ONE_EACH)
        with pytest.raises(MisuseError, match="got no gradient"):
            backward(reducer, lambda: linear_loss(parameters, group.rank, arrival=[0]))
        for _, parameter in parameters:
            parameter.grad = None
        reducer = Reducer(parameters, group, bucket_cap_bytes=ONE_EACH)
        backward(reducer, lambda: linear_loss(parameters, group.rank))
        return gradients(parameters)

    for found in run_ranks(2, body):
        for index, gradient in enumerate(found):
            assert torch.equal(gradient, average(2, index, gradient))
