"""What a group has on the GPU: who looks after it, what is released, and what a failure does, in which order."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import CollectiveTimeout, TransportError
from syncline.collectives.engine.call import DONE, FAILED, Call, Signature
from syncline.collectives.engine.device import Event
from syncline.collectives.health.monitor import call_now_and_then
from syncline.collectives.transports.nccl.connections import Connector
from syncline.collectives.transports.nccl.in_flight import InFlight
from syncline.collectives.transports.nccl.rendezvous import StoreRendezvous
from syncline.collectives.transports.nccl.work import Failure, Launch
from test_support.fake_device import CPU, FakeDevice, FakeEvent, FakeStream
from test_support.fake_nccl import FakeNccl
from test_support.fake_nccl_group import NcclGroupOnFakes
from test_support.jobs import LIMIT_S
from test_support.waiting import wait_until

PATIENCE_S = 10.0


def watched(context: Callable[[], object] = nullcontext) -> InFlight:
    """Something in flight that the monitor looks at."""
    in_flight = InFlight(lambda: "rank 0", context, lambda error: error)  # type: ignore[arg-type]
    call_now_and_then(in_flight)
    return in_flight


class Waiter:
    """A work that notes what it hears."""

    def __init__(self, hear: Callable[[Failure], object] = lambda _: None) -> None:
        self.hear = hear

    def fail(self, failure: Failure) -> None:
        self.hear(failure)


class Running:
    """A call that is over when told so."""

    def __init__(self, name: str, waiter: Waiter | None = None, timeout_s: float = 60.0) -> None:
        self.waiter = waiter or Waiter()
        self.call = Call(Signature(name), 0, (torch.ones(1),), ())
        self.launch = Launch([self.call], lambda: name, timeout_s, self.waiter)  # type: ignore[arg-type]
        self.event = FakeEvent(FakeDevice(), is_over=False)
        self.launch.note_on_stream(self.event, captured=False)


class Communicator:
    """A communicator that calls this when it is aborted."""

    def __init__(self, abort: Callable[[], object], error: Exception | None = None) -> None:
        self.abort, self.error = abort, error

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def test_the_order_of_a_failure() -> None:
    """Recorded first, then told to the waiters, then aborted; what was over has succeeded."""
    log: list[str] = []
    aborted = threading.Event()
    in_flight = watched()
    in_flight.attach(Communicator(lambda: (log.append("aborted"), aborted.set())))  # type: ignore[arg-type]
    over = Running("over", Waiter(lambda _: log.append("over failed")))
    first = Running("first", Waiter(lambda told: log.append(f"first told, recorded: {in_flight.failure is told}")))
    second = Running("second", Waiter(lambda told: log.append(f"second told: {type(told.error).__name__}")))
    for running in (over, first, second):
        in_flight.watch(running.launch)
    over.event.come(None)
    in_flight.fail(TransportError("the group was aborted"))
    in_flight.fail(TransportError("a second failure does not count"))
    assert aborted.wait(PATIENCE_S)
    assert log == ["first told, recorded: True", "second told: TransportError", "aborted"]
    assert [running.call.state for running in (over, first, second)] == [DONE, FAILED, FAILED]
    assert in_flight.failure is not None
    assert "aborted" in str(in_flight.failure.error)
    assert not in_flight.drain(0.1)


def test_tensors_are_held_until_the_kernels_are_gone() -> None:
    """NCCL may write to them until it has aborted. The record, which keeps the call, does not hold them."""
    let_go, aborting, in_flight = threading.Event(), threading.Event(), watched()
    running = Running("a")
    gone = weakref.ref(running.call.reads[0])
    in_flight.watch(running.launch)
    in_flight.attach(Communicator(lambda: (aborting.set(), let_go.wait(PATIENCE_S))))  # type: ignore[arg-type]
    in_flight.fail(TransportError("over"))
    assert aborting.wait(PATIENCE_S)
    assert gone() is not None
    let_go.set()
    wait_until(lambda: gone() is None)


def break_time_limit(running: Running, communicator: Communicator) -> None:
    running.launch.scope.cancel(TimeoutError())


def break_communicator(running: Running, communicator: Communicator) -> None:
    communicator.error = TransportError("NCCL says no")


def break_gpu(running: Running, communicator: Communicator) -> None:
    def ask() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    running.event.is_over = ask  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("break_it", "kind", "words"),
    [
        (break_time_limit, CollectiveTimeout, "late did not finish within"),
        (break_communicator, TransportError, r"NCCL says no \(rank 0; late was in flight"),
        (break_gpu, TransportError, "while the group waited for late: .*illegal memory"),
    ],
)
def test_the_monitor_finds(break_it: Callable[[Running, Communicator], None], kind: type[Exception], words: str) -> None:
    ended, in_flight = threading.Event(), watched()
    communicator, late = Communicator(ended.set), Running("late")
    in_flight.attach(communicator)  # type: ignore[arg-type]
    in_flight.watch(late.launch)
    break_it(late, communicator)
    assert ended.wait(PATIENCE_S)
    assert in_flight.failure is not None
    with pytest.raises(kind, match=words):
        raise in_flight.failure.error


def test_a_gpu_that_cannot_be_chosen_ends_the_group() -> None:
    """After a fault, CUDA may refuse the context of the group's threads. The communicators are aborted all the same."""

    def refuse() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    in_flight, aborted, late = watched(refuse), threading.Event(), Running("late")
    in_flight.attach(Communicator(aborted.set))  # type: ignore[arg-type]
    in_flight.watch(late.launch)
    assert aborted.wait(PATIENCE_S)
    assert in_flight.failure is not None
    with pytest.raises(TransportError, match=r"while the group waited for late: .*illegal memory") as caught:
        raise in_flight.failure.error
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_nobody_asks_nccl_about_a_communicator_after_stop() -> None:
    """The communicators are destroyed then, and NCCL would read freed memory."""
    asking, let_go, in_flight = threading.Event(), threading.Event(), watched()
    communicator, running = Communicator(lambda: None), Running("a")
    communicator.check = lambda: (asking.set(), let_go.wait(PATIENCE_S))  # type: ignore[method-assign,assignment,return-value]
    in_flight.attach(communicator)  # type: ignore[arg-type]
    in_flight.watch(running.launch)
    assert asking.wait(PATIENCE_S)
    threading.Timer(0.1, let_go.set).start()
    in_flight.stop()
    assert let_go.is_set()


