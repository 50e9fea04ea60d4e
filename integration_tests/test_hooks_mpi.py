"""Every hook on our DDP over real ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline import hooks
from syncline.collectives import ProcessGroup, exchange_objects
from syncline.collectives.transports.threads import create_groups
from syncline.ddp import DistributedDataParallel

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("one_thread")]

STEPS = 4
BATCH = 12  # divides over 1 to 4 ranks
CAP_MB = 0.003  # small, for several buckets, and collectives of several buckets in flight

Named = list[tuple[str, torch.Tensor]]
MakeState = Callable[[Named], Any]


def power(**settings: Any) -> MakeState:
    return lambda named: hooks.PowerSGDState(None, 2, 2, **settings, named_parameters=named)


def compressed(compressor: hooks.Compressor) -> MakeState:
    return lambda named: hooks.CompressionState(compressor, named_parameters=named)


def nothing(named: Named) -> None:
    return None


def phases(named: Named) -> hooks.ScheduleState:
    low_rank = hooks.PowerSGDState(None, 2, 0, warm_start=False, use_error_feedback=False, named_parameters=named)
    return hooks.ScheduleState([hooks.Phase(0, hooks.allreduce_hook), hooks.Phase(2, hooks.powerSGD_hook, low_rank)])


def local(named: Named) -> hooks.PostLocalSGDState:
    return hooks.PostLocalSGDState(None, None, STEPS, post_local_gradient_allreduce=False)


# These hooks are linear: the mean of the ranks' results equals the result of one rank for the whole batch.
LINEAR: dict[str, tuple[Any, MakeState]] = {
    "allreduce": (hooks.allreduce_hook, nothing),
    "power": (hooks.powerSGD_hook, power()),
    "power same shapes": (hooks.powerSGD_hook, power(batch_tensors_with_same_shape=True)),
    "power cold": (hooks.powerSGD_hook, power(warm_start=False)),
    "batched power": (hooks.batched_powerSGD_hook, power()),
    "random": (hooks.compression_hook, compressed(hooks.RandomK(0.2))),
    "schedule": (hooks.schedule_hook, phases),
    "local": (hooks.post_localSGD_hook, local),
}
OTHERS: dict[str, tuple[Any, MakeState]] = {
    "fp16": (hooks.fp16_compress_hook, nothing),
    "bf16": (hooks.bf16_compress_hook, nothing),
    "power in halves": (hooks.bf16_compress_wrapper(hooks.powerSGD_hook), power()),
    "int8": (hooks.compression_hook, compressed(hooks.Int8())),
    "int8 channels": (hooks.compression_hook, compressed(hooks.Int8(per_channel=True))),
    "one-bit": (hooks.compression_hook, compressed(hooks.OneBit())),
    "top": (hooks.compression_hook, compressed(hooks.TopK(0.2))),
}


def gradients(group: ProcessGroup, hook: Any, make_state: MakeState) -> list[torch.Tensor]:
    """The gradients of a few steps; each rank has its part of the batch."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(8, 20), torch.nn.Tanh(), torch.nn.Linear(20, 20), torch.nn.Linear(20, 20))
    module = module.double()
    model = DistributedDataParallel(module, process_group=group, bucket_cap_mb=CAP_MB)
    model.register_comm_hook(make_state(list(module.named_parameters())), hook)
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 8, generator=generator, dtype=torch.float64)[group.rank :: group.size]
        model(inputs).square().mean().backward()
        for parameter in module.parameters():
            assert parameter.grad is not None
            found.append(parameter.grad.clone())
            with torch.no_grad():
                parameter -= 0.1 * parameter.grad
            parameter.grad = None
    return found


def assert_bitwise_equal_on_all_ranks(group: ProcessGroup, tensors: list[torch.Tensor]) -> None:
    versions = exchange_objects([tensor.numpy().tobytes() for tensor in tensors], group=group)
    assert [version == versions[0] for version in versions] == [True] * group.size


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_hook_does_to_the_ranks_parts_what_it_does_to_the_whole_batch(mpi_group: ProcessGroup, name: str) -> None:
    found = gradients(mpi_group, *LINEAR[name])
    (alone,) = create_groups(1)
    torch.testing.assert_close(found, gradients(alone, *LINEAR[name]), rtol=1e-7, atol=1e-10)
    assert_bitwise_equal_on_all_ranks(mpi_group, found)


@pytest.mark.parametrize("name", OTHERS)
def test_another_hook_leaves_all_ranks_the_same_bits_near_the_uncompressed(mpi_group: ProcessGroup, name: str) -> None:
    found = gradients(mpi_group, *OTHERS[name])
    assert_bitwise_equal_on_all_ranks(mpi_group, found)
    (alone,) = create_groups(1)
    exact = gradients(alone, *LINEAR["allreduce"])
    for gradient, expected in zip(found[:6], exact[:6], strict=True):
        assert torch.linalg.norm(gradient - expected) < 0.95 * torch.linalg.norm(expected)
    assert any(not torch.allclose(a, b) for a, b in zip(found, exact, strict=True)), "not compressed at all"
