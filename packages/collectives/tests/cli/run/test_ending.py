"""How a rank of `syncline run` ends."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from syncline.collectives.cli.run.ending import first_to_fail


class World:
    """Rank 1 of 3. The notices of the others arrive in the given order."""

    def __init__(self, *notices: tuple[float, int]) -> None:
        self._notices = list(notices)
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
        return bool(self._notices)

    def recv(self, *, source: int, tag: int) -> tuple[float, int]:
        del source, tag
        return self._notices.pop(0)


@pytest.fixture(autouse=True)
def _without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=SimpleNamespace(ANY_SOURCE=-1)))


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
def test_ranks_that_fail_together_agree_on_the_first(notices: list[tuple[float, int]], first: int) -> None:
    world: Any = World(*notices)
    assert first_to_fail(world, 100.0) == first
    assert world.sent == [((100.0, 1), 0), ((100.0, 1), 2)]