def test_what_is_over_is_released_without_anybody_asking() -> None:
    """The monitor holds it for as long, whoever has dropped it."""
    running, in_flight = Running("a"), watched()
    gone, forgotten = weakref.ref(running.call.reads[0]), weakref.ref(in_flight)
    in_flight.watch(running.launch)
    call, event = running.call, running.event
    del running, in_flight
    gc.collect()
    assert gone() is not None
    event.come(None)
    wait_until(lambda: gone() is None and forgotten() is None)
    assert call.state == DONE


class AtOnce(FakeStream):
    """Calls are made at once, as on a CPU; the GPU is done when it is told so. Nothing here holds what they were made with."""

    events: ClassVar[list[FakeEvent]] = []

    def run(self, body: Callable[[], None], after: Event) -> FakeEvent:
        body()
        self.events.append(FakeEvent(self._runtime, is_over=False))
        return self.events[-1]


@pytest.mark.parametrize("how", ["waited for", "over"])
def test_a_call_holds_its_tensors(how: str) -> None:
    """The caller may drop them; torch's allocator would give their memory to the next tensor."""

    class Device(FakeDevice):
        stream_class = AtOnce

    device = Device()
    group = NcclGroupOnFakes(Connector(FakeNccl(), device, StoreRendezvous(dist.HashStore()), [0], 0, "g"), timeout_s=60)
    tensors = [torch.ones(3), torch.zeros(3)]
    gone = [weakref.ref(tensor) for tensor in tensors]
    work = group.all_gather_into_tensor(tensors[1], tensors[0], async_op=True)
    tensors.clear()
    gc.collect()
    assert all(reference() is not None for reference in gone)
    with device.running():
        if how == "waited for":
            work.wait()
            assert gone[0]() is None
            assert gone[1]() is work.result()[0]
        AtOnce.events[-1].come(None)
    wait_until(lambda: gone[0]() is None)
    del work
    wait_until(lambda: gone[1]() is None)
    group.close()


def test_a_batch_holds_its_tensors_until_each_stream_that_issued_a_call_was_ordered() -> None:
    class Device(FakeDevice):
        stream_class = AtOnce

    device = Device()
    group = NcclGroupOnFakes(Connector(FakeNccl(), device, StoreRendezvous(dist.HashStore()), [0], 0, "g"), timeout_s=60)
    side, outputs, inputs = device.stream(CPU, is_own=False), torch.zeros(2, 3), [torch.ones(3), torch.ones(3)]
    gone = [weakref.ref(tensor) for tensor in inputs]
    with device.running():
        with group.coalescing():
            group.all_gather_into_tensor(outputs[0], inputs.pop(), async_op=True)
            with side.current():
                work = group.all_gather_into_tensor(outputs[1], inputs.pop(), async_op=True)
        work.wait()
        gc.collect()
        assert all(reference() is not None for reference in gone)
        with side.current():
            work.wait()
        gc.collect()
        assert all(reference() is None for reference in gone)
        AtOnce.events[-1].come(None)
    group.close()


