"""Which addresses a host has, and which of them others reach."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from syncline.collectives import LaunchError
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.startup import addresses
from syncline.collectives.startup.addresses import (
    Doors,
    OwnAddress,
    Place,
    Tried,
    address_towards,
    addresses_for_others,
    agreed_addresses,
    chosen_interfaces,
    loopback_domain,
    own_addresses,
    try_doors,
)

LO = OwnAddress("lo", "127.0.0.1")
TABLE = [LO, OwnAddress("eth0", "10.0.0.7"), OwnAddress("ib0", "10.1.0.7"), OwnAddress("eth0", "fd00::7")]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_all_addresses", lambda: TABLE)


def test_the_system_lists_the_loopback_address() -> None:
    assert [entry for entry in addresses._all_addresses() if entry.address == "127.0.0.1"]
    assert all(socket.getaddrinfo(entry.address, None) for entry in addresses._all_addresses())
    assert loopback_domain() == loopback_domain() != ""


def test_the_users_interface_goes_before_the_sites() -> None:
    assert chosen_interfaces({}) == ()
    assert chosen_interfaces({}, "ib0") == ("ib0",)
    assert chosen_interfaces({"GLOO_SOCKET_IFNAME": "eth0, eth1"}, "ib0") == ("eth0", "eth1")


def test_addresses_of_chosen_interfaces(table: None) -> None:
    assert own_addresses() == TABLE[1:]
    assert own_addresses(("ib0", "eth0")) == [TABLE[2], TABLE[1], TABLE[3]]
    assert own_addresses(("lo",)) == [LO]
    with pytest.raises(LaunchError, match=r"interface 'ib1' .*those that have one: lo, eth0, ib0"):
        own_addresses(("ib1",))


def test_a_loopback_address_is_no_address_for_other_hosts(monkeypatch: pytest.MonkeyPatch, table: None) -> None:
    assert addresses_for_others(()) == TABLE[1:]
    with pytest.raises(LaunchError, match=r"several hosts, but interface lo has only loopback addresses.*GLOO_SOCKET_IFNAME"):
        addresses_for_others(("lo",))
    monkeypatch.setattr(addresses, "_all_addresses", lambda: [LO, OwnAddress("lo", "::1")])
    with pytest.raises(LaunchError, match="but this host has only loopback addresses"):
        addresses_for_others(())


def test_the_way_to_an_address_begins_at_one_of_ours() -> None:
    assert address_towards("127.0.0.9") == "127.0.0.1"


@contextmanager
def stranger(greeting: bytes) -> Iterator[Place]:
    """What listens at a place and is no door of ours; with an empty greeting it says nothing."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        said: list[socket.socket] = []

        def greet() -> None:
            said.append(listener.accept()[0])
            said[0].sendall(greeting)

        thread = threading.Thread(target=greet)
        thread.start()
        yield listener.getsockname()
        thread.join()
        said[0].close()


def test_doors_are_told_from_what_else_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_OTHERS_S", 20.0)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        with Doors([OwnAddress("lo", "127.0.0.2"), LO]) as doors, stranger(b"x" * 32) as other:
            tried = try_doors([other, closed.getsockname(), *doors.places], doors.word, CancelScope(20.0))
    assert tried.own == {2: "127.0.0.1", 3: "127.0.0.1"}  # from where the system reaches each of them
    assert tried.failed == {0: "something else answers there", 1: "Connection refused"}
    assert Tried.parse(tried.as_json()) == tried


def test_a_place_that_says_nothing_is_given_up_soon_after_a_door_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses, "_OTHERS_S", 0.1)
    monkeypatch.setattr(addresses, "_LONGEST_TRY_S", 3600.0)
    with Doors([LO]) as doors, stranger(b"") as silent:
        tried = try_doors([silent, *doors.places], doors.word, CancelScope(3600.0))
    assert tried.own == {1: "127.0.0.1"}
    assert tried.failed == {0: "no answer"}


def test_an_address_at_which_the_system_does_not_listen_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    elsewhere = OwnAddress("eth9", "192.0.2.1")
    with Doors([elsewhere, LO]) as doors:
        assert [address for address, _ in doors.places] == ["127.0.0.1"]
        assert try_doors(doors.places, doors.word, CancelScope(20.0)).own == {0: "127.0.0.1"}
    assert "cannot listen at its address 192.0.2.1" in caplog.text
    with pytest.raises(LaunchError, match="rank 0 can listen at none of its addresses"), Doors([elsewhere]) as doors:
        agreed_addresses(doors.places, {1: Tried("a")})


def test_doors_that_nobody_answers_are_given_up_in_time() -> None:
    with stranger(b"") as silent:
        assert try_doors([silent], "word", CancelScope(0.2)).failed == {0: "no answer"}


PLACES = [("10.0.0.1", 1), ("10.1.0.1", 2), ("10.2.0.1", 3)]


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        # rank 1 is on the host of rank 0, and reaches also what nobody else does
        ([{0: "10.0.0.1", 1: "10.1.0.1"}, {1: "10.1.0.2"}], ["10.1.0.1", "10.1.0.1", "10.1.0.2"]),
        ([{0: "10.0.0.8", 2: "10.2.0.8"}, {0: "10.0.0.9"}], ["10.0.0.1", "10.0.0.8", "10.0.0.9"]),
        # no door that all reach: that of most
        ([{1: "a"}, {2: "b"}, {1: "c"}], ["10.1.0.1", "a", "b", "c"]),
    ],
)
def test_the_first_door_that_all_reach_decides(reached: list[dict[int, str]], expected: list[str]) -> None:
    tried = {rank: Tried("host", own) for rank, own in enumerate(reached, start=1)}
    assert agreed_addresses(PLACES, tried) == dict(enumerate(expected))


def test_a_rank_that_reaches_no_door_says_what_it_tried() -> None:
    failed = {0: "no answer", 1: "Connection refused", 2: "no answer"}
    with pytest.raises(LaunchError) as caught:
        agreed_addresses(PLACES, {1: Tried("a", {0: "x"}), 2: Tried("b", {}, failed)})
    first, *rest = str(caught.value).splitlines()
    assert first.startswith(
        "rank 2 (host b) reaches rank 0 at none of its addresses: choose the interface with GLOO_SOCKET_IFNAME"
    )
    assert len(first) <= 200
    assert rest[1:] == ["- 10.0.0.1: no answer", "- 10.1.0.1: Connection refused", "- 10.2.0.1: no answer"]
