"""A store that one process serves to the others over TCP, protected by a shared secret. Using it needs pyzmq."""

from .server import TCPStoreServer
from .sockets import new_secret
from .store import TCPStore

__all__ = ["TCPStore", "TCPStoreServer", "new_secret"]
