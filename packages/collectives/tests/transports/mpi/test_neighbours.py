"""What ranks tell their neighbours, and these theirs, on a communicator that is played."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

from mpi4py import MPI

from syncline.collectives.health.statements import ranks_in_words
from syncline.collectives.transports.mpi import neighbours as module
from syncline.collectives.transports.mpi.library import Tag
from syncline.collectives.transports.mpi.neighbours import (
    LeaveNotices,
    MPIStatusPost,
    TimeoutReport,
    connect_neighbours,
    neighbours,
)


class Done:
    """A request, or a message, that is complete."""

    def __init__(self, content: Any = None) -> None:
        self._content = content

    def Wait(self) -> None:  # noqa: N802 - mpi4py's name
        pass

    def Test(self) -> bool:  # noqa: N802
        return True

    def recv(self) -> Any:
        return self._content

    def Irecv(self, buffer: Any) -> Done:  # noqa: N802
        buffer[0][:] = self._content
        return self


class World:
    """The mailboxes of all ranks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.mail: list[deque[tuple[int, Any]]] = [deque() for _ in range(size)]
        self.sent = [0] * size
        self.greetings: set[tuple[int, int]] = set()
        self.greeted: set[tuple[int, int]] = set()

    def communicators(self) -> list[Any]:
        return [Communicator(self, rank) for rank in range(self.size)]


class Communicator:
    """As much of mpi4py's as is used here. Greetings are not counted."""

    def __init__(self, world: World, rank: int) -> None:
        self._world = world
        self._rank = rank

    def Get_rank(self) -> int:  # noqa: N802
        return self._rank

    def Get_size(self) -> int:  # noqa: N802
        return self._world.size

    def Irecv(self, buffer: Any, source: int, tag: int) -> Done:  # noqa: N802
        assert tag == Tag.GREETING
        self._world.greeted.add((source, self._rank))
        return Done()

    def Isend(self, buffer: Any, dest: int, tag: int) -> Done:  # noqa: N802
        if tag == Tag.GREETING:
            self._world.greetings.add((self._rank, dest))
            return Done()
        return self.isend(bytes(buffer[0]), dest, tag)

    def isend(self, content: Any, dest: int, tag: int) -> Done:
        assert dest in neighbours(self._rank, self._world.size)
        self._world.sent[self._rank] += 1
        self._world.mail[dest].append((self._rank, content))
        return Done()

    def improbe(self, tag: int) -> Done | None:
        mail = self._world.mail[self._rank]
        return Done(mail.popleft()[1]) if mail else None

    def Improbe(self, source: int, tag: int, status: MPI.Status) -> Done | None:  # noqa: N802
        return self.improbe(tag) if self.Iprobe(source, tag, status) else None

    def Iprobe(self, source: int, tag: int, status: MPI.Status) -> bool:  # noqa: N802
        mail = self._world.mail[self._rank]
        if mail:
            status.Set_source(mail[0][0])
            status.Set_elements(MPI.BYTE, len(mail[0][1]))
        return bool(mail)

    def Recv(self, buffer: Any, source: int, tag: int) -> None:  # noqa: N802
        buffer[0][:] = self._world.mail[self._rank].popleft()[1]


@pytest.mark.parametrize(
    ("rank", "size", "expected"),
    [(0, 1, []), (0, 2, [1]), (1, 3, [0, 2]), (0, 4, [1, 2, 3]), (0, 5, [1, 2, 3, 4]), (3, 16, [1, 2, 4, 5, 7, 11, 15])],
)
def test_neighbours(rank: int, size: int, expected: list[int]) -> None:
    assert neighbours(rank, size) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16, 33, 1000])
def test_neighbours_are_few_and_know_each_other(size: int) -> None:
    everybody = [neighbours(rank, size) for rank in range(size)]
    assert all(rank in everybody[other] for rank, mine in enumerate(everybody) for other in mine)
    assert max(map(len, everybody)) <= 2 * (size - 1).bit_length()


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_all_neighbours_greet_one_another(size: int) -> None:
    """What a rank sends to a rank that it has never met may wait for that one for ever."""
    world = World(size)
    for rank, communicator in enumerate(world.communicators()):
        assert connect_neighbours(communicator) == neighbours(rank, size)
    expected = {(rank, other) for rank in range(size) for other in neighbours(rank, size)}
    assert world.greetings == world.greeted == expected


