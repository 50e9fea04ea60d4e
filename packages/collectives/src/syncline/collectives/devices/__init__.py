"""Tensors that are not in host memory, over a backend that is at home there."""

from .by_device import ByDevice
from .layer import DeviceLayer, StreamOrder

__all__ = ["ByDevice", "DeviceLayer", "StreamOrder"]
