"""Tensors of a device over a host transport; the CPU takes the part of the device."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from syncline.collectives import InvalidArgumentError, ProcessGroup, ReduceOp, TransportError
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.testing import CHECKS, Check, run_ranks
from syncline.collectives.transports.device import DeviceTransport
from syncline.collectives.transports.threads import InProcessTransport, SharedState
from test_support.fake_device import FakeDevice, let_the_cpu_play

pytestmark = pytest.mark.ranks


@pytest.fixture(autouse=True)
def _the_cpu_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    let_the_cpu_play(monkeypatch)


Make = Callable[[int], tuple[HostGroup, FakeDevice]]


def staged(size: int, is_mine: Callable[[torch.Tensor], bool] = lambda _: True) -> Make:
    shared_state = SharedState(size)

    def make(rank: int) -> tuple[HostGroup, FakeDevice]:
        device = FakeDevice(is_mine=is_mine).plays_here()
        transport = DeviceTransport(InProcessTransport(shared_state, rank), rank, device)
        return HostGroup(transport, rank, size, timeout_s=20, device=device), device

    return make


@pytest.mark.parametrize("check", CHECKS.values(), ids=CHECKS)
def test_conformance(check: Check) -> None:
    """All operations and dtypes cross to the host and back, also on sub-groups."""
    make = staged(2)

    def body(outer: ProcessGroup) -> None:
        group, _ = make(outer.rank)
        check(group)
        group.close()

    run_ranks(2, body)


@pytest.mark.parametrize(
    ("call", "on_root", "elsewhere"),
    [
        (lambda g, one, all_: g.all_reduce(one), ["in", "out"], ["in", "out"]),
        (lambda g, one, all_: g.reduce(one, 1), ["in", "out"], ["in"]),
        (lambda g, one, all_: g.broadcast(one, 1), ["in"], ["out"]),
        (lambda g, one, all_: g.all_gather_into_tensor(all_, one), ["in", "out"], ["in", "out"]),
        (lambda g, one, all_: g.gather(one, list(all_.view(2, -1)) if g.rank == 1 else None, 1), ["in", "out"], ["in"]),
        (lambda g, one, all_: g.scatter(one, list(all_.view(2, -1)) if g.rank == 1 else None, 1), ["in", "out"], ["out"]),
        (lambda g, one, all_: g.reduce_scatter_tensor(one, all_), ["in", "out"], ["in", "out"]),
        (lambda g, one, all_: g.all_to_all_single(all_, all_.clone()), ["in", "out"], ["in", "out"]),
        (lambda g, one, all_: g.barrier(), [], []),
    ],
)
def test_nothing_crosses_in_vain(call, on_root: list[str], elsewhere: list[str]) -> None:
    make = staged(2, lambda tensor: tensor.is_floating_point())  # the splits that an all-to-all compares are the host's

    def body(outer: ProcessGroup) -> list[str]:
        group, device = make(outer.rank)
        call(group, torch.full((3,), outer.rank + 1.0), torch.arange(6.0) + outer.rank)
        return [entry for entry in device.log if entry in ("in", "out")]

    assert run_ranks(2, body) == [elsewhere, on_root]


def test_a_blocking_call_is_in_order_on_return() -> None:
    group, device = staged(1)(0)
    group.all_reduce(torch.ones(2))
    assert device.log == ["now", "wait_for", "enter", "in", "out", "record", "leave", "ordered"]


def test_a_work_is_in_order_on_every_thread_that_waits() -> None:
    group, device = staged(1)(0)
    work = group.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    waited = device.log.pop(1)
    assert waited in ("wait_for", "wait_for elsewhere")  # the waiting thread runs the call, if it is the first to come to it
    ordered = device.log.pop()
    assert ordered in ("ordered", "ordered elsewhere")
    assert device.log == ["now", "enter", "in", "out", "record", "leave"]
    log = len(device.log)
    thread = threading.Thread(target=work.wait)
    thread.start()
    thread.join()
    assert device.log[log:] == ["ordered elsewhere"]
    group.close()


@pytest.mark.parametrize(
    ("is_late", "expected"),
    [(False, ["enter", "callback", "leave"]), (True, ["enter", "leave", "callback"])],
)
def test_a_future_is_told_on_the_groups_streams(is_late: bool, expected: list[str]) -> None:
    group, device = staged(1)(0)
    gate = threading.Event()
    group._queue.enqueue(lambda: gate.wait(10) and None)
    work = group.all_reduce(torch.ones(2), async_op=True)
    if is_late:
        gate.set()
        work.wait()
    work.get_future().add_done_callback(lambda _: device.log.append("callback"))
    gate.set()
    group.close()
    log = [entry for entry in device.log if entry in expected]
    assert log == ["enter", "leave", *expected]  # first the collective itself


def test_a_transfer_has_arrived_when_waited_for() -> None:
    make = staged(2)

    def body(outer: ProcessGroup) -> list[str]:
        group, device = make(outer.rank)
        tensor = torch.full((3,), outer.rank + 1.0)
        if outer.rank == 0:
            group.send(tensor, 1)
        else:
            group.recv(tensor, 0)
            assert tensor.tolist() == [1.0] * 3
        return device.log

    assert run_ranks(2, body) == [["in"], ["now", "wait_for", "enter", "out", "finished", "record", "leave"]]


def test_a_transfer_into_a_tensor_with_gaps_is_copied_in_order() -> None:
    """The future's thread may copy, and its current stream is not the program's."""
    make = staged(2)

    def body(outer: ProcessGroup) -> None:
        group, device = make(outer.rank)
        if group.rank == 0:
            group.send(torch.arange(3.0), 1)
        else:
            device.log.clear()
            tensor = torch.zeros(3, 2)[:, 0]
            group.recv(tensor, 0, async_op=True).get_future().wait()
            assert tensor.tolist() == [0.0, 1.0, 2.0]
            # First the message comes to the device, then the copy fills the gaps: each waits for the program's stream.
            assert device.log.count("wait_for elsewhere") == 2
            assert device.log[-5:] == ["wait_for elsewhere", "enter", "finished", "record", "leave"]
        group.close()

    run_ranks(2, body)


def test_tensors_of_the_host_stay_there() -> None:
    group, device = staged(1, lambda tensor: tensor.numel() > 2)(0)
    group.all_reduce(torch.ones(2))
    assert device.log == []
    group.all_reduce(torch.ones(3))
    assert "in" in device.log
    assert group.device_types == {"cpu", "cuda"}
    assert "cuda staged through the host" in group.describe()


def test_ranks_may_differ_in_where_the_tensor_is() -> None:
    groups = staged(2)

    def body(outer: ProcessGroup) -> None:
        group, device = groups(outer.rank)
        device.is_mine = lambda _: outer.rank == 0
        tensor = torch.full((3,), outer.rank + 1.0)
        group.all_reduce(tensor)
        assert tensor.tolist() == [3.0] * 3
        assert ("in" in device.log) is (outer.rank == 0)

    run_ranks(2, body)


def test_tensors_of_one_call_are_on_one_type_of_device() -> None:
    """Otherwise the host's library would read the address of a device's tensor."""
    group, device = staged(1, lambda tensor: tensor.dim() == 2)(0)
    there, here = torch.ones(1, 3), torch.ones(3)
    for call in (
        lambda: group.reduce_scatter_tensor(here, there),
        lambda: group.all_gather_into_tensor(there, here),
        lambda: group.all_to_all([here], [there]),
    ):
        with pytest.raises(InvalidArgumentError, match="expected all tensors on one type of device"):
            call()
    assert device.log == []
    group.all_reduce(there)


def test_directly() -> None:
    device = FakeDevice(is_mine=lambda tensor: tensor.numel() > 2).plays_here()

    class Direct(InProcessTransport):
        def all_reduce(self, tensor, op, call) -> None:
            tensor.fill_(7)

    transport = DeviceTransport(InProcessTransport(SharedState(1), 0), 0, device, Direct(SharedState(1), 0))
    group = HostGroup(transport, 0, 1, timeout_s=5, device=device)
    small, large = torch.ones(2), torch.ones(3)
    group.all_reduce(small)
    group.all_reduce(large)
    assert (small.tolist(), large.tolist()) == ([1.0] * 2, [7.0] * 3)
    assert device.log == ["now", "wait_for", "enter", "record", "leave", "ordered"]
    assert "cuda directly" in group.describe()


def test_memory_that_a_library_may_still_write_is_kept() -> None:
    written: list[torch.Tensor] = []

    class Gone(InProcessTransport):
        def all_reduce(self, tensor, op, call) -> None:
            written.append(tensor)
            raise TransportError("the wire was cut")

    device = FakeDevice().plays_here()
    transport = DeviceTransport(Gone(SharedState(1), 0), 0, device)
    group = HostGroup(transport, 0, 1, timeout_s=5, device=device)
    tensor = torch.ones(3)
    with pytest.raises(TransportError, match=r"all_reduce\(float32\[3\], op=SUM\), number 0 .*the wire was cut"):
        group.all_reduce(tensor, ReduceOp.SUM)
    assert tensor.tolist() == [1.0] * 3
    assert any(written[0] is kept for kept in transport._given_up)
