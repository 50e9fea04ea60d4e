"""The backends that come with syncline-collectives, and what the author of another one needs."""

from ..engine.group import HostGroup
from ..engine.transport import Request, Transport
from ..startup.backend import Backend, ConnectRequest

__all__ = ["Backend", "ConnectRequest", "HostGroup", "Request", "Transport"]
