"""A store that one process serves to the others over TCP, behind a shared secret. Needs pyzmq, from the first use on."""

from .secret import new_secret
from .server import TCPStoreServer
from .store import TCPStore

__all__ = ["TCPStore", "TCPStoreServer", "new_secret"]
