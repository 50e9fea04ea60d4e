"""How client and server convince each other that they hold the same secret, which itself never travels.

Note [Challenge and response]
-----------------------------
::

    server                                            client
       ── magic, nonce S (32 random bytes) ──────────►
       ◄── nonce C (32 random bytes), proof("client") ──      wrong: the server answers 32 zeros and hangs up
       ── proof("server") ───────────────────────────►        wrong: the client hangs up
       ◄══ sealed messages from here on ══════════════►       Note [Sealed messages]

    proof(role) = HMAC-SHA256(secret, magic + role + S + C)

* **Replay:** S is new for every connection, so a recorded answer proves nothing to the server; C does the same for the client.
* **Reflection:** the role is part of what is hashed, so nobody's proof can be sent back to him.
* **A stranger learns nothing:** the server says nothing that depends on the secret before the client has proved to hold it.
* **Relaying** the handshake between two honest parties gains nothing: the messages after it are sealed with keys that the
  relay does not have.
* **Guessing:** whoever stands in for the server gets one proof, on which he can try secrets at leisure. Hence the least
  length; `new_secret` gives 256 random bits.
* Lengths are fixed, so nothing a stranger sends makes the server keep more than 64 bytes of him.

Messages are authenticated, not encrypted: who can listen on the wire can read the keys and values.
"""

from __future__ import annotations

import hmac
import secrets

from ...errors import InvalidArgumentError

MAGIC = b"syncline-store-1"
NONCE_BYTES = 32
PROOF_BYTES = 32
HELLO_BYTES = len(MAGIC) + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES
REFUSAL = bytes(PROOF_BYTES)
SHORTEST_SECRET_BYTES = 16


def new_secret() -> str:
    """A secret that nobody can guess: 256 random bits as text, to be handed to all processes of the job."""
    return secrets.token_hex(32)


def as_secret(secret: bytes | str) -> bytes:
    """A secret that is long enough.

    Raises:
        InvalidArgumentError: it is shorter than 16 bytes.
    """
    raw = secret.encode() if isinstance(secret, str) else bytes(secret)
    if len(raw) < SHORTEST_SECRET_BYTES:
        raise InvalidArgumentError(
            f"the secret of a TCP store must have at least {SHORTEST_SECRET_BYTES} bytes, found {len(raw)}; "
            "make one with syncline.collectives.stores.new_secret() and give it to every process"
        )
    return raw


class Handshake:
    """What both sides can compute once both nonces are known.

    Args:
        secret: the shared secret.
        server_nonce: 32 bytes drawn by the server for this connection.
        client_nonce: 32 bytes drawn by the client for this connection.
    """

    def __init__(self, secret: bytes, server_nonce: bytes, client_nonce: bytes) -> None:
        self._secret = secret
        self._nonces = server_nonce + client_nonce

    def client_proof(self) -> bytes:
        """Only who has the secret can say this; said by the client."""
        return self._derive(b"client proof")

    def server_proof(self) -> bytes:
        """Only who has the secret can say this; said by the server."""
        return self._derive(b"server proof")

    def client_key(self) -> bytes:
        """Seals what the client says."""
        return self._derive(b"client seals")

    def server_key(self) -> bytes:
        """Seals what the server says."""
        return self._derive(b"server seals")

    def _derive(self, role: bytes) -> bytes:
        return hmac.digest(self._secret, MAGIC + role + self._nonces, "sha256")
