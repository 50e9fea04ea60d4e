"""Handing a file over: by /proc, and at a socket."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator

import pytest

from syncline.collectives.backends.mpi.node import handover
from syncline.collectives.backends.mpi.node.handover import Offer, ask, open_file, receive
from syncline.collectives.backends.mpi.node.segment import create_file, padded

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="abstract sockets and memfd_create are Linux's")


@pytest.fixture
def file() -> Iterator[int]:
    made = create_file("test-name", padded(1))
    yield made
    os.close(made)


@pytest.fixture
def offer(file: int) -> Iterator[Offer]:
    made = Offer(file, 3)
    yield made
    made.close()


def test_the_file_of_another_process_is_known_by_its_name() -> None:
    file = create_file("test-name", padded(1))
    other = open_file(os.getpid(), file, "test-name")
    assert os.path.sameopenfile(file, other)
    with pytest.raises(OSError, match="is not the memory that rank 0 of the node made"):
        open_file(os.getpid(), file, "another-name")
    os.close(other)
    os.close(file)
    with pytest.raises(OSError, match="No such file"):
        open_file(os.getpid(), file, "test-name")


def test_all_who_know_the_token_get_the_file(offer: Offer, file: int) -> None:
    connections = [ask(offer.address, offer.token) for _ in range(3)]
    offer.serve()
    for connection in connections:
        with connection:
            received = receive(connection)
        assert received != file
        assert os.path.sameopenfile(file, received)
        assert not os.get_inheritable(received)
        os.close(received)


@pytest.mark.parametrize("token", [b"", b"x", b"x" * 16])
def test_others_get_nothing_and_hold_nobody_up(offer: Offer, token: bytes) -> None:
    """Also one that says nothing at all: it comes first, and the one after it gets its file."""
    with ask(offer.address, token) as stranger, ask(offer.address, offer.token) as connection:
        start_s = time.monotonic()
        offer.serve()
        assert time.monotonic() - start_s < 5.0
        os.close(receive(connection))
        with pytest.raises(OSError, match="handed over no file"):
            receive(stranger)


def test_an_asker_that_has_left_holds_nobody_up(offer: Offer) -> None:
    ask(offer.address, offer.token).close()
    with ask(offer.address, offer.token) as connection:
        offer.serve()
        os.close(receive(connection))


def test_nobody_is_there(offer: Offer) -> None:
    offer.close()
    with pytest.raises(ConnectionRefusedError):
        ask(offer.address, offer.token)


def test_no_answer_is_waited_for_without_end(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "_TIMEOUT_S", 0.01)
    with ask(offer.address, offer.token) as connection, pytest.raises(TimeoutError):
        receive(connection)


def test_offers_have_names_and_tokens_of_their_own(offer: Offer, file: int) -> None:
    other = Offer(file, 1)
    assert other.address != offer.address
    assert other.token != offer.token
    assert len(offer.token) == 16
    assert offer.token.hex() not in offer.address
    with socket.socket(socket.AF_UNIX) as taken, pytest.raises(OSError, match="in use"):
        taken.bind(offer.address)
    other.close()
