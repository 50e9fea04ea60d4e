"""torch.cuda and CuPy's runtime as an `Accelerator`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from typing_extensions import override

from ...work import TensorsFuture
from .accelerator import Accelerator, CommStream, Event
from .streams import StreamPool

_HIGH_PRIORITY = -1
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class CudaEvent(Event):
    """An event that was recorded."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    @override
    def order_current_stream(self) -> None:
        self._event.wait(torch.cuda.current_stream(self._device))

    def order(self, stream: torch.cuda.Stream) -> None:
        """The same for another stream."""
        self._event.wait(stream)

    @override
    def is_over(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class CudaCommStream(CommStream):
    """A high-priority stream that nobody else has."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.handle = _streams.acquire(device, self)
        self._stream = torch.cuda.ExternalStream(self.handle, device)  # type: ignore[no-untyped-call]

    def run(self, body: Callable[[], None], after: Event) -> Event:
        """Issue it at once."""
        assert isinstance(after, CudaEvent)
        after.order(self._stream)
        with torch.cuda.stream(self._stream):
            body()
        return CudaEvent(self._stream)

    def complete(self, future: TensorsFuture, tensors: list[torch.Tensor], done: Event, *, captured: bool) -> None:
        """Let torch record, on the current stream, the event that waiters and callbacks wait for.

        The stream may hold later collectives by now, for which they would wait, too; so a stream of torch's pool stands in,
        which waits for `done` only. In a capture they do wait for these: the other stream would never be joined.
        """
        assert isinstance(done, CudaEvent)
        ordered: torch.cuda.Stream = self._stream
        if not captured:
            ordered = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            done.order(ordered)
        with torch.cuda.stream(ordered):
            future.set_result(tensors)


class CudaAccelerator(Accelerator):
    """The GPUs that torch sees."""

    device_type = "cuda"

    @override
    def current_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    @contextmanager
    def background(self, device: torch.device) -> Iterator[None]:
        """Enter torch's context, and lift, for this thread, CUDA's rule that asking for an event spoils captures elsewhere."""
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        try:
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        except OSError:  # a driver of another name: what is watched goes on, only captures may be spoilt
            pass
        with torch.cuda.device(device):
            yield

    def pci_id(self, device: torch.device) -> str:
        """As CUDA's runtime spells it."""
        from cupy.cuda import runtime

        return str(runtime.deviceGetPCIBusId(device.index))

    @override
    def comm_stream(self, device: torch.device) -> CudaCommStream:
        return CudaCommStream(device)

    def future(self, device: torch.device) -> TensorsFuture:
        """One that knows of streams."""
        return torch.futures.Future(devices=[device])

    def now(self, device: torch.device) -> CudaEvent:
        """An event on the current stream."""
        return CudaEvent(torch.cuda.current_stream(device))

    @override
    def current_stream(self, device: torch.device) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    @override
    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()


def _new_stream(device: torch.device) -> int:
    """A stream of CUDA's own: torch's come from a pool of 32, which users would have to share."""
    from cupy.cuda import runtime

    with torch.cuda.device(device):
        return int(runtime.streamCreateWithPriority(runtime.streamNonBlocking, _HIGH_PRIORITY))


_streams = StreamPool(_new_stream)
