"""A GPU made of threads: each stream is a thread, and the CPU's memory is the GPU's."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from syncline.collectives.transports.nccl.accelerator import Accelerator, CommStream, Event
from syncline.collectives.work import TensorsFuture


class FakeEvent(Event):
    """A point in a thread's work.

    The calling thread is its own current stream, so ordering it after the event is waiting for it.
    """

    def __init__(self, *, is_over: bool = False) -> None:
        self._done = threading.Event()
        self._error: BaseException | None = None
        if is_over:
            self._done.set()

    def order_current_stream(self) -> None:
        """Wait, and raise what the stream's thread raised (CUDA would have raised it when it was issued)."""
        self._done.wait()
        if self._error is not None:
            raise self._error

    def is_over(self) -> bool:
        """Whether the thread has come here, well."""
        return self._done.is_set() and self._error is None

    def come(self, error: BaseException | None) -> None:
        """Called by the stream's thread."""
        self._error = error
        self._done.set()


class _Entry(NamedTuple):
    """Something to run on a stream, and what becomes of it."""

    body: Callable[[], None]
    after: Event
    done: FakeEvent
    issued: threading.Event


_Queue = queue.Queue[_Entry | None]
_thread = threading.local()  # of a stream: the `issued` of what it runs


def the_rest_is_the_gpus() -> None:
    """Called by what runs on a stream, where a CPU would have issued all of it: whoever did so may go on."""
    issued = getattr(_thread, "issued", None)
    if issued is not None:
        issued.set()


class FakeCommStream(CommStream):
    """A thread that runs what is put on it, in order; it ends with the stream.

    What is put on a stream that has nothing to do keeps the caller as the same calls would keep a CPU: until one of them says
    that `the_rest_is_the_gpus`.
    """

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self._queue: _Queue = queue.Queue()
        weakref.finalize(self, self._queue.put, None)
        threading.Thread(target=_serve, args=(self._queue,), name=f"stream {handle}", daemon=True).start()

    def run(self, body: Callable[[], None], after: Event) -> FakeEvent:
        """Queue it."""
        entry = _Entry(body, after, FakeEvent(), threading.Event())
        has_nothing_to_do = self._queue.unfinished_tasks == 0
        self._queue.put(entry)
        if has_nothing_to_do:
            entry.issued.wait()
        return entry.done

    def complete(self, future: TensorsFuture, tensors: list[torch.Tensor], done: Event, *, captured: bool) -> None:  # noqa: ARG002
        """Callbacks run here, as those of a CUDA future do, and find the tensors written, as on a GPU's streams."""
        done.order_current_stream()
        future.set_result(tensors)


def _serve(todo: _Queue) -> None:
    while (entry := todo.get()) is not None:
        done, issued = entry.done, entry.issued
        error = _run(entry)
        del entry  # what is over holds no tensor
        todo.task_done()
        issued.set()
        done.come(error)


def _run(entry: _Entry) -> BaseException | None:
    entry.after.order_current_stream()
    _thread.issued = entry.issued
    try:
        entry.body()
    except BaseException as error:  # noqa: BLE001 - the one who waits for the event raises it
        return error
    return None


class FakeAccelerator(Accelerator):
    """One GPU of one rank.

    Attributes:
        captures: whether `is_capturing` says so.
        comm_streams: how many streams were made.
    """

    device_type = "cpu"

    def __init__(self, pci_id: str = "0000:00:00.0") -> None:
        self._pci_id = pci_id
        self.captures = False
        self.comm_streams = 0

    def current_device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def background(self, device: torch.device) -> AbstractContextManager[object]:  # noqa: ARG002 - there is one
        """Nothing to choose."""
        return nullcontext()

    def pci_id(self, device: torch.device) -> str:  # noqa: ARG002 - there is one
        """As given."""
        return self._pci_id

    def comm_stream(self, device: torch.device) -> FakeCommStream:  # noqa: ARG002 - there is one
        """A new thread."""
        self.comm_streams += 1
        return FakeCommStream(self.comm_streams)

    def future(self, device: torch.device) -> TensorsFuture:  # noqa: ARG002 - there is one
        """One for the CPU."""
        return torch.futures.Future()

    def now(self, device: torch.device) -> FakeEvent:  # noqa: ARG002 - there is one
        """The calling thread has come here."""
        return FakeEvent(is_over=True)

    def current_stream(self, device: torch.device) -> int:  # noqa: ARG002 - there is one
        """The calling thread."""
        return threading.get_ident()

    def is_capturing(self) -> bool:
        """As told."""
        return self.captures
