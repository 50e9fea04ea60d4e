"""A GPU made of threads: the CPU's memory is the GPU's, and work on a group's streams runs on threads.

Note [Streams of the fake]
~~~~~~~~~~~~~~~~~~~~~~~~~~
Work that a group puts on its own stream (`FakeStream.run`) runs on the stream's thread, in order. The program's own operations
run at once, on the calling thread, as if they were over when they are issued. So if a stream waits for an event of a group's
stream, the next operation on the waiting stream must wait, too:

- Inside `FakeDevice.running` no wait blocks, as on a GPU. The next operation of torch on this thread's current stream waits
  first. An operation on another stream does not wait, and may read old values: a race, as on a GPU.
- On any other thread, and in calls from torch's C++ code (backward, native DDP), the wait itself blocks.
"""

from __future__ import annotations

import atexit
import io
import itertools
import pickle
import queue
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode

from syncline.collectives import group
from syncline.collectives.engine import call as engine_call
from syncline.collectives.engine.device import DeviceRuntime, Event, Stream
from syncline.collectives.work import Devices, GroupFuture, TensorsFuture

CPU = torch.device("cpu")
_PATIENCE_S = 60.0
_END_S = 5.0


class FakeEvent(Event):
    """A point in a stream: over when the stream's thread has reached it, and everything is over that the stream waited for.

    Attributes:
        error: the error that the stream's thread raised.
        was_refused: whether a CPU would have raised this error when the work was issued.
    """

    def __init__(self, device: FakeDevice, parts: Iterable[FakeEvent] = (), *, is_over: bool = True) -> None:
        self.error: BaseException | None = None
        self.was_refused = False
        self._device = device
        self._parts = [part for part in parts if not part.has_come()]
        self.made_on = threading.get_ident()
        self._done = threading.Event()
        if is_over:
            self._done.set()

    def order_current_stream(self) -> None:
        """See Note [Streams of the fake]."""
        self._device.log.append("ordered" if threading.get_ident() == self.made_on else "ordered elsewhere")
        stream = self._device.current()
        stream.add(self)
        if not self._device.is_lazy():
            stream.catch_up()

    def is_over(self) -> bool:
        """Whether the threads have reached this point without an error.

        A fault of the GPU is raised; an abort is not a fault.
        """
        error = self.first_error()
        if error is not None and not _is_of_abort(error):
            raise RuntimeError(f"the fake GPU faulted: {error}") from error
        return self.has_come() and error is None

    def has_come(self) -> bool:
        """Whether the threads have reached this point."""
        return self._done.is_set() and all(part.has_come() for part in self._parts)

    def first_error(self) -> BaseException | None:
        """The first error up to this point."""
        return next((part.error for part in (*self._parts, self) if part.error is not None), None)

    def come(self, error: BaseException | None) -> None:
        """Called by the stream's thread."""
        self.error = error
        self._done.set()

    def block(self) -> None:
        """Wait until it is over."""
        for part in self._parts:
            part.block()
        if not self._done.wait(_PATIENCE_S):
            raise TimeoutError("an event of the fake GPU never came")


class _Entry(NamedTuple):
    """Work for a stream, and its result."""

    body: Callable[[], None]
    after: Sequence[FakeEvent]
    done: FakeEvent
    issued: threading.Event


_here = threading.local()  # for each thread: the `issued` of its work, its current streams, whether its waits do not block


def the_rest_is_the_gpus() -> None:
    """Called by work on a stream, at the place where a CPU would have issued all of it: then the issuer may go on."""
    issued = getattr(_here, "issued", None)
    if issued is not None:
        issued.set()


def stream_of_thread() -> int | None:
    """The handle of the stream whose thread this is; None for any other thread."""
    return getattr(_here, "serves", None)


