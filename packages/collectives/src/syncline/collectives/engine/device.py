"""`DeviceRuntime`: an interface to the streams, events and copies of one type of accelerator.

`transports.cuda` implements the interface for CUDA.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from ..work import TensorsFuture


class Event(ABC):
    """A point in a stream of operations, between two operations."""

    @abstractmethod
    def order_current_stream(self) -> None:
        """Make the calling thread's current stream wait for this event. Does not block the CPU."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether the device has passed this event. Do not call this method while the stream is captured into a graph.

        Raises:
            RuntimeError: the device has faulted.
        """


class Stream(ABC):
    """A stream of a device, which runs its operations in the order of their issue.

    `handle` is the number by which libraries such as NCCL know the stream.
    """

    device: torch.device
    handle: int

    @abstractmethod
    def wait_for(self, event: Event) -> None:
        """Make all later operations of this stream wait for an event of another stream. Does not block the CPU."""

    @abstractmethod
    def current(self) -> AbstractContextManager[object]:
        """A context manager that makes this stream the calling thread's current stream.

        Memory that operations allocate inside the context belongs to this stream.
        """

    @abstractmethod
    def record(self) -> Event:
        """Record an event after all operations that the stream holds now."""

    def run(self, body: Callable[[], None], after: Event | None) -> Event:
        """Call `body` with this stream as the current stream, and return the event after the last operation of `body`.

        The operations of `body` wait for the event `after`. Pass None if `body` uses only its own memory.
        """
        if after is not None:
            self.wait_for(after)
        with self.current():
            body()
        return self.record()

    @abstractmethod
    def complete(self, future: TensorsFuture, tensors: list[torch.Tensor], done: Event, *, captured: bool) -> None:
        """Complete a future with these tensors at once. Streams that use the tensors later wait for the event `done`.

        If `captured` is true, `done` belongs to a graph capture, and this method must not use another stream.
        """


class DeviceRuntime(ABC):
    """One type of device in this process, such as CUDA. `device_type` is torch's name of the type, such as "cuda"."""

    device_type: str

    def __init__(self) -> None:
        self._shared: dict[torch.device, Stream] = {}

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on a device of this type."""
        return tensor.device.type == self.device_type

    # ---- streams and events ----

    @abstractmethod
    def stream(self, device: torch.device, *, is_own: bool) -> Stream:
        """Get a stream.

        With `is_own`, no other code uses the stream, and it has a high priority. Otherwise other code may use the stream, too.
        """

    @abstractmethod
    def now(self, device: torch.device) -> Event:
        """Record an event after all operations that the calling thread's current stream holds now."""

    @abstractmethod
    def current_stream(self, device: torch.device) -> int:
        """Return the handle of the calling thread's current stream."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured into a graph."""

    @abstractmethod
    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Prevent reuse of the tensor's memory until `stream` has finished the operations that it holds now."""

    def order(self, tensors: Sequence[torch.Tensor]) -> StreamOrder:
        """Return the `StreamOrder` for a collective that the host runs on these tensors, all on this type of device."""
        return StreamOrder(self, [(tensor, self._stream_of(tensor.device)) for tensor in tensors])

    def _stream_of(self, device: torch.device) -> Stream:
        if device not in self._shared:
            self._shared[device] = self.stream(device, is_own=False)
        return self._shared[device]

    # ---- for groups on streams ----

    @abstractmethod
    def current_device(self) -> torch.device:
        """Return the calling thread's current device."""

    @abstractmethod
    def background(self, device: torch.device) -> AbstractContextManager[object]:
        """A context manager for a group's thread. Inside the context, `device` is the thread's current device.

        Inside the context, this thread's calls also do not break a graph capture of another thread.
        """

    @abstractmethod
    def pci_id(self, device: torch.device) -> str:
        """Return the device's PCI address, such as "0000:17:00.0". The address is the same in all processes of the node."""

    @abstractmethod
    def future(self, device: torch.device) -> TensorsFuture:
        """Make a future for tensors on this device."""

    # ---- copies, on the current stream ----

    @abstractmethod
    def empty_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a flat host tensor with as many elements as `tensor`, for copies to and from the device."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the tensor to a flat host tensor. The copy is complete when this method returns."""

    @abstractmethod
    def to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Start to copy `host` to `tensor` on the current stream. The caller may drop `host` before the copy is complete."""

    @abstractmethod
    def finish(self, tensor: torch.Tensor) -> None:
        """Block until the current stream of the tensor's device has finished all its operations."""


class StreamOrder:
    """Keeps the order between a collective on the host and the program's operations on the device.

    Note [Order on the device]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~
    A collective may run on another thread, after the program has issued later operations. But in the device's stream, the
    collective must come between the operations before and after the call. Five steps keep this order:

    1. The constructor, on the thread that issues the call: record events on the thread's current streams.
    2. The start of `entered`, on the thread that runs the collective: make the group's streams current. These streams then
       wait for the events of step 1.
    3. The end of `entered`: record events on the group's streams.
    4. `join`, on every thread that waits for the work: the thread's current streams wait for the events of step 3. The thread
       itself does not wait.
    5. `resumed`: make the group's streams current again while the callbacks of the future run.

    `tensors` are pairs of a tensor that the collective uses, and the group's stream on the device of this tensor.
    """

    def __init__(self, device: DeviceRuntime, tensors: Sequence[tuple[torch.Tensor, Stream]]) -> None:
        self._device = device
        self._tensors = tensors
        self._streams = list(dict.fromkeys(stream for _, stream in tensors))
        self._issued = [device.now(stream.device) for stream in self._streams]
        self._done: list[Event] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Do steps 2 and 3 of Note [Order on the device]. The collective runs inside this context."""
        for stream, event in zip(self._streams, self._issued, strict=True):
            stream.wait_for(event)
        # If the program drops a tensor, the tensor's memory must not be reused before the group's streams are done.
        for tensor, stream in self._tensors:
            self._device.keep(tensor, stream)
        with self.resumed():
            try:
                yield
            finally:  # also after an error: copies that were begun may still run
                self._done = [stream.record() for stream in self._streams]

    def join(self) -> None:
        """Make the calling thread's current streams wait for the collective. If the collective did not run, do nothing."""
        for event in self._done:
            event.order_current_stream()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """A context manager that makes the group's streams current again, after the collective."""
        with ExitStack() as entered:
            for stream in self._streams:
                entered.enter_context(stream.current())
            yield
