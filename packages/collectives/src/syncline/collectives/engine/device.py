"""DeviceRuntime: streams, events and copies of one type of accelerator. Abstract, so that a test can run without one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from ..work import TensorsFuture


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def order_current_stream(self) -> None:
        """Let the current stream of the calling thread go on only after this event. Does not block the CPU."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether the device has passed it. Not to be asked while the stream is being captured.

        Raises:
            RuntimeError: the device has faulted.
        """


class Stream(ABC):
    """A stream of a group's, on which its calls run one after the other.

    Attributes:
        device: whose stream it is.
        handle: what a library takes as the stream.
    """

    device: torch.device
    handle: int

    @abstractmethod
    def wait_for(self, event: Event) -> None:
        """Let what comes on this stream start after an event of another one. Does not block the CPU."""

    @abstractmethod
    def current(self) -> AbstractContextManager[object]:
        """A context in which this stream is the calling thread's current one: operations and their memory belong to it."""

    @abstractmethod
    def record(self) -> Event:
        """After all that the stream holds."""

    def run(self, body: Callable[[], None], after: Event) -> Event:
        """Put on the stream what `body` issues, to start after an event of another stream.

        Returns:
            The event at which all of it is done.
        """
        self.wait_for(after)
        with self.current():
            body()
        return self.record()

    @abstractmethod
    def complete(self, future: TensorsFuture, tensors: list[torch.Tensor], done: Event, *, captured: bool) -> None:
        """Complete a future for the CPU; its waiters and callbacks run, on their streams, after `done`.

        Args:
            future: is given `tensors`.
            tensors: the outputs.
            done: an event of this stream.
            captured: whether it is part of a captured graph. A stream that enters the capture must be joined again, so none may
                be added to those that the caller knows of.
        """


class DeviceRuntime(ABC):
    """One type of device, such as CUDA, as this process sees it.

    Attributes:
        device_type: as torch calls it, such as "cuda".
    """

    device_type: str

    def __init__(self) -> None:
        self._shared: dict[torch.device, Stream] = {}

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on a device of this type."""
        return tensor.device.type == self.device_type

    # ---- streams and events ----

    @abstractmethod
    def stream(self, device: torch.device, *, is_own: bool) -> Stream:
        """A stream.

        Args:
            device: whose.
            is_own: nobody else has it, and it has a high priority, so that it need not queue behind computation. Else it may be
                one that others use, too.
        """

    @abstractmethod
    def now(self, device: torch.device) -> Event:
        """After all that the calling thread's current stream holds."""

    @abstractmethod
    def current_stream(self, device: torch.device) -> int:
        """The handle of the calling thread's current stream."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured into a graph."""

    @abstractmethod
    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Do not give the tensor's memory away before this stream has done with what it holds now."""

    def order(self, tensors: Sequence[torch.Tensor]) -> StreamOrder:
        """The place of a collective on the host on these tensors, all of this type, among the work of their devices."""
        return StreamOrder(self, [(tensor, self._stream_of(tensor.device)) for tensor in tensors])

    def _stream_of(self, device: torch.device) -> Stream:
        if device not in self._shared:
            self._shared[device] = self.stream(device, is_own=False)
        return self._shared[device]

    # ---- for groups on streams ----

    @abstractmethod
    def current_device(self) -> torch.device:
        """The one that the calling thread has chosen."""

    @abstractmethod
    def background(self, device: torch.device) -> AbstractContextManager[object]:
        """A context for a thread of a group's own: the device is its current one, and captures of other threads go on.

        Without the first, what the thread asks the driver for takes memory on device 0.
        """

    @abstractmethod
    def pci_id(self, device: torch.device) -> str:
        """Its place on the bus, the same in every process of the node: "0000:17:00.0"."""

    @abstractmethod
    def future(self, device: torch.device) -> TensorsFuture:
        """A future of tensors of that device."""

    # ---- copies, on the current stream ----

    @abstractmethod
    def empty_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Memory that the device can copy to and from: flat, as many elements as the tensor."""

    @abstractmethod
    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A flat copy, which is there on return."""

    @abstractmethod
    def to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy back. On return the caller may drop `host`, but the copy need only be in order on the current stream."""

    @abstractmethod
    def finish(self, tensor: torch.Tensor) -> None:
        """Return when the current stream of the tensor's device has nothing left to do."""


class StreamOrder:
    """The place of one collective on the host among the work that its device has been given.

    Note [Order on the device]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~
    A collective runs on another thread, later than the call. To the device it looks as if it ran where it was issued:

    1. Construction, on the thread that issues: notes what its current streams have been given so far.
    2. The begin of `entered`, on the thread that runs the collective: its streams are those of the group; they wait for 1.
    3. The end of `entered`: notes what the group's streams have been given so far, such as the copy back.
    4. `join`, on every thread that waits for the work: its current streams wait for 3. The thread itself does not.
    5. `resumed`: the group's streams once more, for a future that is told the result; its callbacks are ordered after 3.

    Args:
        device: of the tensors.
        tensors: all that the collective touches, each with the group's stream for its device.
    """

    def __init__(self, device: DeviceRuntime, tensors: Sequence[tuple[torch.Tensor, Stream]]) -> None:
        self._device = device
        self._tensors = tensors
        self._streams = list(dict.fromkeys(stream for _, stream in tensors))
        self._issued = [device.now(stream.device) for stream in self._streams]
        self._done: list[Event] = []

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Steps 2 and 3: the collective runs inside this context."""
        for stream, event in zip(self._streams, self._issued, strict=True):
            stream.wait_for(event)
        for tensor, stream in self._tensors:
            self._device.keep(tensor, stream)
        with self.resumed():
            try:
                yield
            finally:
                self._done = [stream.record() for stream in self._streams]

    def join(self) -> None:
        """Order the calling thread's current streams after the collective, if it ran."""
        for event in self._done:
            event.order_current_stream()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Make the group's streams current again, after the collective."""
        with ExitStack() as entered:
            for stream in self._streams:
                entered.enter_context(stream.current())
            yield
