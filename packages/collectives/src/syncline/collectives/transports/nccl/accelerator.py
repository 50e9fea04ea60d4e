"""What the group needs of CUDA beside NCCL: streams, events, futures. Abstract, so that a test can run without a GPU."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from ...work import TensorsFuture


class Event(ABC):
    """A point in a stream: a CUDA event."""

    @abstractmethod
    def order_current_stream(self) -> None:
        """Let the current stream of the calling thread go on only after this event. Does not block the CPU."""

    @abstractmethod
    def is_over(self) -> bool:
        """Whether the GPU has passed it. Not to be asked while the stream is being captured."""


class CommStream(ABC):
    """A stream of its own, on which collectives run one after the other.

    Attributes:
        handle: what NCCL takes as the stream.
    """

    handle: int

    @abstractmethod
    def run(self, body: Callable[[], None], after: Event) -> Event:
        """Put on the stream what `body` issues, to start after an event of another stream.

        `body` runs with the stream as the current one: torch operations and their memory belong to it, too.

        Returns:
            The event at which all of it is done.
        """

    @abstractmethod
    def complete(self, future: TensorsFuture, tensors: list[torch.Tensor], done: Event, *, captured: bool) -> None:
        """Complete a future for the CPU; its waiters and callbacks run, on their streams, after `done`.

        Args:
            future: is given `tensors`.
            tensors: the outputs.
            done: an event of this stream.
            captured: whether it is part of a CUDA graph. A stream that enters the capture must be joined again, so none may
                be added to those that the caller knows of.
        """


class Accelerator(ABC):
    """The GPUs of this process.

    Attributes:
        device_type: "cuda".
    """

    device_type: str

    @abstractmethod
    def current_device(self) -> torch.device:
        """The one that the calling thread has chosen."""

    @abstractmethod
    def background(self, device: torch.device) -> AbstractContextManager[object]:
        """A context for a thread of the group's own: the device is its current one, and captures of other threads go on.

        Without the first, what it asks CUDA for takes memory on GPU 0.
        """

    @abstractmethod
    def pci_id(self, device: torch.device) -> str:
        """Its place on the bus, the same in every process of the node: "0000:17:00.0"."""

    @abstractmethod
    def comm_stream(self, device: torch.device) -> CommStream:
        """A new stream of high priority, so that a collective need not queue behind computation."""

    @abstractmethod
    def future(self, device: torch.device) -> TensorsFuture:
        """A future of tensors of that device."""

    @abstractmethod
    def now(self, device: torch.device) -> Event:
        """After all that the current stream holds."""

    @abstractmethod
    def current_stream(self, device: torch.device) -> int:
        """The handle of the calling thread's current stream."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """Whether the calling thread's current stream is being captured into a CUDA graph."""
