"""Ranks over NCCL whose GPUs are threads: those that are left meet in the host group, and connect again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import BackendUnavailableError, GroupClosedError, ProcessGroup, TransportError
from syncline.collectives.engine.composed import PerDeviceGroup
from syncline.collectives.transports.nccl.connections import Connector
from syncline.collectives.transports.nccl.group import NcclGroup
from syncline.collectives.transports.nccl.rendezvous import GroupRendezvous, Rendezvous, StoreRendezvous
from syncline.collectives.transports.threads import InProcessGroup, create_groups
from test_support.fake_device import FakeDevice
from test_support.fake_nccl import FakeNccl, NcclError
from test_support.fake_nccl_group import NcclGroupOnFakes

SIZE, VICTIM = 3, 1


@pytest.fixture(autouse=True)
def _tensors_of_the_host_pass_for_those_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NcclGroup, "device_types", property(lambda _: frozenset({"cpu", "cuda"})))


def over_nccl(nccl: FakeNccl, rendezvous: Rendezvous, rank: int, size: int = SIZE) -> NcclGroup:
    return NcclGroupOnFakes(
        Connector(nccl, FakeDevice(f"0000:{rank:02x}:00.0"), rendezvous, range(size), rank, "ranks"), timeout_s=30
    )


def summed(group: ProcessGroup, number: float) -> float:
    tensor = torch.tensor([number])
    group.all_reduce(tensor)
    return tensor.item()


def lose_one(make: Callable[[FakeNccl, InProcessGroup], tuple[ProcessGroup, NcclGroup]]) -> list[Any]:
    """What each rank's `make` gave, is broken and shrunk; what is left reports its members, rank and a sum."""
    nccl, hosts = FakeNccl(), create_groups(SIZE, timeout_s=60)

    def rank_body(rank: int) -> Any:
        group, broken = make(nccl, hosts[rank])
        assert summed(broken, 1.0) == SIZE
        if rank == VICTIM:
            hosts[rank].lose()
            return None
        part = broken.subset([0, 2], "the others")
        work = broken.all_reduce(torch.ones(1), async_op=True)
        error = NcclError(6, "remote process exited or there was a network error")
        broken._connections._made[0].communicator._raw.break_down(error)
        with pytest.raises(TransportError, match="A rank of the group died"):
            work.wait(20)
        shrunk = group.shrink(silence_timeout_s=20)
        now = shrunk.groups["cuda"] if isinstance(shrunk, PerDeviceGroup) else shrunk
        found = shrunk.members, shrunk.rank, now.members, summed(now, 1.0 + rank)
        for each in (now, now.subset([0, 1], "both")):
            assert each.recorder.members == (0, 2), "the reports' ranks are those with which the job began"
        with pytest.raises(GroupClosedError, match="there is a newer group already"):
            broken.all_reduce(torch.ones(1))
        part.abort()
        shrunk.close()
        return found

    with ThreadPoolExecutor(SIZE) as threads:
        return list(threads.map(rank_body, range(SIZE)))


LEFT = [((0, 2), 0, (0, 2), 4.0), None, ((0, 2), 1, (0, 2), 4.0)]


@pytest.mark.ranks
def test_a_group_that_owns_where_it_meets_shrinks_that() -> None:
    def make(nccl: FakeNccl, host: InProcessGroup) -> tuple[ProcessGroup, NcclGroup]:
        group = over_nccl(nccl, GroupRendezvous(host, owned=True), host.rank)
        return group, group

    assert lose_one(make) == LEFT


@pytest.mark.ranks
def test_the_group_of_all_devices_shrinks_that_of_the_host_and_the_others_meet_there() -> None:
    def make(nccl: FakeNccl, host: InProcessGroup) -> tuple[ProcessGroup, NcclGroup]:
        group = over_nccl(nccl, GroupRendezvous(host, owned=False), host.rank)
        assert "shrink the group of all devices" in str(group.missing_for_shrink())
        return PerDeviceGroup({"cpu": host, "cuda": group}), group

    assert lose_one(make) == LEFT


@pytest.mark.ranks
def test_who_cannot_shrink_says_why() -> None:
    (host,) = create_groups(1)
    in_store = over_nccl(FakeNccl(), StoreRendezvous(dist.HashStore()), 0, 1)
    with pytest.raises(BackendUnavailableError, match=r"met in a store.*cpu:gloo,cuda:nccl"):
        in_store.shrink()
    with pytest.raises(BackendUnavailableError, match="the ranks of backend 'nccl' do not meet in the group of 'in_process'"):
        PerDeviceGroup({"cpu": host, "cuda": in_store}).shrink()
    with pytest.raises(BackendUnavailableError, match="a part of another one"):
        in_store.subset([0], "part").shrink()
    in_store.close()
