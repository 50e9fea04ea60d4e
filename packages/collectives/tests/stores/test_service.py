"""What serves a table, as a table: who is answered what and when, with a clock made of numbers."""

from __future__ import annotations

import pytest

from syncline.collectives.stores.served import LONGEST_WAIT_S, Op, ProtocolError, Service, Status, pack, pack_seconds, unpack

DONE = pack(Status.DONE)


def wait(seconds: float, *keys: bytes) -> bytes:
    return pack(Op.WAIT, pack_seconds(seconds), *keys)


def get(seconds: float, key: bytes) -> bytes:
    return pack(Op.GET, pack_seconds(seconds), key)


def put(key: bytes, value: bytes = b"1") -> bytes:
    return pack(Op.SET, key, value)


def test_those_who_waited_are_answered_with_the_change_that_ends_their_wait() -> None:
    service: Service[str] = Service()
    assert service.request("ann", wait(10, b"a", b"b"), now=0) == []
    assert service.request("bob", get(10, b"b"), now=0) == []
    assert service.request("eve", put(b"a"), now=1) == [("eve", DONE)]
    assert service.request("eve", put(b"b", b"2"), now=2) == [
        ("eve", DONE),
        ("ann", DONE),
        ("bob", pack(Status.DONE, b"2")),
    ]
    assert service.next_expiry() is None


@pytest.mark.parametrize(
    "change",
    [put(b"k"), pack(Op.ADD, b"k", b"1"), pack(Op.COMPARE_SET, b"k", b"", b"1")],
    ids=["set", "add", "compare_set"],
)
def test_every_way_to_make_a_key_ends_a_wait(change: bytes) -> None:
    service: Service[str] = Service()
    service.request("ann", wait(10, b"k"), now=0)
    assert ("ann", DONE) in service.request("eve", change, now=1)


def test_limits_end_waits_in_their_own_time_and_name_what_is_missing() -> None:
    service: Service[str] = Service()
    service.request("ann", wait(5, b"a", b"b"), now=0)
    service.request("bob", get(3, b"b"), now=1)
    service.request("eve", put(b"a"), now=1)
    assert service.next_expiry() == 4
    assert service.expire(now=3.9) == []
    assert service.expire(now=4) == [("bob", pack(Status.TIMED_OUT, b"b"))]
    assert service.next_expiry() == 5
    assert service.expire(now=5) == [("ann", pack(Status.TIMED_OUT, b"b"))]
    assert service.next_expiry() is None


def test_what_is_there_is_answered_at_once_and_what_may_not_wait_too() -> None:
    service: Service[str] = Service()
    service.request("eve", put(b"a", b"x"), now=0)
    assert service.request("ann", get(0, b"a"), now=0) == [("ann", pack(Status.DONE, b"x"))]
    assert service.request("ann", wait(0), now=0) == [("ann", DONE)]
    assert service.request("ann", wait(0, b"b"), now=0) == [("ann", pack(Status.TIMED_OUT, b"b"))]


def test_what_a_client_that_has_gone_waited_for_is_not_kept_for_long() -> None:
    service: Service[str] = Service()
    assert service.request("ann", wait(3600, b"a"), now=0) == []
    assert service.next_expiry() == LONGEST_WAIT_S
    assert service.expire(now=LONGEST_WAIT_S) == [("ann", pack(Status.TIMED_OUT, b"a"))]
    assert service.next_expiry() is None


def test_one_request_at_a_time() -> None:
    service: Service[str] = Service()
    service.request("ann", wait(5, b"a"), now=0)
    with pytest.raises(ProtocolError, match="before the answer"):
        service.request("ann", put(b"a"), now=0)


@pytest.mark.parametrize("fields", [[], [b""], [b"a", b"", b"ccc"], [bytes(1000)]])
def test_messages_survive_packing(fields: list[bytes]) -> None:
    assert unpack(pack(7, *fields)) == (7, fields)