def collected(size: int, silent: Sequence[int]) -> tuple[list[str], World]:
    """What each rank says of the others; even ranks wait for "a", odd ones for "b"."""
    world = World(size)
    said = [""] * size

    def collect(rank: int, communicator: Any) -> None:
        said[rank] = TimeoutReport(communicator).collect("ab"[rank % 2])

    of_ranks = [
        threading.Thread(target=collect, args=(rank, communicator))
        for rank, communicator in enumerate(world.communicators())
        if rank not in silent
    ]
    for thread in of_ranks:
        thread.start()
    for thread in of_ranks:
        thread.join()
    return said, world


def test_after_a_time_out_ranks_pass_on_what_they_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of 24 are no neighbours of one another."""
    monkeypatch.setattr(module, "_LISTEN_S", 60.0)  # it ends when all have been heard
    size = 24
    said, world = collected(size, ())
    for rank, text in enumerate(said):
        waiting = {"ab"[odd]: [other for other in range(odd, size, 2) if other != rank] for odd in (0, 1)}
        assert sorted(text.split("; ")) == sorted(f"{ranks_in_words(ranks)} wait in {line}" for line, ranks in waiting.items())
    assert max(world.sent) <= len(neighbours(0, size)) * 12, world.sent


def test_ranks_that_say_nothing_are_named_whoever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LISTEN_S", 2.0)
    said, _ = collected(12, (0, 1, 2, 5))
    for rank, text in enumerate(said):
        if rank not in (0, 1, 2, 5):
            assert text.endswith("ranks 0, 1, 2, 5 said nothing")
            assert text.count("wait") == 2


class Clock:
    """Of the test."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_many_that_leave_are_heard_of_in_few_messages() -> None:
    size, clock = 256, Clock()
    world = World(size)
    notices = [LeaveNotices(communicator, clock) for communicator in world.communicators()]
    for rank in range(1, size):
        notices[rank].leave({"default": 7, "part": rank // 200})
    heard: dict[int, dict[str, int]] = {}
    for _ in range(60):
        for rank, mine in enumerate(notices):
            for notice in mine.receive():
                assert rank != 0 or notice.rank not in heard, "told twice"
                if rank == 0:
                    heard[notice.rank] = dict(notice.started)
        clock.now += 0.05
    assert heard == {rank: {"default": 7, "part": rank // 200} for rank in range(1, size)}
    assert max(world.sent) <= 15 * 8, "15 neighbours, and a wave for each of at most log2 N steps"
    assert all(mine.are_sent() for mine in notices)


def test_one_that_leaves_is_heard_of_by_all_who_wait() -> None:
    size, clock = 32, Clock()
    notices = [LeaveNotices(communicator, clock) for communicator in World(size).communicators()]
    notices[9].leave({"default": 3})
    heard = set()
    for _ in range(60):
        for rank, mine in enumerate(notices):
            if rank < 8 or rank > 16:  # the others compute
                heard |= {rank for notice in mine.receive() if notice.rank == 9}
        clock.now += 0.05
    assert heard == {*range(8), *range(17, size)}


def test_nothing_is_received_after_the_end() -> None:
    notices = [LeaveNotices(communicator) for communicator in World(2).communicators()]
    notices[0].leave({"default": 1})
    notices[1].close()
    assert notices[1].receive() == []


@pytest.mark.parametrize("silent", [None, 8, 12])
def test_lines_come_to_rank_0_in_time_by_two_ways(silent: int | None) -> None:
    size = 16
    world = World(size)
    posts = [MPIStatusPost(communicator) for communicator in world.communicators()]
    for rank in range(1, size):
        posts[rank].post(f"of {rank}")
        posts[rank].post(f"late of {rank}")
    found: dict[int, str] = {}
    for hop in range(2, posts[0].hops + 1):  # the first was made by posting
        assert 15 not in found, f"15 = 8 + 4 + 2 + 1, which takes four; this is number {hop}"
        for rank, post in enumerate(posts):  # the least that a look of all can do: the nearest look first
            if rank not in (0, silent):
                post.pass_on()
        found |= posts[0].posted()
    assert found == {rank: f"late of {rank}" for rank in range(1, size)}
    assert max(world.sent[1:]) <= 2 * (2 + size)


def test_nothing_is_passed_on_when_all_have_left() -> None:
    world = World(8)
    notices = [LeaveNotices(communicator) for communicator in world.communicators()]
    notices[0].leave({"default": 1})
    notices[1].stop()
    assert [notice.rank for notice in notices[1].receive()] == [0]
    assert world.sent[1] == 0
