"""A store that one process serves to other processes over TCP. A shared secret protects the store. The store needs pyzmq."""

from .server import TCPStoreServer
from .sockets import new_secret
from .store import TCPStore

__all__ = ["TCPStore", "TCPStoreServer", "new_secret"]
