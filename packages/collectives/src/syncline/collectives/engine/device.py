"""DeviceRuntime: what the host must know of one type of device to communicate its tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch


class StreamOrder(ABC):
    """The place of one collective among the work that its device has been given.

    Note [Order on the device]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~
    A collective runs on another thread, later than the call. To the device it looks as if it ran where it was issued:

    1. Construction, on the thread that issues: notes what its current streams have been given so far.
    2. The begin of `entered`, on the thread that runs the collective: its streams are those of the group; they wait for 1.
    3. The end of `entered`: notes what the group's streams have been given so far, such as the copy back.
    4. `join`, on every thread that waits for the work: its current streams wait for 3. The thread itself does not.
    5. `resumed`: the group's streams once more, for a future that is told the result; its callbacks are ordered after 3.
    """

    @abstractmethod
    def entered(self) -> AbstractContextManager[object]:
        """Steps 2 and 3: the collective runs inside this context."""

    @abstractmethod
    def join(self) -> None:
        """Order the calling thread's current streams after the collective, if it ran."""

    @abstractmethod
    def resumed(self) -> AbstractContextManager[object]:
        """Make the group's streams current again, after the collective."""


class DeviceRuntime(ABC):
    """One type of device, for one group. The copies are made inside `StreamOrder.entered`, on its streams.

    Attributes:
        device_type: as torch calls it, such as "cuda".
    """

    device_type: str

    @abstractmethod
    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is on a device of this type."""

    @abstractmethod
    def order(self, tensors: Sequence[torch.Tensor]) -> StreamOrder:
        """Issue a collective on these tensors, all of them of this type of device, on the calling thread."""

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
