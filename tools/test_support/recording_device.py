"""RecordingDevice: a device for tests on machines without one. It is the CPU, which writes down what it is asked for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from syncline.collectives.devices import DeviceRuntime, StreamOrder


class PlayedOrder(StreamOrder):
    """Writes down when, and whether on another thread than the one that issued."""

    def __init__(self, log: list[str]) -> None:
        self._log = log
        self._issued_on = threading.get_ident()
        log.append("issued")

    @contextmanager
    def _entered(self) -> Iterator[None]:
        self._log.append("entered" if threading.get_ident() == self._issued_on else "entered elsewhere")
        yield
        self._log.append("left")

    def join(self) -> None:
        """Write it down."""
        self._log.append("joined" if threading.get_ident() == self._issued_on else "joined elsewhere")

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """Write down both ends."""
        self._log.append("resumed")
        yield
        self._log.append("suspended")


class RecordingDevice(DeviceRuntime):
    """A CPU whose tensors are those that `is_mine` says; memory to copy to comes full of rubbish.

    Attributes:
        log: what was asked of it, in order.
        is_mine: which tensors count as the device's.
    """

    device_type = "cuda"

    def __init__(self, is_mine: Callable[[torch.Tensor], bool] = lambda _: True) -> None:
        self.log: list[str] = []
        self.is_mine = is_mine

    def owns(self, tensor: torch.Tensor) -> bool:
        """As `is_mine` says."""
        return self.is_mine(tensor)

    def order(self, tensors: Sequence[torch.Tensor]) -> PlayedOrder:
        """Write it down."""
        assert all(map(self.is_mine, tensors))
        return PlayedOrder(self.log)

    def empty_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Ones in every byte."""
        host = torch.empty(tensor.numel(), dtype=tensor.dtype)
        host.view(torch.uint8).fill_(1)
        return host

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy."""
        assert tensor.dim() == 1
        assert tensor.is_contiguous()
        self.log.append("in")
        return tensor.clone()

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """A copy."""
        assert host.data_ptr() != tensor.data_ptr() or tensor.numel() == 0
        self.log.append("out")
        tensor.copy_(host)

    def finish(self, tensor: torch.Tensor) -> None:  # noqa: ARG002 - the CPU has finished
        """Write it down."""
        self.log.append("finished")
