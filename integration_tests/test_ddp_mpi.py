"""DistributedDataParallel over real ranks: gradients, hooks, overlap, and equal replicas."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline.collectives import DisagreementError, MisuseError, ProcessGroup, exchange_objects
from syncline.ddp import DistributedDataParallel
from syncline.hooks import allreduce_hook, fp16_compress_hook, noop_hook
from syncline.reducer import GradBucket
from test_support.desync_programs import as_default
from test_support.training_runs import SHARE, VIEWS, gradients, make_data, state, train

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("one_thread")]

IMAGE = (1, 4, 4)
SMALL_CAP_MB = 512 / 1024**2  # several buckets even for a small model


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 6, 3, padding=1),
        torch.nn.Tanh(),
        torch.nn.Flatten(),
        torch.nn.Linear(6 * 16, 20),
        torch.nn.LayerNorm(20),
        torch.nn.Linear(20, 3),
    ).double()


def rows_of(group: ProcessGroup) -> slice:
    return slice(group.rank * SHARE, (group.rank + 1) * SHARE)


def assert_bitwise_equal_on_all_ranks(group: ProcessGroup, tensors: list[torch.Tensor]) -> None:
    versions = exchange_objects([tensor.numpy().tobytes() for tensor in tensors], group=group)
    assert [version == versions[0] for version in versions] == [True] * group.size


# ---- training ----


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("cap_mb", [SMALL_CAP_MB, 25])
def test_training_equals_local_training_on_the_whole_batch(mpi_group: ProcessGroup, as_view: bool, cap_mb: float) -> None:
    steps = 6
    inputs, targets = make_data(steps, mpi_group.size * SHARE, IMAGE)
    # Each rank begins with other weights: only the broadcast of rank 0's state makes them equal.
    model = DistributedDataParallel(
        make_model(seed=mpi_group.rank), process_group=mpi_group, bucket_cap_mb=cap_mb, gradient_as_bucket_view=as_view
    )
    mine = rows_of(mpi_group)
    final, history = train(model, inputs[:, mine], targets[:, mine])
    whole_final, whole_history = train(make_model(), inputs, targets)

    torch.testing.assert_close(history, whole_history, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(final, whole_final, rtol=1e-9, atol=1e-12)
    assert_bitwise_equal_on_all_ranks(mpi_group, [*final, *(gradient for step in history for gradient in step)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_are_averaged_and_kept(mpi_group: ProcessGroup, dtype: torch.dtype) -> None:
    module = torch.nn.Linear(3, 1, bias=False).to(dtype)
    model = DistributedDataParallel(module, process_group=mpi_group)
    model((torch.arange(3) + mpi_group.rank + 1).to(dtype).view(1, 3)).sum().backward()

    (gradient,) = gradients(module)
    assert gradient.dtype == dtype
    assert gradient.tolist() == [[i + (mpi_group.size + 1) / 2 for i in range(3)]]


@pytest.mark.parametrize("as_view", VIEWS)
def test_accumulation_without_synchronisation(mpi_group: ProcessGroup, as_view: bool) -> None:
    inputs, targets = make_data(6, mpi_group.size * SHARE, IMAGE)
    model = DistributedDataParallel(
        make_model(), process_group=mpi_group, bucket_cap_mb=SMALL_CAP_MB, gradient_as_bucket_view=as_view
    )
    mine = rows_of(mpi_group)
    for start in (0, 3):
        model.zero_grad()
        with model.no_sync():
            for step in (start, start + 1):
                torch.nn.functional.mse_loss(model(inputs[step, mine]), targets[step, mine]).backward()
        torch.nn.functional.mse_loss(model(inputs[start + 2, mine]), targets[start + 2, mine]).backward()

        local = make_model()
        for step in range(start, start + 3):
            torch.nn.functional.mse_loss(local(inputs[step]), targets[step]).backward()
        torch.testing.assert_close(gradients(model), gradients(local), rtol=1e-10, atol=1e-13)
        assert_bitwise_equal_on_all_ranks(mpi_group, gradients(model))


@pytest.mark.parametrize("holds", [lambda gradient: gradient, lambda gradient: gradient[:1]], ids=["gradients", "views"])
def test_what_one_rank_keeps_of_large_gradients_stays(mpi_group: ProcessGroup, holds: Callable[[torch.Tensor], Any]) -> None:
    """The gradients lie in shared memory, to which other ranks do not write as long as somebody holds them."""
    weight = torch.nn.Linear(512, 512, bias=False)
    model = DistributedDataParallel(weight, process_group=mpi_group)
    kept = []
    for step in range(6):
        model.zero_grad()
        model(torch.full((1, 512), float(mpi_group.rank + step))).sum().backward()
        average = step + (mpi_group.size - 1) / 2
        (gradient,) = gradients(weight)
        assert gradient.eq(average).all()
        if mpi_group.rank == 0 and 2 <= step < 4:
            assert weight.weight.grad is not None
            kept.append((holds(weight.weight.grad), average))
        assert all(held.eq(average).all() for held, average in kept)
    assert_bitwise_equal_on_all_ranks(mpi_group, gradients(weight))


def test_one_rank_may_copy_the_wrapped_model(mpi_group: ProcessGroup) -> None:
    """As for an average of the weights on rank 0: the copy is a usual module, and does not communicate."""
    with as_default(mpi_group):
        inputs, targets = make_data(2, SHARE * mpi_group.size, IMAGE)
        initial = torch.nn.Sequential(make_model(), torch.nn.Linear(3, 40_000), torch.nn.Linear(40_000, 3)).double()
        whole, _ = train(copy.deepcopy(initial), inputs, targets)
        model = DistributedDataParallel(copy.deepcopy(initial))
        ours = copy.deepcopy(model) if mpi_group.rank == 0 else None
        found, _ = train(model, inputs[:, rows_of(mpi_group)], targets[:, rows_of(mpi_group)])
        torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-12)
        if ours is not None:
            torch.testing.assert_close(state(ours.module), state(initial), rtol=0, atol=0)
            with torch.no_grad():
                for mean, now in zip(ours.parameters(), model.parameters(), strict=True):
                    mean.lerp_(now, 0.5)
                ours.module(inputs[0])


def test_modules_that_differ_are_refused_on_every_rank(mpi_group: ProcessGroup) -> None:
    if mpi_group.size == 1:
        pytest.skip("one rank agrees with itself")
    last = mpi_group.size - 1
    with pytest.raises(DisagreementError) as caught:
        DistributedDataParallel(torch.nn.Linear(2, 5 if mpi_group.rank == last else 4), process_group=mpi_group)
    for word in (
        "'weight'",
        "float32[4, 2] with strides [2, 1] on rank 0",
        f"float32[5, 2] with strides [2, 1] on rank {last}",
    ):
        assert word in str(caught.value)


def test_an_unused_parameter_is_named(mpi_group: ProcessGroup) -> None:
    module = torch.nn.ModuleDict({"used": torch.nn.Linear(2, 1), "unused": torch.nn.Linear(2, 1)})
    module.forward = lambda inputs: module["used"](inputs)
    model = DistributedDataParallel(module, process_group=mpi_group, bucket_cap_mb=1e-6)
    with pytest.raises(MisuseError, match=r"got no gradient in it: 'unused\.weight', 'unused\.bias'"):
        model(torch.ones(1, 2)).sum().backward()


# ---- hooks ----


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.parametrize("explicit_group", [True, False])
def test_the_allreduce_hook_is_what_happens_without_a_hook(
    mpi_group: ProcessGroup, as_view: bool, explicit_group: bool
) -> None:
    inputs, targets = make_data(3, mpi_group.size * SHARE, IMAGE)
    mine = rows_of(mpi_group)
    results = []
    for hook in (None, allreduce_hook):
        model = DistributedDataParallel(
            make_model(), process_group=mpi_group, bucket_cap_mb=SMALL_CAP_MB, gradient_as_bucket_view=as_view
        )
        if hook is not None:
            model.register_comm_hook(mpi_group if explicit_group else None, hook)
        results.append(train(model, inputs[:, mine], targets[:, mine])[1])

    for plain, hooked in zip(*results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(plain, hooked, strict=True))


@pytest.mark.parametrize("as_view", VIEWS)
def test_the_fp16_hook_averages_up_to_the_rounding_of_halves(mpi_group: ProcessGroup, as_view: bool) -> None:
    inputs, targets = make_data(1, mpi_group.size * SHARE, IMAGE)
    mine = rows_of(mpi_group)
    model = DistributedDataParallel(
        make_model(), process_group=mpi_group, bucket_cap_mb=SMALL_CAP_MB, gradient_as_bucket_view=as_view
    )
    model.register_comm_hook(None, fp16_compress_hook)
    _, (found,) = train(model, inputs[:, mine], targets[:, mine])
    _, (whole,) = train(make_model(), inputs, targets)

    for gradient, expected in zip(found, whole, strict=True):
        assert gradient.dtype == torch.float64
        assert torch.equal(gradient, gradient.half().double())
        torch.testing.assert_close(gradient, expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))
    assert_bitwise_equal_on_all_ranks(mpi_group, found)


def test_the_noop_hook_leaves_every_rank_its_own(mpi_group: ProcessGroup) -> None:
    inputs, targets = make_data(1, mpi_group.size * SHARE, IMAGE)
    mine = rows_of(mpi_group)
    model = DistributedDataParallel(make_model(), process_group=mpi_group)
    model.register_comm_hook(None, noop_hook)
    _, (found,) = train(model, inputs[:, mine], targets[:, mine])
    _, (own,) = train(make_model(), inputs[:, mine], targets[:, mine])

    assert all(torch.equal(a, b) for a, b in zip(found, own, strict=True))


# ---- overlap ----


class WaitInBackward(torch.autograd.Function):
    """The identity; its backward continues only after an event, and notes whether the event came."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, event: threading.Event, log: list[str]) -> torch.Tensor:
        ctx.event, ctx.log = event, log
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *found: Any) -> Any:
        ctx.log.append("bucket 0 was reduced" if ctx.event.wait(20.0) else "waited in vain for bucket 0")
        return found[0], None, None


