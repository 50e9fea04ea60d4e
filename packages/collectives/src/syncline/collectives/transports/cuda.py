"""CUDA devices, by streams and pinned memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from typing_extensions import override

from ..engine.device import DeviceRuntime, StreamOrder


class CudaRuntime(DeviceRuntime):
    """One stream for each device, made when the first tensor of the device comes.

    Pinned memory is torch's, which keeps it for reuse and knows by events when a copy no longer needs it.
    """

    device_type = "cuda"

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @override
    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    @override
    def order(self, tensors: Sequence[torch.Tensor]) -> CudaOrder:
        return CudaOrder([(tensor, self._stream(tensor.device)) for tensor in tensors])

    def empty_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Pinned memory."""
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in pinned memory; the thread waits for it without holding the GIL."""
        host = self.empty_on_host(tensor)
        host.copy_(tensor.view(-1), non_blocking=True)
        self.finish(tensor)
        return host

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """A copy that the current stream makes in its time."""
        tensor.view(-1).copy_(host, non_blocking=True)

    @override
    def finish(self, tensor: torch.Tensor) -> None:
        torch.cuda.current_stream(tensor.device).synchronize()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._streams[device]


class CudaOrder(StreamOrder):
    """Events between the caller's streams and the group's.

    Args:
        tensors: all that the collective touches, each with the group's stream for its device.
    """

    def __init__(self, tensors: Sequence[tuple[torch.Tensor, torch.cuda.Stream]]) -> None:
        self._tensors = tensors
        self._streams = list(dict.fromkeys(stream for _, stream in tensors))
        self._issued = [torch.cuda.current_stream(stream.device).record_event() for stream in self._streams]
        self._done: list[torch.cuda.Event] = []

    @override
    def join(self) -> None:
        for stream, event in zip(self._streams, self._done):  # noqa: B905 - none is done if the collective never ran
            torch.cuda.current_stream(stream.device).wait_event(event)

    @contextmanager
    @override
    def resumed(self) -> Iterator[None]:
        with ExitStack() as entered:
            for stream in self._streams:
                entered.enter_context(torch.cuda.stream(stream))
            yield

    @contextmanager
    @override
    def entered(self) -> Iterator[None]:
        for stream, event in zip(self._streams, self._issued, strict=True):
            stream.wait_event(event)
        for tensor, stream in self._tensors:
            tensor.record_stream(stream)  # its memory is not given away before this stream has done with it
        with self.resumed():
            try:
                yield
            finally:
                self._done = [stream.record_event() for stream in self._streams]


def cuda_runtime() -> CudaRuntime | None:
    """The layer for a new group, or None where this process sees no CUDA device."""
    return CudaRuntime() if torch.cuda.is_available() else None
