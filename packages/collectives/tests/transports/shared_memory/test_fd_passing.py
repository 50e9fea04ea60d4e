"""Handing a file over: by /proc, and at a socket."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from syncline.collectives.transports.shared_memory import segment
from syncline.collectives.transports.shared_memory.segment import (
    FdServer,
    create_file,
    open_peer_fd,
    padded,
    receive_fd,
    request_fd,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets and memfd_create are Linux's")


@pytest.fixture
def file() -> Iterator[int]:
    made = create_file("test-name", padded(1))
    yield made
    os.close(made)


@pytest.fixture
def server(file: int) -> Iterator[FdServer]:
    made = FdServer(file, 3)
    yield made
    made.close()


def test_the_file_of_another_process_is_known_by_its_name() -> None:
    file = create_file("test-name", padded(1))
    other = open_peer_fd(os.getpid(), file, "test-name")
    assert os.path.sameopenfile(file, other)
    with pytest.raises(OSError, match="is not the memory that rank 0 of the node made"):
        open_peer_fd(os.getpid(), file, "another-name")
    os.close(other)
    os.close(file)
    with pytest.raises(OSError, match="No such file"):
        open_peer_fd(os.getpid(), file, "test-name")


def test_all_who_know_the_token_get_the_file(server: FdServer, file: int) -> None:
    connections = [request_fd(server.address, server.token) for _ in range(3)]
    server.serve()
    for connection in connections:
        with connection:
            received = receive_fd(connection)
        assert received != file
        assert os.path.sameopenfile(file, received)
        assert not os.get_inheritable(received)
        os.close(received)


@pytest.mark.parametrize("token", [b"", b"x", b"x" * 16])
def test_others_get_nothing_and_hold_nobody_up(server: FdServer, token: bytes) -> None:
    """Also one that says nothing at all: it comes first, and the one after it gets its file."""
    with request_fd(server.address, token) as stranger, request_fd(server.address, server.token) as connection:
        start_s = time.monotonic()
        server.serve()
        assert time.monotonic() - start_s < 5.0
        os.close(receive_fd(connection))
        with pytest.raises(OSError, match="handed over no file"):
            receive_fd(stranger)


def test_an_asker_that_has_left_holds_nobody_up(server: FdServer) -> None:
    request_fd(server.address, server.token).close()
    with request_fd(server.address, server.token) as connection:
        server.serve()
        os.close(receive_fd(connection))


def test_nobody_is_there(server: FdServer) -> None:
    server.close()
    with pytest.raises(ConnectionRefusedError):
        request_fd(server.address, server.token)


def test_no_answer_is_waited_for_without_end(server: FdServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "_REQUEST_TIMEOUT_S", 0.01)
    with request_fd(server.address, server.token) as connection, pytest.raises(TimeoutError):
        receive_fd(connection)


def test_offers_have_names_and_tokens_of_their_own(server: FdServer, file: int) -> None:
    other = FdServer(file, 1)
    assert other.address != server.address
    assert other.token != server.token
    assert len(server.token) == 16
    assert server.token.hex() not in server.address
    with socket.socket(socket.AF_UNIX) as taken, pytest.raises(OSError, match="in use"):
        taken.bind(server.address)
    other.close()
