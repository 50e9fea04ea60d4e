"""Tensors that are not in host memory, over a backend that is at home there."""

from ..host.device_runtime import DeviceRuntime, StreamOrder
from .device_dispatch_transport import DeviceDispatchTransport

__all__ = ["DeviceDispatchTransport", "DeviceRuntime", "StreamOrder"]
