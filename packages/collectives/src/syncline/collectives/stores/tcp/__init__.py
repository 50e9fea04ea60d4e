"""A store that one process serves to the others over TCP, protected by a shared secret. Using it needs pyzmq."""

from .secret import new_secret
from .server import TCPStoreServer
from .store import TCPStore

__all__ = ["TCPStore", "TCPStoreServer", "new_secret"]
