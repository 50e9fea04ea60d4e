"""Pass a file descriptor between ranks of a node, through /proc or over a socket (SCM_RIGHTS)."""

from __future__ import annotations

import hmac
import os
import socket

_TIMEOUT_S = 10.0
_TOKEN_BYTES = 16


def open_peer_fd(pid: int, file: int, name: str) -> int:
    """Open a file that another process of this machine made with `create_file`.

    Raises:
        OSError: this process may not look into the other one (another user, another namespace of users or processes, a
            restricted /proc), or the descriptor is another file.
    """
    path = f"/proc/{pid}/fd/{file}"
    # With another namespace of processes, the number may mean another process here.
    if os.readlink(path) != f"/memfd:{name} (deleted)":
        raise OSError(f"{path} is not the memory that rank 0 of the node made; do the ranks live in different containers?")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


class FdServer:
    """Offers a file at an abstract socket. Such a socket is in no file system; clients need only the same network namespace.

    A client gets the file if it knows the token. The token travels by MPI, so only ranks of this job know it. (Everybody can
    see the socket's name, and asking the kernel for the peer's user does not help: a user namespace shows all foreign users as
    one.)

    `serve` never waits. Call it when all clients have connected and sent; the kernel completes both without the server.

    Args:
        file: the file's descriptor.
        clients: the largest number of clients.

    Attributes:
        address: the socket's address.
        token: the bytes that clients must send.
    """

    def __init__(self, file: int, clients: int) -> None:
        self.address = f"\0syncline-{os.urandom(16).hex()}"
        self.token = os.urandom(_TOKEN_BYTES)
        self._file = file
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(self.address)
        self._listener.listen(clients)

    def serve(self) -> None:
        """Send the file to every client that has connected and sent the token."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                # Every client that has connected by now is served.
                return
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            if hmac.compare_digest(connection.recv(_TOKEN_BYTES), self.token):
                socket.send_fds(connection, [b"\0"], [self._file])
        except OSError:
            pass  # a stranger that sends nothing, or a client that has left

    def close(self) -> None:
        """Stop offering the file."""
        self._listener.close()


def request_fd(address: str, token: bytes) -> socket.socket:
    """Connect to a server and show the token.

    Raises:
        OSError: no server is there, because it is on another machine or in another network namespace.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(_TIMEOUT_S)
        connection.connect(address)
        connection.sendall(token)
    except BaseException:
        connection.close()
        raise
    return connection


def receive_fd(connection: socket.socket) -> int:
    """The descriptor in the server's answer. Call it after `FdServer.serve`.

    Raises:
        OSError: the answer has no descriptor.
    """
    _, files, _, _ = socket.recv_fds(connection, 1, 1)
    if not files:
        raise OSError("rank 0 of the node handed over no file")
    os.set_inheritable(files[0], False)
    return files[0]
