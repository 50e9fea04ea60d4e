"""DDP over the group for NCCL, with fakes for NCCL and the GPU: its futures are complete as soon as they are asked for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from syncline.collectives import ProcessGroup
from syncline.ddp import DistributedDataParallel, convert_sync_batchnorm
from test_support.fake_nccl_group import run_on_fakes

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