class Waiting(torch.nn.Module):
    """Two layers; the backward of the first waits until the gradient of the second has been reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = torch.nn.Linear(2, 2).double(), torch.nn.Linear(2, 2).double()
        self.event, self.log = threading.Event(), list[str]()
        self.early.weight.register_post_accumulate_grad_hook(lambda _: self.log.append("last gradient"))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = WaitInBackward.apply(self.early(inputs), self.event, self.log)
        return self.late(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("as_view", VIEWS)
@pytest.mark.filterwarnings("ignore:.*hooks on the gradient before it is averaged")
def test_bucket_0_is_reduced_before_the_last_gradient_is_ready(mpi_group: ProcessGroup, as_view: bool) -> None:
    module = Waiting()
    model = DistributedDataParallel(module, process_group=mpi_group, bucket_cap_mb=1e-6, gradient_as_bucket_view=as_view)

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        def finish(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            if bucket.index() == 0:
                module.event.set()
            return done.value()

        return allreduce_hook(None, bucket).then(finish)

    model.register_comm_hook(None, hook)
    for _ in range(2):  # before the rebuild and after it
        module.event.clear()
        module.log.clear()
        model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
        assert module.log == ["bucket 0 was reduced", "last gradient"]


# ---- stress ----


@pytest.mark.parametrize("as_view", VIEWS)
def test_replicas_stay_identical_when_ranks_stumble(mpi_group: ProcessGroup, as_view: bool) -> None:
    """50 steps; each rank pauses at random, in forward, in backward, and in the callbacks of its collectives."""
    steps = 50
    dice = random.Random(mpi_group.rank)

    def stumble(*_: object) -> None:
        if dice.random() < 0.3:
            time.sleep(dice.random() * 2e-3)

    inputs, targets = make_data(steps, mpi_group.size * SHARE, IMAGE)
    module = copy.deepcopy(make_model()).float()
    for layer in module.children():
        layer.register_forward_hook(stumble)
    for parameter in module.parameters():
        parameter.register_hook(stumble)
    model = DistributedDataParallel(
        module, process_group=mpi_group, bucket_cap_mb=SMALL_CAP_MB, gradient_as_bucket_view=as_view
    )

    def hook(_: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        def finish(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            stumble()
            return done.value()

        return allreduce_hook(None, bucket).then(finish)

    model.register_comm_hook(None, hook)
    mine = rows_of(mpi_group)
    final, history = train(model, inputs[:, mine].float(), targets[:, mine].float())

    assert_bitwise_equal_on_all_ranks(mpi_group, [*final, *(gradient for step in history for gradient in step)])
    assert all(bool(torch.isfinite(tensor).all()) for tensor in final)
