"""torch.distributed's calls over a group on NCCL, with fakes for NCCL and the GPU."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import CollectiveTimeout, TransportError
from syncline.collectives.torch_backend import TorchProcessGroup
from syncline.collectives.torch_bridge import group_factory
from syncline.collectives.transports.nccl.group import NcclGroup
from test_support.fake_nccl import NcclError
from test_support.fake_nccl_group import run_on_fakes

pytestmark = pytest.mark.ranks


def as_torchs(group: NcclGroup) -> TorchProcessGroup:
    return TorchProcessGroup(group, dist.HashStore(), "syncline-nccl")


def test_calls_of_torch() -> None:
    def body(group: NcclGroup) -> None:
        torchs, rank, peer = as_torchs(group), group.rank, 1 - group.rank
        tensor = torch.arange(4.0) * (rank + 1)
        doubled = torchs.allreduce([tensor]).get_future().then(lambda done: done.value()[0] * 2).wait()
        assert doubled.tolist() == [0.0, 6.0, 12.0, 18.0]
        output = torch.zeros(2)
        torchs.reduce_scatter_single(output, tensor).wait()
        assert output.tolist() == ([0.0, 6.0], [12.0, 18.0])[rank]
        gathered = torch.zeros(4)
        gathered[2 * rank : 2 * rank + 2] = output  # the input is a part of the output, as FSDP has it
        torchs.all_gather_single(gathered, gathered[2 * rank : 2 * rank + 2]).wait()
        assert gathered.tolist() == [0.0, 6.0, 12.0, 18.0]
        received = torch.zeros(2)
        for work in (torchs.recv([received], peer), torchs.send([output + rank], peer)):
            work.wait()
        assert received.tolist() == ([13.0, 19.0], [0.0, 6.0])[rank]
        torchs.barrier().wait()

    run_on_fakes(2, body)


def test_coalescing() -> None:
    def body(group: NcclGroup) -> None:
        torchs = as_torchs(group)
        tensors = [torch.full((n,), float(group.rank + n)) for n in (1, 5)]
        torchs._start_coalescing(torch.device("cpu"))
        for tensor in tensors:
            torchs.allreduce([tensor])
        torchs._end_coalescing(torch.device("cpu")).wait()
        assert [tensor.unique().tolist() for tensor in tensors] == [[3.0], [11.0]]

    run_on_fakes(2, body)


def test_a_new_time_limit_reaches_the_watchdog() -> None:
    def body(group: NcclGroup) -> None:
        torchs = as_torchs(group)
        torchs.barrier().wait()
        torchs.set_timeout(timedelta(seconds=0.2))
        if group.rank == 0:
            with pytest.raises(CollectiveTimeout, match=r"did not finish within 0\.2 s"):
                torchs.allreduce([torch.ones(1)]).wait(timedelta(seconds=10))

    run_on_fakes(2, body)


def test_a_failure_that_nobody_heard_of_is_told_at_the_end() -> None:
    """And torch's group is over all the same."""
    closed: list[bool] = []

    def body(group: NcclGroup) -> None:
        torchs = TorchProcessGroup(group, dist.HashStore(), "syncline-nccl", on_close=lambda: closed.append(True))
        torchs.barrier().wait()
        if group.rank == 0:
            torchs.allreduce([torch.ones(1)])
            group._connections._made[0].communicator._raw.break_down(NcclError(6, "remote process exited"))
            with pytest.raises(TransportError, match="remote process exited"):
                torchs.shutdown()
            assert closed == [True]

    run_on_fakes(2, body)


@pytest.fixture
def torchs_default_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[NcclGroup]]:
    """torch.distributed over "syncline-nccl", which finds the group put into this list."""
    groups: list[NcclGroup] = []
    monkeypatch.setattr(group_factory, "_connect", lambda *_: groups[0])
    yield groups
    if dist.is_initialized():
        dist.destroy_process_group()


def test_native_ddp(torchs_default_group: list[NcclGroup]) -> None:
    """Its C++ reducer issues the all-reduces and asks for their futures."""

    def body(group: NcclGroup) -> None:
        torchs_default_group.append(group)
        dist.init_process_group("syncline-nccl", store=dist.HashStore(), rank=0, world_size=1)
        assert dist.get_backend() == "syncline-nccl"
        torch.manual_seed(0)
        local = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
        wrapped = torch.nn.parallel.DistributedDataParallel(local)
        data = torch.arange(20.0).view(4, 5)
        expected = torch.autograd.grad(local(data).square().mean(), list(local.parameters()))
        wrapped(data).square().mean().backward()
        for parameter, gradient in zip(local.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad, gradient)
        assert next(group._numbers) > 1  # it went this way
        dist.destroy_process_group()

    run_on_fakes(1, body, lazily=False)
