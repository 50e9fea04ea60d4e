"""The names that a module needs to implement a backend; see "Write a backend" in the documentation."""

from .engine.host_group import HostGroup
from .engine.transport import Request, Transport
from .startup.backend import Backend, ConnectRequest

__all__ = ["Backend", "ConnectRequest", "HostGroup", "Request", "Transport"]
