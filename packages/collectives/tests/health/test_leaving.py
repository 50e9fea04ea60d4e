from __future__ import annotations

import pytest

from syncline.collectives.health import leaving as module
from syncline.collectives.health.leaving import Leavers, Leaving, absentees


@pytest.mark.parametrize(
    ("started", "number", "expected"),
    [
        ({}, 1, []),
        ({0: 1}, 1, []),  # it came before it left
        ({0: 1}, 2, [0]),
        ({0: 5, 2: 4}, 5, [2]),
        ({0: 0, 2: 0}, 1, [0, 2]),
        ({7: 0}, 1, []),  # no member
    ],
)
def test_absentees(started: dict[int, int], number: int, expected: list[int]) -> None:
    notices = [Leaving(rank, {"group": count, "other": 0}) for rank, count in started.items()]
    assert absentees(notices, "group", number, [0, 1, 2]) == expected


def test_a_rank_that_never_made_the_group_will_not_come_to_it() -> None:
    assert absentees([Leaving(1, {})], "group", 1, [0, 1]) == [1]


def test_groups_of_the_same_name_are_told_apart() -> None:
    leavers = Leavers(list)
    first, second = leavers.group("default", range(2)), leavers.group("default", range(2))
    other = leavers.group("default", range(3))
    first.count.begun, second.count.begun, other.count.begun = 3, 1, 2
    assert sorted(leavers.own().values()) == [1, 2, 3]


def test_a_group_has_one_key_on_all_ranks_whatever_its_parts() -> None:
    """Two of four ranks make a sub-group; then all make a second default group."""
    member, other = Leavers(list), Leavers(list)
    for leavers in (member, other):
        first = leavers.group("default", range(4))
        if leavers is member:
            first.part("default/0.0", [0, 1])
        leavers.group("default", range(4))
    assert set(other.own()) <= set(member.own())


def test_a_closed_group_is_not_open() -> None:
    leavers = Leavers(list)
    calls = leavers.group("default", range(2))
    calls.part("default/0.0", range(2))  # closed with what it is made of
    assert leavers.has_open_group()
    calls.is_closed = True
    assert not leavers.has_open_group()


def test_a_group_that_all_ranks_have_closed_leaves_nothing_in_the_notice() -> None:
    leavers = Leavers(list)
    first, second = leavers.group("default", range(2)), leavers.group("default", range(2))
    first.count.begun, second.count.begun = 3, 1
    first.forget()
    assert list(leavers.own().values()) == [1]
    leavers.group("default", range(2))  # its key is new, too
    assert sorted(leavers.own().values()) == [0, 1]


def test_notices_are_read_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 10.0
    monkeypatch.setattr(module, "monotonic", lambda: now_s)
    post: list[Leaving] = []

    def receive() -> list[Leaving]:
        found, post[:] = list(post), []
        return found

    leavers = Leavers(receive)
    calls = leavers.group("default", [4, 5])
    calls.count.begun = 2
    assert calls.reason_to_give_up() is None
    post.append(Leaving(5, {next(iter(leavers.own())): 1}))
    for _ in range(2):
        assert "rank(s) 5 of the job left" in str(calls.reason_to_give_up())
    calls.count.begun = 1
    assert calls.reason_to_give_up() is None
    assert calls.transfer_reason_to_give_up([1]) is None  # what it sent may be on its way
    now_s += module.TRANSFER_GRACE_S + 1.0
    assert "rank(s) 5 of the job left" in str(calls.transfer_reason_to_give_up([1]))
    assert calls.transfer_reason_to_give_up([0, 1]) is None  # rank 4 may still send
