"""A store that one process serves to other processes over TCP. A shared secret protects the store. The store needs pyzmq.

The way of a request, from `set` in a client to the server's answer::

    TCPStore.set ─► _exchange ─► Connection.exchange ═► ServerLoop._serve ─► Service.request ─► ServerLoop._send_answers

A double line is the network. Before the first request of a connection:

1. `connection._probe` finds an address of the server's host that accepts connections. The connection of this trial is closed
   again.
2. `Connection._shake_hands` waits for the end of ZeroMQ's handshake. Meanwhile `ServerLoop._judge` accepts or refuses the
   client's key.
"""

from .server import TCPStoreServer
from .sockets import new_secret
from .store import TCPStore

__all__ = ["TCPStore", "TCPStoreServer", "new_secret"]
