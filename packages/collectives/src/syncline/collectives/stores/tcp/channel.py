"""Channel: the client's side of one connection to a TCP store."""

from __future__ import annotations

import hmac
import secrets
import socket

from ...contract.deadline import Deadline
from ...errors import StoreAuthenticationError
from .sealing import LONGEST_MESSAGE_BYTES, Opener, Sealer
from .secret import HELLO_BYTES, MAGIC, NONCE_BYTES, PROOF_BYTES, Handshake
from .wire import ProtocolError, unpack

_CHUNK_BYTES = 256 * 1024


class Channel:
    """A connection whose two ends have proved to hold the same secret. For one thread at a time.

    Args:
        host: the server's address or name.
        port: the server's port.
        secret: the shared secret.
        deadline: for connecting and for the proof.

    Raises:
        StoreAuthenticationError: the server does not accept our secret, or does not hold it.
        ProtocolError: what listens there is no store.
        OSError: nobody listens, or the connection broke (ConnectionError), or the time is up (TimeoutError).
    """

    def __init__(self, host: str, port: int, secret: bytes, deadline: Deadline) -> None:
        self._where = f"TCP store at {host}:{port}"
        self._socket = socket.create_connection((host, port), _left_s(deadline))
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._sealer, self._opener = self._prove(secret, deadline)
        except BaseException:
            self._socket.close()
            raise

    def exchange(self, message: bytes, deadline: Deadline) -> tuple[int, list[bytes]]:
        """Send a request and read its answer. After an error, close the channel: the answer may still be on its way.

        Raises:
            ProtocolError: the answer is not one.
            OSError: the connection broke (ConnectionError), or the time is up (TimeoutError).
        """
        self._socket.settimeout(_left_s(deadline))
        self._socket.sendall(self._sealer.seal(message))
        while (answer := self._opener.next()) is None:
            self._opener.feed(self._receive(_CHUNK_BYTES, deadline))
        return unpack(answer)

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def _prove(self, secret: bytes, deadline: Deadline) -> tuple[Sealer, Opener]:
        """See Note [Challenge and response]."""
        hello = self._receive_exactly(HELLO_BYTES, deadline)
        if not hello.startswith(MAGIC):
            raise ProtocolError("it does not speak the protocol of this version of Syncline's store")
        nonce = secrets.token_bytes(NONCE_BYTES)
        handshake = Handshake(secret, hello[len(MAGIC) :], nonce)
        self._socket.sendall(nonce + handshake.client_proof())
        if not hmac.compare_digest(self._receive_exactly(PROOF_BYTES, deadline), handshake.server_proof()):
            raise StoreAuthenticationError(
                f"{self._where}: this process and the server do not hold the same secret, so nothing was read or written; "
                "give both the same one, and check that the port belongs to a server of this job"
            )
        return Sealer(handshake.client_key()), Opener(handshake.server_key(), 2 * LONGEST_MESSAGE_BYTES)

    def _receive_exactly(self, size: int, deadline: Deadline) -> bytes:
        data = b""
        while len(data) < size:
            data += self._receive(size - len(data), deadline)
        return data

    def _receive(self, most: int, deadline: Deadline) -> bytes:
        self._socket.settimeout(_left_s(deadline))
        data = self._socket.recv(most)
        if not data:
            raise ConnectionResetError("the server hung up")
        return data


def _left_s(deadline: Deadline) -> float:
    """Never 0, which would mean not to wait at all, by another error."""
    return max(deadline.remaining_s(), 1e-3)
