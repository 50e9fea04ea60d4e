"""Shared code of both ends of a TCP store: cutting a message into parts, and the options of ZeroMQ sockets.

Note [Parts of a message]
-------------------------
ZeroMQ allocates memory for a part of a message as soon as it has read the part's length, also for clients that have not proved
yet that they have the secret. So no part is longer than 64 KiB, and a greater length ends the connection at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .secret import private_key

if TYPE_CHECKING:
    import zmq

LONGEST_MESSAGE_BYTES = 64 * 1024 * 1024
_PART_BYTES = 64 * 1024
_ENCRYPTION_BYTES = 64  # CURVE adds 33 bytes: a name, a nonce, flags and a tag
# For each connection and direction. A correct client has only one request in flight.
_MOST_QUEUED_MESSAGES = 2
# The kernel notices after 90 seconds that a peer's machine is dead. It does not notice a stopped process.
_KEEPALIVE_IDLE_S, _KEEPALIVE_PAUSE_S, _KEEPALIVE_PROBES = 60, 10, 3


def split(message: bytes) -> list[bytes]:
    """The parts of a message, at least one; see Note [Parts of a message]."""
    return [message[start : start + _PART_BYTES] for start in range(0, len(message), _PART_BYTES)] or [b""]


def set_options(socket: zmq.Socket[bytes], secret: bytes, role: str) -> None:
    """Set limits, keepalive, a close that does not wait, and the keys of `role` ("server" or "client")."""
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
    """The public key of `role`, in ZeroMQ's form: text of 40 characters (Z85)."""
    import zmq
    from zmq.utils import z85

    return zmq.curve_public(z85.encode(private_key(secret, role)))


def endpoint(host: str, port: int) -> str:
    """An address in ZeroMQ's form. `host` is a number."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"
