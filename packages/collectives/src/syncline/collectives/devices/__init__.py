"""Tensors that are not in host memory, over a backend that is at home there."""

from ..host.device_runtime import DeviceLayer, StreamOrder
from .by_device import ByDevice

__all__ = ["ByDevice", "DeviceLayer", "StreamOrder"]
