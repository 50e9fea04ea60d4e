"""`TCPStoreServer`: the server of a TCP store, in the process that holds the table."""

from __future__ import annotations

import errno
import socket
import threading
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

from ...engine.cancel_scope import seconds
from ...errors import InvalidArgumentError, StoreUnavailableError
from .sockets import LONGEST_MESSAGE_BYTES, as_secret, endpoint, refuse_wildcard, require_pyzmq

if TYPE_CHECKING:
    import zmq

    from .loop import ServerLoop

DEFAULT_PROOF_TIMEOUT_S = 10.0


class TCPStoreServer:
    """Serves a table to every `TCPStore` that has the same secret. The server has its own thread, which runs until `close`.

    A client must prove that it has the secret before it can read or write. Until then, the server keeps at most about 100 KiB
    of memory for the client.

    Args:
        host: the one address to listen on, as a number or a name; not a wildcard such as ``0.0.0.0``. On Debian, the machine's
            own name often means 127.0.1.1, an address that other machines cannot reach.
        port: the port. 0 takes a free port, whose number is then in the attribute `port`.
        secret: at least 16 bytes, known only to the processes of the job; `new_secret` makes one.
        max_message_bytes: the longest message that a client may send; a value must be a little shorter.
        proof_timeout: how long a client may take to prove that it has the secret, in seconds or as a timedelta; 10 s if None.

    Raises:
        StoreUnavailableError: the port is in use, `host` is unknown or not an address of this machine, or pyzmq is missing.
        InvalidArgumentError: `host` is a wildcard, `port` is not a port number, or the secret is too short.
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
        require_pyzmq()
        self._host = _address(host, port)
        self._loop = _listen(self._host, port, raw_secret, max_message_bytes, proof_timeout_s)
        self._port = self._loop.port
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._loop.run, name=f"syncline store :{self._port}", daemon=True)
        self._thread.start()

    @property
    def host(self) -> str:
        """The IP address on which the server listens, such as "127.0.0.1"; never a host's name."""
        return self._host

    @property
    def port(self) -> int:
        """The port on which the server listens."""
        return self._port

    def close(self) -> None:
        """Close all connections and forget the table. Waiting calls fail with a StoreError. A second call does nothing."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._loop.stop()
                self._thread.join()

    def __enter__(self) -> TCPStoreServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _address(host: str, port: int) -> str:
    if not 0 <= port <= 65535:
        raise InvalidArgumentError(f"port={port}: expected 0 to 65535, where 0 takes a free port")
    try:
        address = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][4]
    except socket.gaierror as error:
        raise StoreUnavailableError(f"TCP store: {host!r} is not an address or a name that is known here: {error}") from error
    refuse_wildcard(host, str(address[0]))
    return str(address[0])


def _listen(host: str, port: int, secret: bytes, limit_bytes: int, proof_timeout_s: float) -> ServerLoop:
    import zmq

    from .loop import ServerLoop

    try:
        return ServerLoop(endpoint(host, port), secret, limit_bytes, proof_timeout_s)
    except zmq.ZMQError as error:
        raise _cannot_listen(host, port, error) from error


def _cannot_listen(host: str, port: int, error: zmq.ZMQError) -> StoreUnavailableError:
    if error.errno == errno.EADDRINUSE:
        return StoreUnavailableError(
            f"TCP store: port {port} of {host} is in use; give another port (in MASTER_PORT, for example), or end the process "
            "that uses it. If that process is of this job, two processes have rank 0"
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return StoreUnavailableError(f"TCP store: {host} is not an address of this machine; give one that is")
    return StoreUnavailableError(f"TCP store: cannot listen on port {port} of {host}: {error}")
