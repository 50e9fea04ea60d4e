"""DDP over the group for NCCL, with fakes for NCCL and the GPU: its futures are complete as soon as they are asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from syncline.collectives import ProcessGroup
from syncline.ddp import DistributedDataParallel, convert_sync_batchnorm
from test_support.fake_device import CPU
from test_support.fake_nccl_group import run_on_fakes
from test_support.races import RaceChecker

pytestmark = pytest.mark.ranks


def averaging(group: ProcessGroup, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """A hook whose callback issues and waits for another collective."""

    def again(done: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        total = done.value()[0]
        group.all_reduce(total, async_op=True).wait()
        return total / group.size**2

    return group.all_reduce(bucket.buffer(), async_op=True).get_future().then(again)


@pytest.mark.parametrize("hook", [None, averaging])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_training_equals_that_of_the_whole_batch(size: int, hook: Any) -> None:
    torch.manual_seed(3)
    first = torch.nn.Sequential(torch.nn.Linear(12, 64), torch.nn.ReLU(), torch.nn.Linear(64, 5)).double()

    def body(group: ProcessGroup) -> None:
        whole, mine = copy.deepcopy(first), copy.deepcopy(first)
        if group.rank > 0:
            for parameter in mine.parameters():
                parameter.data.zero_()  # rank 0's state must win
        ddp = DistributedDataParallel(mine, process_group=group, bucket_cap_mb=0.001)
        if hook is not None:
            ddp.register_comm_hook(group, hook)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (whole, mine)]
        for step in range(3):
            inputs = torch.randn(4 * size, 12, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
            whole(inputs).square().mean().backward()
            ddp(inputs[group.rank :: size]).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for expected, found in zip(whole.parameters(), mine.parameters(), strict=True):
            torch.testing.assert_close(found, expected)

    run_on_fakes(size, body)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_batch_normalisation_sees_the_batches_of_all_ranks(size: int) -> None:
    torch.manual_seed(4)
    first = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).double()

    def body(group: ProcessGroup) -> None:
        whole, mine = copy.deepcopy(first), copy.deepcopy(first)
        ddp = DistributedDataParallel(convert_sync_batchnorm(mine, group), process_group=group)
        inputs = torch.randn(4 * size, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        whole(inputs).square().mean().backward()
        ddp(inputs[group.rank :: size]).square().mean().backward()
        for expected, found in zip(whole.parameters(), ddp.parameters(), strict=True):
            torch.testing.assert_close(found.grad, expected.grad)
        torch.testing.assert_close(dict(mine.named_buffers())["1.running_var"], whole[1].running_var)

    run_on_fakes(size, body)


@pytest.mark.parametrize("as_view", [False, True])
def test_each_forward_may_run_on_another_stream(monkeypatch: pytest.MonkeyPatch, as_view: bool) -> None:
    """Autograd accumulates a gradient on the stream on which the parameter's node was made, which lives while it is held.

    As where a program warms up on a stream of its own, and goes on on another one.
    """
    monkeypatch.setattr(torch.nn.Parameter, "is_cpu", property(lambda _: False))  # the CPU plays a GPU
    checker = RaceChecker()
    with checker.watching():
        module = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        ddp = DistributedDataParallel(module, process_group=checker.group, gradient_as_bucket_view=as_view)
        checker.made_here(ddp.parameters())
        for _ in range(3):
            stream = checker.device.stream(CPU, is_own=False)
            stream.wait_for(checker.device.now(CPU))
            with stream.current():
                for _ in range(2):
                    ddp.zero_grad(set_to_none=False)
                    checker.backward(ddp(torch.ones(5, 4)).square().mean())
                done = stream.record()
            done.order_current_stream()
    assert checker.races == []
