"""torch.cuda and CuPy's runtime as an `Accelerator`."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from ...work import TensorsFuture
from .accelerator import Accelerator, Lane, Moment

_HIGH_PRIORITY = -1
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class CudaMoment(Moment):
    """An event that was recorded."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def order_current_stream(self) -> None:
        """By cudaStreamWaitEvent."""
        self._event.wait(torch.cuda.current_stream(self._device))

    def order(self, stream: torch.cuda.Stream) -> None:
        """The same for another stream."""
        self._event.wait(stream)

    def is_over(self) -> bool:
        """By cudaEventQuery."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]


class CudaLane(Lane):
    """A high-priority stream of torch's pool, so that torch's allocator knows it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=_HIGH_PRIORITY)  # type: ignore[no-untyped-call]
        self.handle = self._stream.cuda_stream

    def run(self, body: Callable[[], None], after: Moment) -> Moment:
        """Issue it at once."""
        assert isinstance(after, CudaMoment)
        after.order(self._stream)
        with torch.cuda.stream(self._stream):
            body()
        return CudaMoment(self._stream)

    def complete(self, future: TensorsFuture, tensors: list[torch.Tensor], done: Moment) -> None:
        """Let torch record, on the current stream, the event that waiters and callbacks wait for.

        The stream may hold later collectives by now, for which they would wait, too; so a stream of torch's pool stands in,
        which waits for `done` only.
        """
        assert isinstance(done, CudaMoment)
        ordered = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        done.order(ordered)
        with torch.cuda.stream(ordered):
            future.set_result(tensors)


class CudaAccelerator(Accelerator):
    """The GPUs that torch sees."""

    device_type = "cuda"

    def current_device(self) -> torch.device:
        """As `torch.cuda.set_device` left it."""
        return torch.device("cuda", torch.cuda.current_device())

    def use(self, device: torch.device) -> AbstractContextManager[object]:
        """Enter torch's context."""
        return torch.cuda.device(device)

    def pci_id(self, device: torch.device) -> str:
        """As CUDA's runtime spells it."""
        from cupy.cuda import runtime

        return str(runtime.deviceGetPCIBusId(device.index))

    def lane(self, device: torch.device) -> CudaLane:
        """A new one."""
        return CudaLane(device)

    def future(self, device: torch.device) -> TensorsFuture:
        """One that knows of streams."""
        return torch.futures.Future(devices=[device])

    def now(self, device: torch.device) -> CudaMoment:
        """An event on the current stream."""
        return CudaMoment(torch.cuda.current_stream(device))

    def current_stream(self, device: torch.device) -> int:
        """Its cudaStream_t."""
        return int(torch.cuda.current_stream(device).cuda_stream)

    def is_capturing(self) -> bool:
        """By cudaStreamIsCapturing."""
        return torch.cuda.is_current_stream_capturing()

    def watch_from_here(self) -> None:
        """By CUDA's default, asking for an event anywhere spoils a capture that goes on elsewhere; the driver lifts that."""
        mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
        try:
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        except OSError:  # a driver of another name: what is watched goes on, only captures may be spoilt
            pass
