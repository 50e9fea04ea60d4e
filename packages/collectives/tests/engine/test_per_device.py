"""One group for each type of device, and what each is told."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from syncline.collectives import GroupClosedError, InvalidArgumentError, ProcessGroup, RoundRobinGroup, TransportError
from syncline.collectives.startup.backend import Backend, ConnectRequest
from syncline.collectives.startup.registry import PerDeviceBackend
from syncline.collectives.transports.threads import backend as in_process

REQUEST = ConnectRequest(None, None, None, None, 5.0)


class OnItsDevice(Backend):
    """The in-process backend, as one that serves whatever it was connected for."""

    def __init__(self) -> None:
        self.requests: list[ConnectRequest] = []

    def missing(self) -> None:
        return None

    def connect(self, request: ConnectRequest) -> ProcessGroup:
        self.requests.append(request)
        group = in_process.connect(REQUEST)
        group._device_types = request.devices
        return group


@pytest.fixture
def backend() -> OnItsDevice:
    return OnItsDevice()


def test_each_backend_hears_which_device_it_is_for(backend: OnItsDevice) -> None:
    """MPI need not find out whether it could send CUDA memory if that goes another way."""
    group = PerDeviceBackend({"cuda": backend, "cpu": backend}).connect(REQUEST)
    cpu, cuda = backend.requests
    assert (cpu.devices, cuda.devices) == ({"cpu"}, {"cuda"})
    assert (cpu.wants("cuda"), cuda.wants("cuda"), REQUEST.wants("cuda")) == (False, True, True)
    assert cuda.host_group is group.groups["cpu"]
    group.close()


@pytest.mark.parametrize("order", [("cpu", "cuda"), ("cuda", "cpu")])
def test_all_are_closed_also_if_one_cannot_and_the_hosts_group_last(backend: OnItsDevice, order: tuple[str, str]) -> None:
    closed: list[str] = []

    def close(name: str) -> None:
        closed.append(name)
        if name == "cuda":
            raise TransportError("a failure that nobody was told of")

    group = PerDeviceBackend(dict.fromkeys(order, backend)).connect(REQUEST)
    for name, part in group.groups.items():
        part.close = partial(close, name)
    with pytest.raises(TransportError, match="nobody was told"):
        group.close()
    assert closed == ["cuda", "cpu"]


@pytest.mark.parametrize("end", ["close", "abort"])
def test_a_companion_ends_before_the_groups(backend: OnItsDevice, end: str) -> None:
    group = PerDeviceBackend({"cpu": backend, "cuda": backend}).connect(REQUEST)
    companion = in_process.connect(REQUEST)
    group.end_together(companion)
    getattr(group, end)()
    with pytest.raises(GroupClosedError):
        companion.barrier()


def test_a_new_time_limit_is_every_groups(backend: OnItsDevice) -> None:
    group = PerDeviceBackend({"cpu": backend, "cuda": backend}).connect(REQUEST)
    group.set_timeout(3.5)
    assert [part.timeout_s for part in (group, *group.groups.values())] == [3.5] * 3
    in_turn = RoundRobinGroup(list(group.groups.values()))
    in_turn.set_timeout(4.5)
    assert [part.timeout_s for part in (in_turn, *in_turn.groups)] == [4.5] * 3
    group.close()


def test_a_device_without_a_member_group_has_torchs_memory_and_no_algorithm(backend: OnItsDevice) -> None:
    group = PerDeviceBackend({"cpu": backend}).connect(REQUEST)
    tensor = group.allocate(4, torch.float32, "meta")
    assert (tensor.device.type, tensor.numel()) == ("meta", 4)
    assert group.algorithm_of("all_reduce", tensor) is None
    with pytest.raises(InvalidArgumentError, match="moves tensors on cpu, found a tensor on meta"):
        group.all_reduce(tensor)
    group.close()
