"""The secret of a TCP store and its keys, the parts of a message, and the options of ZeroMQ sockets.

Note [Keys from a secret]
-------------------------
Server and clients communicate through ZeroMQ's CURVE (CurveZMQ, RFC 26: Curve25519, XSalsa20, Poly1305; new keys for each
connection). CURVE encrypts and authenticates, and refuses messages that were forged, altered, repeated or reordered. The two
key pairs are derived from the secret::

    server's private key = HMAC-SHA256(secret, "... server")      client's private key = HMAC-SHA256(secret, "... client")

* A client without the secret does not know the server's public key, which is never sent. So the server closes the connection.
  Even a client that knows this public key cannot derive the client's private key, so the server refuses this client.
* A server without the secret cannot decrypt the client's first message. So the server hangs up. If a program answers
  nevertheless, the client cannot decrypt the answer, and disconnects. In both cases the client has sent no request.
* **Guessing:** a program that pretends to be the server can try many secrets on a client's first message. So a secret has a
  minimum length.

Note [Parts of a message]
-------------------------
ZeroMQ allocates memory for a part of a message as soon as it has read the part's length. This also holds for clients that have
not proved yet that they have the secret. So no part is longer than 64 KiB, and a greater length ends the connection at once.
"""

from __future__ import annotations

import hmac
import secrets
from ipaddress import ip_address
from typing import TYPE_CHECKING

from ...errors import InvalidArgumentError, StoreUnavailableError

if TYPE_CHECKING:
    import zmq

LONGEST_MESSAGE_BYTES = 64 * 1024 * 1024
_PART_BYTES = 64 * 1024
_ENCRYPTION_BYTES = 64  # CURVE adds 33 bytes: a name, a nonce, flags and a tag
# The most messages that wait in ZeroMQ, for each connection and direction. A correct client has only one request in flight.
_MOST_QUEUED_MESSAGES = 2
# The kernel notices after 90 seconds that a peer's machine is dead. The kernel does not notice a stopped process.
_KEEPALIVE_IDLE_S, _KEEPALIVE_PAUSE_S, _KEEPALIVE_PROBES = 60, 10, 3
SHORTEST_SECRET_BYTES = 16
# The number is the version of the protocol. If you change the protocol, change the number. Then the keys differ between
# versions, so a client and a server of different versions refuse each other.
_PROTOCOL = b"syncline store 2 "


def new_secret() -> str:
    """Make a secret that nobody can guess: 256 random bits as text.

    The caller must give the secret to all processes of the job.
    """
    return secrets.token_hex(32)


def as_secret(secret: bytes | str) -> bytes:
    """Return the bytes of a secret. Raise an InvalidArgumentError if the secret is shorter than 16 bytes."""
    raw = secret.encode() if isinstance(secret, str) else bytes(secret)
    if len(raw) < SHORTEST_SECRET_BYTES:
        raise InvalidArgumentError(
            f"the secret of a TCP store must have at least {SHORTEST_SECRET_BYTES} bytes, found {len(raw)}; "
            "make one with syncline.collectives.stores.new_secret() and give it to every process"
        )
    return raw


def private_key(secret: bytes, role: str) -> bytes:
    """Return the private key of `role` ("server" or "client"), as 32 bytes."""
    return hmac.digest(secret, _PROTOCOL + role.encode(), "sha256")


def require_pyzmq() -> None:
    """Raise a StoreUnavailableError if pyzmq is missing, or was built without CURVE (ZeroMQ's encryption)."""
    try:
        import zmq

        lack = None if zmq.has("curve") else "is built on a ZeroMQ without CURVE"
    except ImportError as error:
        lack = f"cannot be imported ({error})"
    if lack is not None:
        raise StoreUnavailableError(
            f"a TCP store needs pyzmq, which {lack}: pip install pyzmq; or let the ranks meet in a "
            "folder (init_method 'file:///shared/folder'), which needs nothing"
        )


def refuse_wildcard(host: str, address: str) -> None:
    """Raise an InvalidArgumentError if `address` stands for all addresses of a machine. `host` is what the caller gave."""
    try:
        is_wildcard = ip_address(address).is_unspecified
    except ValueError:
        is_wildcard = False  # a name
    if is_wildcard:
        raise InvalidArgumentError(
            f"host={host!r} means every address of this machine; a store listens on one. Give the address by which the other "
            "processes reach this machine, or 127.0.0.1 if they all run on it"
        )


def split(message: bytes) -> list[bytes]:
    """Cut a message into parts. There is at least one part; see Note [Parts of a message]."""
    return [message[start : start + _PART_BYTES] for start in range(0, len(message), _PART_BYTES)] or [b""]


def set_options(socket: zmq.Socket[bytes], secret: bytes, role: str) -> None:
    """Set the options of a socket: size limits, keepalive, no wait at close, and the keys of `role` ("server" or "client")."""
    from zmq.utils import z85

    socket.linger = 0
    socket.maxmsgsize = _PART_BYTES + _ENCRYPTION_BYTES
    socket.sndhwm = socket.rcvhwm = _MOST_QUEUED_MESSAGES
    socket.tcp_keepalive = 1
    socket.tcp_keepalive_idle = _KEEPALIVE_IDLE_S
    socket.tcp_keepalive_intvl = _KEEPALIVE_PAUSE_S
    socket.tcp_keepalive_cnt = _KEEPALIVE_PROBES
    socket.curve_secretkey = z85.encode(private_key(secret, role))
    socket.curve_publickey = public_key(secret, role)


def public_key(secret: bytes, role: str) -> bytes:
    """Return the public key of `role` in ZeroMQ's format: text of 40 characters (Z85)."""
    import zmq
    from zmq.utils import z85

    return zmq.curve_public(z85.encode(private_key(secret, role)))


def endpoint(host: str, port: int) -> str:
    """Return an address in ZeroMQ's format. `host` is a numeric address."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