def test_what_comes_after_the_failure_fails() -> None:
    heard: list[Failure] = []
    in_flight, late = watched(), Running("late", Waiter(heard.append))
    in_flight.fail(TransportError("over"))
    in_flight.watch(late.launch)
    assert heard == [in_flight.failure]
    assert late.call.state == FAILED


def test_a_store_that_does_not_answer_does_not_keep_a_time_limit_from_ending() -> None:
    let_go, asked = threading.Event(), threading.Event()

    def hear() -> None:
        asked.set()
        let_go.wait(PATIENCE_S)

    in_flight = InFlight(lambda: "rank 0", nullcontext, lambda error: error, hear=hear)
    call_now_and_then(in_flight)
    late = Running("late", timeout_s=0.5)
    in_flight.watch(late.launch)
    assert asked.wait(PATIENCE_S)
    wait_until(lambda: in_flight.failure is not None)
    assert not let_go.is_set()
    let_go.set()


def test_draining_waits() -> None:
    running, in_flight = Running("a"), watched()
    in_flight.watch(running.launch)
    assert not in_flight.drain(0.05)
    threading.Timer(0.05, running.event.come, (None,)).start()
    assert in_flight.drain(PATIENCE_S)


def test_communicators_are_aborted_at_once() -> None:
    """As where NCCL waits for kernels of one another's. Also when one of the works cannot be told."""
    in_flight, meeting = watched(), threading.Barrier(3)
    aborted = [threading.Event() for _ in range(3)]
    communicators = [
        Communicator(lambda done=done: (meeting.wait(PATIENCE_S), done.set()))  # type: ignore[misc]
        for done in aborted
    ]

    def faulty(_: Failure) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    heard = threading.Event()
    for communicator in communicators[:2]:
        in_flight.attach(communicator)  # type: ignore[arg-type]
    works = [Running("broken", Waiter(faulty)), Running("last", Waiter(lambda _: heard.set()))]
    for work in works:
        in_flight.watch(work.launch)
    in_flight.fail(TransportError("over"))
    assert heard.is_set()
    in_flight.attach(communicators[2])  # type: ignore[arg-type]  # connected too late
    assert all(done.wait(PATIENCE_S) for done in aborted)


LEAVES = """
import threading, time
from contextlib import nullcontext
from syncline.collectives import TransportError
from syncline.collectives.transports.nccl.in_flight import InFlight

class Slow:
    def check(self): ...
    def abort(self):
        time.sleep(0.3)
        print("aborted", flush=True)

in_flight = InFlight(lambda: "rank 0", nullcontext, lambda error: error)
in_flight.attach(Slow())
in_flight.fail(TransportError("over"))
print("left", flush=True)
"""


def test_the_end_of_the_process_waits_for_an_abort() -> None:
    """A thread that is inside CUDA when the interpreter is taken down would crash it."""
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.split() == ["left", "aborted"]


def test_the_end_of_the_process_does_not_wait_for_ever() -> None:
    leaves = LEAVES.replace("time.sleep(0.3)", "time.sleep(3600)").replace(
        "in_flight = ", "cancel_scope._EXIT_S = 0.2; in_flight = "
    )
    command = [sys.executable, "-c", "from syncline.collectives.engine import cancel_scope\n" + leaves]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert done.stdout.split() == ["left"]


def test_threads_of_the_group_choose_its_gpu() -> None:
    """What they ask CUDA for would else take memory on GPU 0."""
    entered: set[str] = set()

    @contextmanager
    def context() -> Iterator[None]:
        entered.add(threading.current_thread().name)
        yield

    in_flight, aborted, running = watched(context), threading.Event(), Running("a")
    in_flight.attach(Communicator(aborted.set))  # type: ignore[arg-type]
    in_flight.watch(running.launch)
    wait_until(lambda: entered == {"syncline-look"})
    in_flight.fail(TransportError("over"))
    assert aborted.wait(PATIENCE_S)
    assert entered == {"syncline-look", "syncline-nccl-abort"}