class FakeStream(Stream):
    """A stream. Work given to `run` runs in order on a thread, which ends with the stream.

    If the stream is idle, new work keeps the caller waiting as the same calls would on a CPU: until the work calls
    `the_rest_is_the_gpus`.
    """

    def __init__(self, device: FakeDevice, handle: int) -> None:
        self.device = CPU
        self.handle = handle
        self._runtime = device
        self._waits: list[FakeEvent] = []
        self._queue: queue.Queue[_Entry | None] | None = None

    def wait_for(self, event: Event) -> None:
        """Let the next work on this stream wait for the event."""
        assert isinstance(event, FakeEvent)
        self._runtime.log.append("wait_for" if threading.get_ident() == event.made_on else "wait_for elsewhere")
        self.add(event)

    def add(self, event: FakeEvent) -> None:
        """Let the next work wait, without an entry in the log."""
        self._waits = [wait for wait in self._waits if not wait.has_come() or wait.first_error() is not None]
        self._waits.append(event)

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this the thread's current stream."""
        before = self._runtime.current()
        _here.__dict__.setdefault("streams", {})[self._runtime] = self
        self._runtime.log.append("enter")
        try:
            yield
        finally:
            self._runtime.log.append("leave")
            _here.streams[self._runtime] = before

    def record(self) -> FakeEvent:
        """An event that is over when everything is over that the stream waits for."""
        self._runtime.log.append("record")
        return FakeEvent(self._runtime, self._waits)

    def waits(self) -> list[FakeEvent]:
        """The events for which the next work on this stream waits."""
        return self._waits

    def run(self, body: Callable[[], None], after: Event | None) -> FakeEvent:
        """Queue the work."""
        if after is not None:
            self.wait_for(after)
        done = FakeEvent(self._runtime, is_over=False)
        entry = _Entry(body, self._waits, done, threading.Event())
        self._waits = [done]
        if self._queue is None:
            self._queue = queue.Queue()
            weakref.finalize(self, self._queue.put, None).atexit = False
            stand_in = FakeStream(self._runtime, self.handle)  # so that the thread does not keep the stream alive
            thread = threading.Thread(target=_serve, args=(self._queue, stand_in), name=f"stream {self.handle}", daemon=True)
            _serving[thread] = self._queue
            thread.start()
        has_nothing_to_do, issued = self._queue.unfinished_tasks == 0, entry.issued
        self._queue.put(entry)
        del entry, body  # finished work holds no tensor
        if has_nothing_to_do:
            issued.wait()
            if done.was_refused and done.error is not None:
                raise done.error
        return done

    def complete(self, future: TensorsFuture, tensors: list[torch.Tensor], done: Event, *, captured: bool) -> None:  # noqa: ARG002
        """Complete the future on a stand-in stream that waits for `done`."""
        stand_in = self._runtime.stream(CPU, is_own=False)
        stand_in.wait_for(done)
        with stand_in.current():
            if not self._runtime.is_lazy():
                stand_in.catch_up()
            future.set_result(tensors)

    def catch_up(self) -> None:
        """Block until the next work may run; raises its error, except an abort, after which a GPU goes on."""
        waits, self._waits = self._waits, []
        for wait in waits:
            wait.block()
            error = wait.first_error()
            if error is not None and not (self._runtime.is_lazy() and _is_of_abort(error)):
                raise error


# If a thread drops a tensor while the interpreter shuts down, the process ends with "terminate called without an active
# exception". So the threads end earlier.
_serving: weakref.WeakKeyDictionary[threading.Thread, queue.Queue[_Entry | None]] = weakref.WeakKeyDictionary()


@atexit.register
def _end_streams() -> None:
    for thread, todo in list(_serving.items()):
        todo.put(None)
        thread.join(_END_S)


def _serve(todo: queue.Queue[_Entry | None], stream: FakeStream) -> None:
    _here.serves = stream.handle
    while (entry := todo.get()) is not None:
        done, issued = entry.done, entry.issued
        error = _run(entry, stream)
        del entry  # finished work holds no tensor
        todo.task_done()
        done.come(error)
        issued.set()


def _run(entry: _Entry, stream: FakeStream) -> BaseException | None:
    try:
        for event in entry.after:
            event.block()
        _here.issued = entry.issued
        with stream.current():
            entry.body()
    except BaseException as error:  # noqa: BLE001 - the one who waits for the event raises it
        entry.done.was_refused = not entry.issued.is_set()
        return error
    return None


def _is_of_abort(error: BaseException) -> bool:
    """Whether an error comes from an abort, after which a GPU goes on."""
    return any(getattr(one, "is_abort", False) for one in (error, error.__cause__))


