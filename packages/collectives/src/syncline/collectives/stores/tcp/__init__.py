"""A store that one process serves to the others over TCP, protected by a shared secret. Using it needs pyzmq.

The client's side is `store`, above `connection`. The server's side is `server`, whose thread runs `loop`. Both sides use
`sockets` (settings and keys) and `stores.served` (the messages).
"""

from .server import TCPStoreServer
from .sockets import new_secret
from .store import TCPStore

__all__ = ["TCPStore", "TCPStoreServer", "new_secret"]
