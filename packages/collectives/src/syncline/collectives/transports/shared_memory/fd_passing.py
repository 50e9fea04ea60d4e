"""Passing a file descriptor between ranks of a node: by /proc, or over a socket (SCM_RIGHTS)."""

from __future__ import annotations

import hmac
import os
import socket

_TIMEOUT_S = 10.0
_TOKEN_BYTES = 16


def open_peer_fd(pid: int, file: int, name: str) -> int:
    """A descriptor of the file that another process of this machine made by `create_file`.

    Raises:
        OSError: the process cannot be looked into (another user, another namespace of users or of processes, a /proc that hides
            it), or the file is another.
    """
    path = f"/proc/{pid}/fd/{file}"
    if os.readlink(path) != f"/memfd:{name} (deleted)":
        raise OSError(f"{path} is not the memory that rank 0 of the node made; do the ranks live in different containers?")
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


class FdServer:
    """A file held out at an abstract socket, which has no place in any file system and needs a common network namespace only.

    Who knows the token may have it. The token travels by MPI, so it is known to ranks of this job alone. (The socket's name is
    for all to see, and to ask the kernel who a peer is says little: a user namespace shows all foreign users as one.)

    Nobody waits in `serve`. It is called when all clients have connected and sent, and the kernel completes both without it.

    Args:
        file: the descriptor.
        clients: how many there can be.

    Attributes:
        address: of the socket.
        token: to be shown by the clients.
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
        """Hand the file to everybody who has come with the token; to others nothing."""
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        try:
            if hmac.compare_digest(connection.recv(_TOKEN_BYTES), self.token):
                socket.send_fds(connection, [b"\0"], [self._file])
        except OSError:
            pass  # a stranger who says nothing, or an asker who has left: that one finds no file in its answer

    def close(self) -> None:
        """Hold it out no longer."""
        self._listener.close()


def request_fd(address: str, token: bytes) -> socket.socket:
    """Connect to a server and show the token.

    Raises:
        OSError: nobody is there: another machine or network namespace.
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
    """The descriptor that a server answers with, once it has served.

    Raises:
        OSError: it answered with none.
    """
    _, files, _, _ = socket.recv_fds(connection, 1, 1)
    if not files:
        raise OSError("rank 0 of the node handed over no file")
    os.set_inheritable(files[0], False)
    return files[0]