class FakeFuture(GroupFuture):
    """A future of tensors on the device, as torch's futures for CUDA.

    For the CPU it is complete when it has a value. If the value has tensors, a waiting stream is ordered after everything on
    the stream that was current at this moment. Otherwise nothing is recorded. A callback runs on its own stream, ordered in the
    same way. The value is pickled to find its tensors, which must be on the future's devices.
    """

    def __init__(self, runtime: FakeDevice) -> None:
        super().__init__(None)
        self._runtime = runtime
        self._event: FakeEvent | None = None

    def set_result(self, result: Any) -> None:
        """Complete it, or fail it with the error of the pickler."""
        try:
            tensors = _tensors_in(result)
        except Exception as error:  # noqa: BLE001 - as torch: whoever waits for it gets it
            super().set_exception(error)
            return
        if tensors:
            assert all(tensor.device == CPU for tensor in tensors)
            self._event = self._runtime.current().record()
        super().set_result(result)

    def order_current_stream(self) -> None:
        """Order the current stream after the tensors, without waiting for the GPU."""
        if self._event is not None:
            self._event.order_current_stream()

    def then(self, callback: Callable[[Any], Any]) -> FakeFuture:
        """A future of the callback's result, or of its error."""
        following = self._following(None)

        def run(done: Any) -> None:
            try:
                result = callback(done)
            except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
                following.set_exception(error)
            else:
                following.set_result(result)

        self.add_done_callback(run)
        return following

    def _following(self, devices: Devices) -> FakeFuture:  # noqa: ARG002 - it knows its device
        return FakeFuture(self._runtime)

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        """Call back on a stream of its own, ordered after the future."""

        def run(_: Any) -> None:
            stream = self._runtime.stream(CPU, is_own=False)
            with stream.current():
                self.order_current_stream()
                callback(self)

        super().add_done_callback(run)


def _tensors_in(value: Any) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []

    class Extractor(pickle.Pickler):
        def persistent_id(self, found: Any) -> str | None:
            if isinstance(found, torch.Tensor):
                tensors.append(found)
                return ""
            return None

    Extractor(io.BytesIO()).dump(value)
    return tensors


# Our code makes futures by the device of the tensors, which is the CPU here. So where torch would record an event for waiters,
# the CPU waits.
_set_result = torch.futures.Future.set_result


def _set_result_in_order(future: torch.futures.Future[Any], result: Any) -> None:
    for runtime, stream in list(getattr(_here, "streams", {}).items()):
        if runtime.is_lazy() and not isinstance(future, FakeFuture):
            stream.catch_up()
    _set_result(future, result)


torch.futures.Future.set_result = _set_result_in_order  # type: ignore[assignment, method-assign]


# Some of our code calls torch's `wait` on a future of a subclass, so a method of `FakeFuture` would not be called.
_wait = torch.futures.Future.wait


def _wait_in_order(future: torch.futures.Future[Any]) -> Any:
    result = _wait(future)
    if isinstance(future, FakeFuture):
        future.order_current_stream()
    return result


torch.futures.Future.wait = _wait_in_order  # type: ignore[assignment, method-assign]


# Functions that only ask about a tensor, and read no memory.
_QUESTIONS = frozenset(
    {"__get__", "data_ptr", "dim", "element_size", "is_complex", "is_conj", "is_contiguous", "is_floating_point"}
    | {"is_inference", "is_neg", "nelement", "numel", "size", "storage_offset", "stride", "untyped_storage"}
)


class _Lazily(TorchFunctionMode):
    """Operations that read or write tensors wait on the thread's current stream; calls from C++ code wait at once."""

    def __init__(self, runtime: FakeDevice) -> None:
        super().__init__()
        self._runtime = runtime

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") not in _QUESTIONS and _has_tensors(args):
            self._runtime.current().catch_up()
        with _lazy(False):
            return func(*args, **(kwargs or {}))


def _has_tensors(arguments: Iterable[Any]) -> bool:
    return any(
        isinstance(argument, torch.Tensor) or (isinstance(argument, list | tuple) and _has_tensors(argument))
        for argument in arguments
    )


