"""`Connection`: the client's side of one connection to a TCP store."""

from __future__ import annotations

import errno
import os
import socket
from math import ceil

import zmq
from zmq.utils.monitor import recv_monitor_message

from ...engine.cancel_scope import CancelScope
from ...errors import StoreAuthenticationError
from ..served import ProtocolError
from .sockets import endpoint, public_key, set_options, split

_HANDSHAKE_ENDED = {
    zmq.EVENT_HANDSHAKE_SUCCEEDED,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
}
_CONNECTION_ENDED = {zmq.EVENT_CLOSED, zmq.EVENT_DISCONNECTED}

# The longest wait for a server's first byte. A thread of ZeroMQ sends this byte at once, even if the server's process is busy.
GREETING_S = 10.0
_FIRST_BYTE = b"\xff"
_ADDRESS_S = 10.0  # the longest wait for one address of a host that has several addresses
_contexts: dict[int, zmq.Context[zmq.Socket[bytes]]] = {}  # by process id: a forked child must not use its parent's context


class HungUpError(ConnectionError):
    """The server closed the connection during the handshake, because the server has another secret or is about to end."""


class Connection:
    """A connection whose two ends have proved that they have the same secret. Only one thread at a time may use a connection.

    A broken connection is not made again, because the server may have carried out the last request. `scope` is the time limit
    for connecting and the handshake.

    Raises:
        HungUpError: the server closed the connection.
        StoreAuthenticationError: the server does not have our secret.
        ProtocolError: the program at this port is not a store.
        OSError: no program listens, the connection broke (ConnectionError), or the time limit was reached (TimeoutError).
    """

    def __init__(self, host: str, port: int, secret: bytes, scope: CancelScope) -> None:
        self._where = f"TCP store at {host}:{port}"
        address = _probe(host, port, scope)
        try:
            self._make_sockets(secret)
        except zmq.ZMQError as error:  # for example, no file descriptor is left
            raise OSError(error.errno, error.strerror) from error
        try:
            self._socket.connect(address)
            self._shake_hands(scope)
        except BaseException:
            self.close()
            raise

    def _make_sockets(self, secret: bytes) -> None:
        self._socket = _context().socket(zmq.DEALER)
        set_options(self._socket, secret, "client")
        self._socket.curve_serverkey = public_key(secret, "server")
        self._socket.reconnect_ivl = -1
        self._socket.ipv6 = True
        # After the handshake, the monitor socket gets an event only when the connection ends.
        self._events = self._socket.get_monitor_socket(sum(_HANDSHAKE_ENDED | _CONNECTION_ENDED))
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._events, zmq.POLLIN)

    def is_open(self) -> bool:
        """Return whether the connection is still open."""
        return not self._events.poll(0, zmq.POLLIN)

    def exchange(self, table_id: bytes, message: bytes, scope: CancelScope) -> tuple[bytes, bytes]:
        """Send a request, and wait for the answer. Return the id of the server's table, and the answer.

        `table_id` is the id of the table that the client has used so far; empty before the first answer. A server with another
        table refuses the request.

        After an error, close the connection. Otherwise a late answer could be taken for the answer to the next request.

        Raises:
            OSError: the connection broke (ConnectionError), or the time limit was reached (TimeoutError).
        """
        try:
            self._socket.send_multipart([table_id, *split(message)], zmq.NOBLOCK)
        except zmq.Again:
            raise ConnectionResetError("the server hung up") from None
        ready = dict(self._poller.poll(_left_ms(scope)))
        if not ready:
            raise TimeoutError
        if self._socket not in ready and not self._socket.poll(0, zmq.POLLIN):  # an answer may have come just before the end
            raise ConnectionResetError("the server hung up")
        answered_by, *parts = self._socket.recv_multipart()
        return answered_by, b"".join(parts)

    def close(self) -> None:
        """Close the connection. Call this method only in the process that connected, not in a forked child."""
        self._socket.disable_monitor()
        self._events.close(0)
        self._socket.close(0)

    def _shake_hands(self, scope: CancelScope) -> None:
        if not self._events.poll(_left_ms(scope), zmq.POLLIN):
            raise TimeoutError("it took the connection and said nothing")
        message = recv_monitor_message(self._events)
        event, value = message["event"], message["value"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            return
        # The usual event if the secrets differ: the server cannot read the handshake, and hangs up. A server that is about to
        # end hangs up, too. So `TCPStore._connect` tries a second time before it raises an error about the secret.
        if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL:
            raise HungUpError(f"it hung up ({errno.errorcode.get(value, value)})")
        # FAILED_AUTH: the server could read the handshake, but refuses this client's key. FAILED_PROTOCOL: this client cannot
        # read the server's answer. The event does not say whether the server lacks the secret, or breaks the protocol.
        if event in _HANDSHAKE_ENDED:
            raise other_secret(self._where)
        if event == zmq.EVENT_CLOSED:
            raise ConnectionRefusedError("connection refused")
        raise ProtocolError("it does not speak the protocol of this version of Syncline's store")


def other_secret(where: str) -> StoreAuthenticationError:
    """Return the error for a client and a server with different secrets."""
    return StoreAuthenticationError(
        f"{where}: this process and the server do not hold the same secret, so nothing was read or written; "
        "give both the same one, and check that the port belongs to a server of this job"
    )


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    pid = os.getpid()
    if pid not in _contexts:
        # The context has one thread for all connections, and lives as long as the process.
        made = zmq.Context()
        if _contexts.setdefault(pid, made) is not made:  # another thread has made one meanwhile
            made.term()
    return _contexts[pid]


def _probe(host: str, port: int, scope: CancelScope) -> str:
    """Return the first address of `host` that accepts connections, in ZeroMQ's format.

    Raises:
        ProtocolError: another program uses this port, or the server is stopped.
        OSError: no address accepts connections.
    """
    # Try a plain connection first, and throw it away: ZeroMQ makes the real connection, but does not say why one fails.
    with _connected(host, port, scope) as plain:
        if plain.getsockname() == plain.getpeername():  # connected to itself: the system chose this port for our own end
            raise ConnectionRefusedError("connection refused")
        plain.settimeout(min(GREETING_S, max(scope.remaining_s(), 1e-3)))
        try:
            first = plain.recv(1)
        except TimeoutError:
            if scope.is_over():
                raise TimeoutError("it took the connection and said nothing") from None
            raise ProtocolError(
                f"it says nothing for {GREETING_S:g} s\nIf it is rank 0 of this job, that process is stopped (by a signal or a "
                "debugger), or has no file descriptor left (`ulimit -n`)"
            ) from None
        if first not in (_FIRST_BYTE, b""):  # an empty answer comes from a server that is about to end
            raise ProtocolError(f"it begins with {first!r}")
        number, _ = socket.getnameinfo(plain.getpeername(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)
    return endpoint(number, port)


def _connected(host: str, port: int, scope: CancelScope) -> socket.socket:
    """Connect to the first address of `host` that accepts a connection.

    `socket.create_connection` is not used, because an address that never answers would use up the time of the later addresses.

    Raises:
        OSError: no address accepts connections; the error is that of the last address.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for number, (family, kind, protocol, _, address) in enumerate(found):
        limit_s, left = scope.remaining_s(), len(found) - number
        # The last of several addresses gets no more time than the others: the server may start later, at an earlier address.
        if len(found) > 1:
            limit_s = min(_ADDRESS_S, limit_s / left)
        plain = None
        try:
            plain = socket.socket(family, kind, protocol)
            plain.settimeout(max(limit_s, 1e-3))
            plain.connect(address)
            return plain
        except BaseException as error:
            if plain is not None:
                plain.close()
            if left == 1 or not isinstance(error, OSError):
                raise
    raise AssertionError("getaddrinfo returns at least one address, or raises an error")


def _left_ms(scope: CancelScope) -> int:
    return ceil(1000 * scope.remaining_s())
