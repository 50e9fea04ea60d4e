"""How a rank of `syncline run` ends."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from syncline.collectives.cli.run import ending
from syncline.collectives.cli.run.ending import first_to_fail


class Clock:
    """Only `sleep` takes time."""

    def __init__(self) -> None:
        self.now_s = 50.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class World:
    """Rank 1 of 3, which fails at 100.0. The notices of the others arrive so many seconds later, in this order."""

    def __init__(self, clock: Clock, *notices: tuple[float, int], after_s: tuple[float, ...] = (0.0, 0.0)) -> None:
        self._clock = clock
        self._notices = list(notices)
        self._arrivals_s = [clock.now_s + seconds for seconds in after_s]
        self.sent: list[tuple[object, int]] = []

    def Get_rank(self) -> int:  # noqa: N802 - the name of MPI
        return 1

    def Get_size(self) -> int:  # noqa: N802 - the name of MPI
        return 3

    def isend(self, notice: object, *, dest: int, tag: int) -> object:
        del tag
        self.sent.append((notice, dest))
        return object()

    def iprobe(self, source: int, tag: int) -> bool:
        del source, tag
        return bool(self._notices) and self._arrivals_s[0] <= self._clock.now_s

    def recv(self, *, source: int, tag: int) -> tuple[float, int]:
        del source, tag
        self._arrivals_s.pop(0)
        return self._notices.pop(0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(ANY_SOURCE=-1)))
    clock = Clock()
    monkeypatch.setattr(ending, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("notices", "first"),
    [
        ([(99.95, 0), (99.90, 2)], 2),  # the notice of the first rank comes last
        ([(99.90, 2), (99.95, 0)], 2),
        ([(100.2, 0), (100.1, 2)], 1),
        ([(99.95, 0)], 0),  # rank 2 does not fail
        ([(100.0, 0)], 0),  # the same moment: the smaller rank is the first one
        ([], 1),
    ],
)
def test_the_first_of_the_ranks_that_fail_together(clock: Clock, notices: list[tuple[float, int]], first: int) -> None:
    world: Any = World(clock, *notices)
    assert first_to_fail(world, 100.0) == first
    assert world.sent == [((100.0, 1), 0), ((100.0, 1), 2)]


def test_a_rank_stops_reading_when_the_first_one_does(clock: Clock) -> None:
    """Rank 0 failed 0.2 s before, and reads until 0.1 s from now. It does not see what comes later, so this rank must not."""
    world: Any = World(clock, (99.8, 0), (99.7, 2), after_s=(0.0, 0.15))
    assert first_to_fail(world, 100.0) == 0
    assert clock.now_s < 50.15
