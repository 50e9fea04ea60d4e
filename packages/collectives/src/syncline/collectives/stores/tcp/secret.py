"""The secret that server and clients share, and the two private keys that follow from it.

Note [Keys from a secret]
-------------------------
Server and clients talk through ZeroMQ's CURVE (CurveZMQ, RFC 26: Curve25519, XSalsa20, Poly1305; fresh keys for each
connection). It encrypts, authenticates, and refuses what is forged, altered, repeated or reordered. Both key pairs follow
from the secret, so that nothing but the secret must be handed around::

    server's private key = HMAC-SHA256(secret, "... server")      client's private key = HMAC-SHA256(secret, "... client")

* A client without the secret does not know the server's public key, which never travels: the server hangs up on it. One
  that knew that key would still lack the client's private key, without which the server's loop refuses it.
* A server without the secret cannot open what the client says first: the client leaves before it has sent a request.
* **Guessing:** whoever stands in for the server can try secrets at leisure on what a client says first. Hence the least
  length; `new_secret` gives 256 random bits.
"""

from __future__ import annotations

import hmac
import secrets

from ...errors import InvalidArgumentError, StoreUnavailableError

SHORTEST_SECRET_BYTES = 16
# Of both ends; another version of what they say to each other gets another number, and so other keys.
_PROTOCOL = b"syncline store 2 "


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


def private_key(secret: bytes, role: str) -> bytes:
    """The 32 bytes of the private key of `role` ("server" or "client")."""
    return hmac.digest(secret, _PROTOCOL + role.encode(), "sha256")


def require_pyzmq() -> None:
    """Raise unless ZeroMQ can be used, with CURVE.

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
