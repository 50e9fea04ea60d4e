"""The `DeviceRuntime` of CUDA."""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any

import torch
from typing_extensions import override

from ..engine.device import DeviceRuntime, Event, Stream
from ..torch_internals import handle_of_current_stream
from ..work import GroupFuture, TensorsFuture

_HIGH_PRIORITY = -1
_CAPTURE_MODE_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED


class CudaEvent(Event):
    """A CUDA event. The constructor records the event after all operations that are on the stream at that time."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._device = stream.device
        self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record(stream)

    @override
    def order_current_stream(self) -> None:
        self._event.wait(_current_stream(self._device))

    def order(self, stream: torch.cuda.Stream) -> None:
        """Make `stream` wait for this event."""
        self._event.wait(stream)

    @override
    def is_over(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]


# The current streams seen so far, by device and handle. For one stream, torch makes many objects with one handle.
_seen: dict[tuple[torch.device, int], torch.cuda.Stream] = {}


def _current_stream(device: torch.device) -> torch.cuda.Stream:
    key = device, handle_of_current_stream(device)
    stream = _seen.get(key)
    if stream is None:
        # torch's function makes a new object, which takes several microseconds.
        stream = _seen[key] = torch.cuda.current_stream(device)
    return stream


class _Current:
    """A context manager like `torch.cuda.stream`, but faster if the stream is on the current device."""

    __slots__ = ("_before", "_stream", "_usual")

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream
        self._before: torch.cuda.Stream | None = None
        self._usual: Any = None  # torch's context, which has no types

    def __enter__(self) -> None:
        device = self._stream.device
        if torch.cuda.current_device() != device.index:
            # The stream is on another device. torch's context changes the device, too.
            self._usual = torch.cuda.stream(self._stream)
            self._usual.__enter__()
            return
        self._before = _current_stream(device)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *error: Any) -> None:
        if self._usual is not None:
            self._usual.__exit__(*error)
        elif self._before is not None:
            torch.cuda.set_stream(self._before)


class CudaStream(Stream):
    """A CUDA stream.

    If `is_own` is True, CuPy makes the stream, and only the owner of this object uses the stream. Otherwise the stream comes
    from torch's pool, and other code may use the stream, too.
    """

    def __init__(self, device: torch.device, *, is_own: bool) -> None:
        self.device = device
        self._stream: torch.cuda.Stream
        if is_own:
            self._stream = torch.cuda.ExternalStream(_own_streams.acquire(device, self), device)  # type: ignore[no-untyped-call]
        else:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.handle = int(self._stream.cuda_stream)

    @override
    def wait_for(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        event.order(self._stream)

    @override
    def current(self) -> AbstractContextManager[object]:
        return _Current(self._stream)

    @override
    def record(self) -> CudaEvent:
        return CudaEvent(self._stream)

    def complete(self, future: TensorsFuture, tensors: list[torch.Tensor], done: Event, *, captured: bool) -> None:
        """Complete the future now. GPU operations that its waiters and callbacks issue start only after `done`.

        `captured`: whether the collective is part of a CUDA graph.
        """
        assert isinstance(done, CudaEvent)
        # torch records an event on the current stream, and waiters and callbacks wait for this event. This object's stream may
        # already hold later collectives, so make a stream current that waits only for `done`. A capture requires that all its
        # streams are joined at the end, and no code would join such a stream. So a capture uses this object's stream.
        ordered: torch.cuda.Stream = self._stream
        if not captured:
            ordered = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
            done.order(ordered)
        with torch.cuda.stream(ordered):
            future.set_result(tensors)

    def keep(self, tensor: torch.Tensor) -> None:
        """See `DeviceRuntime.keep`."""
        tensor.record_stream(self._stream)


class CudaRuntime(DeviceRuntime):
    """The CUDA devices of this process.

    A caller may drop pinned memory while a copy runs: torch reuses the memory only after the copy.
    """

    device_type = "cuda"

    @override
    def owns(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda

    # ---- streams and events ----

    @override
    def stream(self, device: torch.device, *, is_own: bool) -> CudaStream:
        return CudaStream(device, is_own=is_own)

    @override
    def now(self, device: torch.device) -> CudaEvent:
        return CudaEvent(_current_stream(device))

    @override
    def current_stream(self, device: torch.device) -> int:
        return handle_of_current_stream(device)

    @override
    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    @override
    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        assert isinstance(stream, CudaStream)
        stream.keep(tensor)

    # ---- for groups on streams ----

    @override
    def current_device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device())

    @contextmanager
    @override
    def background(self, device: torch.device) -> Iterator[None]:
        # By default, a thread that queries an event breaks other threads' CUDA graph captures. The relaxed mode prevents this.
        driver = _driver()
        if driver is not None:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_CAPTURE_MODE_RELAXED)))
        with torch.cuda.device(device):
            yield

    @override
    def pci_id(self, device: torch.device) -> str:
        from cupy.cuda import runtime

        return str(runtime.deviceGetPCIBusId(device.index))

    @override
    def future(self, device: torch.device) -> TensorsFuture:
        return GroupFuture([device])

    # ---- copies ----

    def empty_on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Allocate flat, pinned host memory with as many elements as `tensor`."""
        return torch.empty(tensor.numel(), dtype=tensor.dtype, device="cpu", pin_memory=True)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy the tensor to pinned host memory, and wait for the copy. The thread does not hold the GIL while it waits."""
        host = self.empty_on_host(tensor)
        host.copy_(tensor.view(-1), non_blocking=True)
        self.finish(tensor)
        return host

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor) -> None:
        """Start to copy `host` to `tensor` on the current stream."""
        tensor.view(-1).copy_(host, non_blocking=True)

    @override
    def finish(self, tensor: torch.Tensor) -> None:
        torch.cuda.current_stream(tensor.device).synchronize()


class StreamPool:
    """Lends each CUDA stream to one user (any object) at a time. When Python frees the user, another user can get the stream.

    If two users shared a stream, a send could be queued behind a receive. If the other rank sends only after it has received
    this send, both ranks would wait for ever.
    """

    def __init__(self, make: Callable[[torch.device], int]) -> None:
        self._make = make
        self._idle: dict[torch.device, list[int]] = defaultdict(list)
        self._lock = Lock()

    def acquire(self, device: torch.device, user: object) -> int:
        """Return the handle of a stream. The stream belongs to `user` until Python frees `user`."""
        with self._lock:
            idle = self._idle[device]
            handle = idle.pop() if idle else self._make(device)
        # The stream is never destroyed, because torch's allocator keeps memory for each stream handle.
        # At exit nobody needs a stream any more, so the finalizer does not run then.
        weakref.finalize(user, idle.append, handle).atexit = False
        return handle


def _new_stream(device: torch.device) -> int:
    from cupy.cuda import runtime

    with torch.cuda.device(device):
        # torch's own streams come from a pool of 32, so two users could get the same stream.
        return int(runtime.streamCreateWithPriority(runtime.streamNonBlocking, _HIGH_PRIORITY))


_own_streams = StreamPool(_new_stream)


@functools.cache
def _driver() -> Any | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        # Without this library, only CUDA graph captures may break.
        return None


def cuda_runtime() -> CudaRuntime | None:
    """Return a `CudaRuntime` for a new group, or None if this process sees no CUDA device."""
    return CudaRuntime() if torch.cuda.is_available() else None