@contextmanager
def _lazy(is_lazy: bool) -> Iterator[None]:
    before = getattr(_here, "is_lazy", False)
    _here.is_lazy = is_lazy
    try:
        yield
    finally:
        _here.is_lazy = before


def let_the_cpu_play(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let groups treat tensors as a device's: on each thread, as those of the `FakeDevice` that plays there."""

    def played(tensor: torch.Tensor) -> str:
        device: FakeDevice | None = getattr(_here, "playing", None)
        return "cpu" if device is None or not device.is_mine(tensor) else device.device_type

    for module in (engine_call, group):
        monkeypatch.setattr(module, "device_type_of", played)


class FakeDevice(DeviceRuntime):
    """One GPU of one rank, and the questions that groups of the host ask a device.

    Args:
        pci_id: its place on the bus.
        is_mine: whether a tensor is the device's.

    Attributes:
        log: the calls to the device, in order.
        is_mine: the argument.
        captures: the result of `is_capturing`.
        own_streams: the number of streams that belong to one owner.
        stream_class: makes streams.
    """

    device_type = "cuda"
    stream_class = FakeStream

    def __init__(self, pci_id: str = "0000:00:00.0", is_mine: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        super().__init__()
        self.log: list[str] = []
        self.is_mine = is_mine
        self.captures = False
        self.own_streams = 0
        self._pci_id = pci_id
        self._others = itertools.count(1000)
        self._default = self.stream_class(self, 0)

    def plays_here(self) -> FakeDevice:
        """Play on this thread; see `let_the_cpu_play`."""
        _here.playing = self
        return self

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context in which no wait on this thread blocks; see Note [Streams of the fake]."""
        with _lazy(True), _Lazily(self):
            yield
            self.current().catch_up()

    def is_lazy(self) -> bool:
        """Whether waits on this thread do not block."""
        return getattr(_here, "is_lazy", False)

    def current(self) -> FakeStream:
        """This thread's current stream; all threads share the default one."""
        stream: FakeStream = getattr(_here, "streams", {}).get(self, self._default)
        return stream

    # ---- streams and events ----

    def owns(self, tensor: torch.Tensor) -> bool:
        """The result of `is_mine`."""
        return self.is_mine(tensor)

    def stream(self, device: torch.device, *, is_own: bool) -> FakeStream:  # noqa: ARG002 - there is one
        """A stream; streams with one owner are numbered from 1."""
        if not is_own:
            return self.stream_class(self, next(self._others))
        self.own_streams += 1
        return self.stream_class(self, self.own_streams)

    def now(self, device: torch.device) -> FakeEvent:  # noqa: ARG002 - there is one
        """An event after everything for which the current stream waits."""
        self.log.append("now")
        return FakeEvent(self, self.current().waits())

    def current_stream(self, device: torch.device) -> int:  # noqa: ARG002 - there is one
        """Its number."""
        return self.current().handle

    def is_capturing(self) -> bool:
        """The value of `captures`."""
        return self.captures

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Do nothing: the CPU's allocator frees only memory that nothing holds."""

    # ---- for groups on streams ----

    def current_device(self) -> torch.device:
        """The CPU."""
        return CPU

    def background(self, device: torch.device) -> AbstractContextManager[object]:  # noqa: ARG002 - there is one
        """A context without effect: there is nothing to choose."""
        return nullcontext()

    def pci_id(self, device: torch.device) -> str:  # noqa: ARG002 - there is one
        """The given place on the bus."""
        return self._pci_id

    def future(self, device: torch.device) -> TensorsFuture:
        """A future like torch's for CUDA."""
        assert device == CPU
        return FakeFuture(self)

    # ---- copies ----

    def empty_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Ones in every byte."""
        host = torch.empty(tensor.numel(), dtype=tensor.dtype)
        host.view(torch.uint8).fill_(1)
        return host

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy."""
        self.log.append("in")
        return tensor.reshape(-1).clone()

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """A copy."""
        assert host.data_ptr() != tensor.data_ptr() or tensor.numel() == 0
        self.log.append("out")
        tensor.view(-1).copy_(host)

    def finish(self, tensor: torch.Tensor) -> None:  # noqa: ARG002 - the CPU has finished
        """Log the call."""
        self.log.append("finished")
