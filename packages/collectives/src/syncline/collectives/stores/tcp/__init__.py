"""A store that one process serves to other processes over TCP. A shared secret protects the store. The store needs pyzmq.

The client is in the module `store`, which uses `connection`. The server is in the module `server`, which runs `loop` in a
thread. The client and the server use `sockets` (socket options and keys) and `stores.served` (the messages).
"""

from .server import TCPStoreServer
from .sockets import new_secret
from .store import TCPStore

__all__ = ["TCPStore", "TCPStoreServer", "new_secret"]
