"""TCPStoreServer: the one process that holds the table of a TCP store."""

from __future__ import annotations

import errno
import socket
import threading
from datetime import timedelta
from ipaddress import ip_address
from types import TracebackType
from typing import Any

from ...contract.deadline import seconds
from ...errors import InvalidArgumentError, StoreUnavailableError
from .loop import ServerLoop
from .sealing import LONGEST_MESSAGE_BYTES
from .secret import as_secret

DEFAULT_PROOF_TIMEOUT_S = 10.0


class TCPStoreServer:
    """Serves a table to every `TCPStore` that holds the same secret, on a thread of its own, until `close`.

    It listens on exactly one address. A client that does not prove to hold the secret can neither read nor write, cannot
    make the server keep more than 64 bytes, is dropped after `proof_timeout`, and delays nobody. See Note [Challenge and
    response].

    Args:
        host: the one address to listen on, as number or name; not a wildcard such as ``0.0.0.0``.
        port: 0 takes a free one; `port` says which.
        secret: at least 16 bytes, known to all processes of the job and nobody else; `new_secret` makes one.
        max_message_bytes: the longest message that a client may send; a value must be a little shorter.
        proof_timeout: seconds or a timedelta that a client may take to prove that it holds the secret; 10 s if None.

    Raises:
        StoreUnavailableError: the port is in use, or the address is not one of this machine.
        InvalidArgumentError: a wildcard, an impossible port, or a short secret.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        secret: bytes | str,
        max_message_bytes: int = LONGEST_MESSAGE_BYTES,
        proof_timeout: timedelta | float | None = None,
    ) -> None:
        raw_secret, proof_timeout_s = as_secret(secret), seconds(proof_timeout, DEFAULT_PROOF_TIMEOUT_S)
        listener = _listen(host, port)
        self._host, self._port = listener.getsockname()[:2]
        self._loop = ServerLoop(listener, raw_secret, max_message_bytes, proof_timeout_s)
        self._thread = threading.Thread(target=self._loop.run, name=f"syncline store :{self._port}", daemon=True)
        self._thread.start()

    @property
    def host(self) -> str:
        """The address that it listens on, as number."""
        return str(self._host)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._port)

    def close(self) -> None:
        """Hang up on all clients and forget the table. What waits then fails with a StoreError. May be repeated."""
        self._loop.stop()
        self._thread.join()

    def __enter__(self) -> TCPStoreServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:
        raise InvalidArgumentError(f"port={port}: expected 0 to 65535, where 0 takes a free port")
    family, address = _resolve(host, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # not two listeners: a port that has just been left
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        raise _cannot_listen(host, port, error) from error
    return listener


def _resolve(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """The family and the one address that `host` stands for."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise StoreUnavailableError(f"TCP store: {host!r} is not an address or a name that is known here: {error}") from error
    if ip_address(str(address[0])).is_unspecified:
        raise InvalidArgumentError(
            f"host={host!r} means every address of this machine; a store listens on one. Give the address by which the other "
            "processes reach this machine, or 127.0.0.1 if they all run on it"
        )
    return family, address


def _cannot_listen(host: str, port: int, error: OSError) -> StoreUnavailableError:
    if error.errno == errno.EADDRINUSE:
        return StoreUnavailableError(
            f"TCP store: port {port} of {host} is in use by another socket; give port 0 to take a free one, or end the other"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return StoreUnavailableError(f"TCP store: {host} is not an address of this machine; give one that is")
    return StoreUnavailableError(f"TCP store: cannot listen on port {port} of {host}: {error}")
