"""`ServerLoop`: one thread that serves all clients of a TCP store. No client can block another client."""

from __future__ import annotations

import hmac
import secrets
import time
from math import ceil

import zmq
from zmq.utils import z85

from ..served import ProtocolError, Service, Status, pack
from .sockets import public_key, set_options, split

_LONGEST_PROOF_TIMEOUT_S = 86400.0
_BACKLOG = 1024
# At this address, inside the loop's context, ZeroMQ asks whether a client's public key is accepted (RFC 27).
_ASKS_AT = "inproc://zeromq.zap.01"


class ServerLoop:
    """Authenticates clients and answers requests. Only the thread that calls `run` may use the sockets.

    Args:
        endpoint: the address to listen on, in ZeroMQ's format.
        limit_bytes: the longest message of a client.
        proof_timeout_s: how long a client may take to prove that it has the secret.

    Raises:
        zmq.ZMQError: ZeroMQ cannot listen on the address.
    """

    def __init__(self, endpoint: str, secret: bytes, limit_bytes: int, proof_timeout_s: float) -> None:
        self._client_key = public_key(secret, "client")
        self._limit_bytes = limit_bytes
        self._service: Service[bytes] = Service()
        self._table_id = secrets.token_bytes(8)  # identifies this server's table; a new server has another id
        self._context = zmq.Context()
        try:
            self._zap_socket = self._context.socket(zmq.REP)
            self._zap_socket.bind(_ASKS_AT)
            self._client_socket = self._context.socket(zmq.ROUTER)
            set_options(self._client_socket, secret, "server")
            self._client_socket.curve_server = True
            self._client_socket.zap_domain = b"store"
            self._client_socket.zap_enforce_domain = True  # a client is refused unless `_judge` accepts it
            self._client_socket.handshake_ivl = ceil(1000 * min(proof_timeout_s, _LONGEST_PROOF_TIMEOUT_S))
            self._client_socket.backlog = _BACKLOG
            self._client_socket.ipv6 = "[" in endpoint
            self._client_socket.bind(endpoint)
        except BaseException:
            self._context.destroy(0)
            raise

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return int(self._client_socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])

    def stop(self) -> None:
        """Make `run` return, and wait until `run` has closed the sockets. Call `stop` once, and not on the thread of `run`."""
        self._context.term()

    def run(self) -> None:
        """Serve clients until `stop` is called, then close every socket."""
        poller = zmq.Poller()
        poller.register(self._zap_socket, zmq.POLLIN)
        poller.register(self._client_socket, zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(self._pause_ms()))
                if self._zap_socket in ready:
                    self._judge()
                if self._client_socket in ready:
                    self._serve()
                self._send_answers(self._service.expire(time.monotonic()))
        except zmq.ContextTerminated:
            # `stop` has ended the context.
            pass
        finally:
            self._client_socket.close(0)
            self._zap_socket.close(0)

    def _pause_ms(self) -> int | None:
        expiry = self._service.next_expiry()
        return None if expiry is None else ceil(1000 * max(0.0, expiry - time.monotonic()))

    def _judge(self) -> None:
        """Accept or refuse a new client's public key. ZeroMQ has checked that the client has the matching private key."""
        version, number, _domain, _address, _identity, _mechanism, key, *_ = self._zap_socket.recv_multipart()
        is_ours = hmac.compare_digest(z85.encode(key), self._client_key)
        verdict = (b"200", b"OK") if is_ours else (b"400", b"another secret")
        self._zap_socket.send_multipart([version, number, *verdict, b"", b""])

    def _serve(self) -> None:
        # ZeroMQ's ROUTER socket puts the client's id in front of the parts that `Connection.exchange` has sent.
        client, table_id, *parts = self._client_socket.recv_multipart()
        if table_id not in (b"", self._table_id):  # the client has used the table of an earlier server at this address
            self._send_answers([(client, pack(Status.OTHER_TABLE))])
            return
        message = b"".join(parts)
        try:
            if len(message) > self._limit_bytes:
                raise ProtocolError(f"a message of {len(message)} bytes, where this server allows {self._limit_bytes}")
            self._send_answers(self._service.request(client, message, time.monotonic()))
        except ProtocolError as error:
            self._send_answers([(client, pack(Status.REFUSED, str(error).encode()))])

    def _send_answers(self, replies: list[tuple[bytes, bytes]]) -> None:
        # One request may end the waits of several clients: a `set` also answers the clients that wait for its key.
        for client, message in replies:
            # ZeroMQ drops answers to clients that are gone or do not read.
            self._client_socket.send_multipart([client, self._table_id, *split(message)])
