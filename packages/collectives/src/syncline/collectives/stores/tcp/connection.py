"""Connection: the server's side of one client, as a state machine without input or output."""

from __future__ import annotations

import hmac
import secrets

from .sealing import Opener, Sealer
from .secret import ANSWER_BYTES, MAGIC, NONCE_BYTES, REFUSAL, Handshake
from .wire import ProtocolError

_CHUNK_BYTES = 256 * 1024


class Connection:
    """Begins with the server's challenge in the outbox; see Note [Challenge and response].

    Args:
        secret: the shared secret.
        limit_bytes: the longest message that a client may send once it has proved to hold the secret.
        proof_until: when it must have proved it, on the monotonic clock.
    """

    def __init__(self, secret: bytes, limit_bytes: int, proof_until: float) -> None:
        self._secret = secret
        self._limit_bytes = limit_bytes
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._inbox = bytearray()
        self._seals: tuple[Opener, Sealer] | None = None
        self.outbox = bytearray(MAGIC + self._nonce)
        self.proof_until = proof_until
        self.refused = False

    @property
    def proved(self) -> bool:
        """Whether the client has proved to hold the secret."""
        return self._seals is not None

    def room(self) -> int:
        """How many bytes to read at most; a stranger gets room for his answer and no more."""
        return _CHUNK_BYTES if self.proved else ANSWER_BYTES - len(self._inbox)

    def feed(self, data: bytes) -> None:
        """Take at most `room()` bytes as they came."""
        if self._seals is not None:
            self._seals[0].feed(data)
            return
        self._inbox += data
        if len(self._inbox) == ANSWER_BYTES:
            self._judge(bytes(self._inbox))

    def next(self) -> bytes | None:
        """The next request, or None. Nothing until the client has proved itself, or while it has not read its answer.

        Raises:
            ProtocolError: too long, or not sealed by this client.
        """
        if self._seals is None or self.outbox:
            return None
        return self._seals[0].next()

    def reply(self, message: bytes) -> None:
        """Put an answer into the outbox."""
        if self._seals is None:
            raise ProtocolError("an answer to a stranger")
        self.outbox += self._seals[1].seal(message)

    def _judge(self, answer: bytes) -> None:
        handshake = Handshake(self._secret, self._nonce, answer[:NONCE_BYTES])
        if not hmac.compare_digest(answer[NONCE_BYTES:], handshake.client_proof()):
            self.refused = True
            self.outbox += REFUSAL
            return
        self._seals = Opener(handshake.client_key(), self._limit_bytes), Sealer(handshake.server_key())
        self.outbox += handshake.server_proof()
