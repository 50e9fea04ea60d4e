"""The secret that server and clients share, and the two private keys that are derived from it.

Note [Keys from a secret]
-------------------------
Server and clients communicate through ZeroMQ's CURVE (CurveZMQ, RFC 26: Curve25519, XSalsa20, Poly1305; new keys for each
connection). It encrypts and authenticates, and refuses messages that were forged, altered, repeated or reordered. Both key
pairs are derived from the secret, so only the secret must be given to all processes::

    server's private key = HMAC-SHA256(secret, "... server")      client's private key = HMAC-SHA256(secret, "... client")

* A client without the secret does not know the server's public key, which is never sent. So the server closes the connection.
  Even with this key, the client would lack the client's private key, and the server's loop would refuse it.
* A server without the secret cannot decrypt the client's first message. So the client leaves before it has sent a request.
* **Guessing:** a program that pretends to be the server can try many secrets on a client's first message. So a secret has a
  minimum length; `new_secret` gives 256 random bits.
"""

from __future__ import annotations

import hmac
import secrets

from ...errors import InvalidArgumentError, StoreUnavailableError

SHORTEST_SECRET_BYTES = 16
# The version of the protocol. Another version needs another number here, and so gets other keys.
_PROTOCOL = b"syncline store 2 "


def new_secret() -> str:
    """Make a secret that nobody can guess: 256 random bits as text. Give it to all processes of the job."""
    return secrets.token_hex(32)


def as_secret(secret: bytes | str) -> bytes:
    """Check the length of a secret, and return its bytes.

    Raises:
        InvalidArgumentError: the secret is shorter than 16 bytes.
    """
    raw = secret.encode() if isinstance(secret, str) else bytes(secret)
    if len(raw) < SHORTEST_SECRET_BYTES:
        raise InvalidArgumentError(
            f"the secret of a TCP store must have at least {SHORTEST_SECRET_BYTES} bytes, found {len(raw)}; "
            "make one with syncline.collectives.stores.new_secret() and give it to every process"
        )
    return raw


def private_key(secret: bytes, role: str) -> bytes:
    """The 32 bytes of the private key of `role` ("server" or "client")."""
    return hmac.digest(secret, _PROTOCOL + role.encode(), "sha256")


def require_pyzmq() -> None:
    """Raise unless ZeroMQ with CURVE can be used.

    Raises:
        StoreUnavailableError: pyzmq is missing, or was built without CURVE.
    """
    try:
        import zmq

        lack = None if zmq.has("curve") else "is built on a ZeroMQ without CURVE"
    except ImportError as error:
        lack = f"cannot be imported ({error})"
    if lack is not None:
        raise StoreUnavailableError(
            f"a TCP store needs pyzmq, which {lack}: pip install 'syncline-collectives[store]'; or let the ranks meet in a "
            "folder (init_method 'file:///shared/folder'), which needs nothing"
        )
