"""ServerLoop: one thread that serves every client of a TCP store, none of which can hold up another."""

from __future__ import annotations

import selectors
import socket
import time

from .connection import Connection
from .service import Service
from .wire import ProtocolError

MOST_STRANGERS = 128
"""How many clients may be connected that have not proved to hold the secret; for one more, the oldest is dropped."""

_PAUSE_WITHOUT_DESCRIPTORS_S = 0.05


class Peer:
    """A client's socket and the state of its connection."""

    def __init__(self, sock: socket.socket, connection: Connection) -> None:
        self.sock = sock
        self.connection = connection


class ServerLoop:
    """Accepts, reads, answers and drops. Everything but `stop` happens on the thread that calls `run`.

    Args:
        listener: a listening socket; closed at the end.
        secret: the shared secret.
        limit_bytes: the longest message of a client that has proved itself.
        proof_timeout_s: how long a client may take to do so.
    """

    def __init__(self, listener: socket.socket, secret: bytes, limit_bytes: int, proof_timeout_s: float) -> None:
        self._secret = secret
        self._limit_bytes = limit_bytes
        self._proof_timeout_s = proof_timeout_s
        self._listener = listener
        self._service: Service[Peer] = Service()
        self._strangers: dict[Peer, None] = {}  # in order of arrival
        self._bell, self._ear = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._ear, selectors.EVENT_READ)

    def stop(self) -> None:
        """Make `run` return. From any thread."""
        self._bell.close()  # the other end becomes readable

    def run(self) -> None:
        """Serve until `stop`, then close every socket."""
        try:
            while self._turn():
                pass
        finally:
            for key in list(self._selector.get_map().values()):
                if isinstance(key.fileobj, socket.socket):
                    key.fileobj.close()
            self._selector.close()

    def _turn(self) -> bool:
        for key, _ in self._selector.select(self._pause_s()):
            if key.fileobj is self._ear:
                return False
            if key.data is None:
                self._accept()
            elif self._is_open(key.data):  # an earlier event of this turn may have ended it
                self._step(key.data)
        now = time.monotonic()
        for peer in [peer for peer in self._strangers if peer.connection.proof_until <= now]:
            self._drop(peer)
        self._answer(self._service.expire(now))
        return True

    def _pause_s(self) -> float | None:
        """Until the next thing happens by the clock: a wait runs out, or a stranger's time to prove himself."""
        times = [peer.connection.proof_until for peer in self._strangers]
        expiry = self._service.next_expiry()
        if expiry is not None:
            times.append(expiry)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptors left, or the client is gone already: do not turn at full speed
            time.sleep(_PAUSE_WITHOUT_DESCRIPTORS_S)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a client whose machine died is dropped in the end
        peer = Peer(sock, Connection(self._secret, self._limit_bytes, time.monotonic() + self._proof_timeout_s))
        self._selector.register(sock, selectors.EVENT_READ, peer)
        self._strangers[peer] = None
        if len(self._strangers) > MOST_STRANGERS:
            self._drop(next(iter(self._strangers)))
        self._step(peer)

    def _step(self, peer: Peer) -> None:
        """Whatever is possible now: send what is due, or read and answer."""
        try:
            if not peer.connection.outbox:
                self._read(peer)
            self._advance(peer)
        except (OSError, ProtocolError):
            self._drop(peer)

    def _read(self, peer: Peer) -> None:
        try:
            data = peer.sock.recv(peer.connection.room())
        except BlockingIOError:
            return
        if not data:
            raise ProtocolError("the client hung up")
        peer.connection.feed(data)
        if peer.connection.proved:
            self._strangers.pop(peer, None)

    def _advance(self, peer: Peer) -> None:
        """Send, and answer what has come in full, until the socket is full or there is nothing more to do."""
        self._send(peer)
        while self._is_open(peer) and (message := peer.connection.next()) is not None:
            self._answer(self._service.request(peer, message, time.monotonic()))

    def _answer(self, replies: list[tuple[Peer, bytes]]) -> None:
        for peer, message in replies:
            if self._is_open(peer):
                peer.connection.reply(message)
                try:
                    self._send(peer)
                except (OSError, ProtocolError):
                    self._drop(peer)

    def _send(self, peer: Peer) -> None:
        outbox = peer.connection.outbox
        while outbox:
            try:
                del outbox[: peer.sock.send(outbox)]
            except BlockingIOError:
                break
        if peer.connection.refused and not outbox:
            raise ProtocolError("a wrong proof")
        self._selector.modify(peer.sock, selectors.EVENT_WRITE if outbox else selectors.EVENT_READ, peer)

    def _is_open(self, peer: Peer) -> bool:
        return peer.sock.fileno() >= 0

    def _drop(self, peer: Peer) -> None:
        if not self._is_open(peer):
            return
        self._service.forget(peer)
        self._strangers.pop(peer, None)
        self._selector.unregister(peer.sock)
        peer.sock.close()
