"""The fakes of NCCL and of the GPU refuse what the real ones refuse, and the real CuPy works over them."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import TransportError
from syncline.collectives.engine.device import Event
from syncline.collectives.testing.processes import run_processes
from syncline.collectives.transports.nccl.connections import Connector
from syncline.collectives.transports.nccl.group import NcclGroup
from syncline.collectives.transports.nccl.rendezvous import StoreRendezvous
from syncline.collectives.work import PendingWork, join_futures
from test_support import cupy_on_fakes
from test_support.fake_device import CPU, FakeDevice, FakeEvent, FakeStream
from test_support.fake_nccl import FakeNccl
from test_support.fake_nccl_group import NcclGroupOnFakes, run_on_fakes

pytestmark = pytest.mark.ranks


@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler (cc)")
@pytest.mark.skipif(find_spec("cupy") is None, reason="CuPy is not installed")
@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch loads an NCCL of its own, which CuPy would take")
def test_every_check_through_the_real_cupy(tmp_path: Path) -> None:
    run_processes(Path(cupy_on_fakes.__file__), 1, tmp_path, timeout_s=280.0)


def test_the_fake_of_cupy_refuses_what_cupy_does() -> None:
    cupy_on_fakes.refuses(FakeNccl())


def test_a_stream_that_is_not_the_current_one_is_refused() -> None:
    """What torch puts before and after the call would not be in order with it."""

    def body(group: NcclGroup) -> None:
        tensor = torch.ones(2)
        group.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 1.0]
        group._connections._made[0].communicator._stream += 1
        with pytest.raises(AssertionError, match="stream 2 was given, 1 is current"):
            group.all_reduce(torch.ones(2), async_op=True).wait(20)

    run_on_fakes(1, body)


def test_a_wait_does_not_block_the_cpu() -> None:
    """What reads on the stream that was ordered waits; what reads on another one does not."""
    device = FakeDevice()
    come, written = FakeEvent(device, is_over=False), torch.zeros(3)

    def write() -> None:
        written.fill_(5.0)
        come.come(None)

    with device.running():
        elsewhere = device.stream(CPU, is_own=False)
        come.order_current_stream()
        with elsewhere.current():
            assert written.tolist() == [0.0] * 3  # a race, as on a GPU
        threading.Timer(0.05, write).start()
        assert written.tolist() == [5.0] * 3


def test_a_future_orders_only_for_tensors() -> None:
    device = FakeDevice()
    come = FakeEvent(device, is_over=False)
    with device.running():
        with_tensor, without, tensor = device.future(CPU), device.future(CPU), torch.ones(1)
        stream = device.stream(CPU, is_own=False)
        stream.wait_for(come)
        with stream.current():
            with_tensor.set_result([tensor])
            without.set_result([])
        without.wait()
        assert device.current().waits() == []
        with_tensor.wait()
        assert not device.now(CPU).is_over()
        come.come(None)
        assert device.now(CPU).is_over()


def test_a_future_that_joins_others_waits_for_all_their_tensors() -> None:
    device, tensors = FakeDevice(), [torch.zeros(1), torch.zeros(1)]
    written = FakeEvent(device, is_over=False)
    futures = [device.future(CPU) for _ in tensors]

    def write() -> None:
        tensors[0].fill_(5.0)
        written.come(None)

    with device.running():
        for future, tensor, done in zip(futures, tensors, (written, FakeEvent(device)), strict=True):
            device.stream(CPU, is_own=False).complete(future, [tensor], done, captured=False)
        threading.Timer(0.1, write).start()
        join_futures(futures, tensors).wait()
        assert tensors[0].tolist() == [5.0]


# ---- so the group wraps what a future does not take ----


def local_error() -> Exception:
    class LocalError(Exception):
        """Cannot be pickled, because it is defined in a function."""

    return LocalError("no memory")


@pytest.mark.parametrize(("make", "words"), [(KeyboardInterrupt, "KeyboardInterrupt"), (local_error, "no memory")])
def test_a_future_completes_whatever_ends_the_call(make: Callable[[], BaseException], words: str) -> None:
    """Ctrl-C inside NCCL; an error of a class of the user's. Whoever waits elsewhere would wait for ever, or hear of pickle."""
    error = make()

    class Interrupted(FakeStream):
        def run(self, body: Callable[[], None], after: Event) -> FakeEvent:
            raise error

    class Device(FakeDevice):
        stream_class = Interrupted

    connector = Connector(FakeNccl(), Device(), StoreRendezvous(dist.HashStore()), [0], 0, "g")
    group = NcclGroupOnFakes(connector, timeout_s=5)
    futures = []

    def issue() -> None:
        with group.coalescing():
            futures.append(group.all_reduce(torch.ones(2), async_op=True).get_future())

    with pytest.raises(type(error)):
        issue()
    with pytest.raises(TransportError if make is KeyboardInterrupt else type(error), match=words) as raised:
        futures[0].wait()
    assert error in (raised.value, raised.value.__cause__)
    group.abort()


def test_a_future_of_the_host_takes_any_error() -> None:
    """As where Ctrl-C comes on the thread that runs a collective."""
    work, error = PendingWork([torch.ones(1)], lambda: "all_reduce"), KeyboardInterrupt()
    before, following = work.get_future(), work.get_future().then(lambda done: done.value())
    work.fail(error)
    for future in (before, work.get_future(), following):
        with pytest.raises(TransportError, match="KeyboardInterrupt") as raised:
            future.wait()
        assert raised.value.__cause__ is error
