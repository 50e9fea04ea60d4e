"""What ranks that ran out of time tell one another."""

from __future__ import annotations

from typing import Any

import pytest

from syncline.collectives.failures.divergence import ranks_in_words

pytestmark = pytest.mark.mpi


def collected(absent: int, reporters: int) -> tuple[str, Any]:
    """What this rank says of the others, which wait for "a" if their number is even, else for "b"; the absent one does not."""
    from mpi4py import MPI

    from syncline.collectives.backends.mpi.timeout_report import TimeoutReport

    communicator = MPI.COMM_WORLD.Dup()
    rank = communicator.Get_rank()
    text = "" if rank == absent else TimeoutReport(communicator, reporters).collect("ab"[rank % 2])
    communicator.Barrier()
    return text, communicator


def expected(rank: int, size: int, silent: list[int]) -> str:
    """The same, if all are heard but the silent ones."""
    heard = [other for other in range(size) if other not in (rank, *silent)]
    waiting = sorted(([other for other in heard if other % 2 == number], line) for number, line in enumerate("ab"))
    words = [f"{ranks_in_words(of)} {'waits' if len(of) == 1 else 'wait'} in {line}" for of, line in waiting if of]
    return "; ".join([*words, f"{ranks_in_words(silent)} said nothing (dead, gone, or still computing)"])


@pytest.mark.parametrize("reporters", [1, 3])
def test_a_rank_that_is_no_reporter_is_missing(reporters: int) -> None:
    """With one reporter the others hear of one another through it."""
    from mpi4py import MPI

    size, rank = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
    if size == 1:
        pytest.skip("nobody to wait for")
    text, _ = collected(size - 1, reporters)
    assert rank == size - 1 or text == expected(rank, size, [size - 1])


def test_a_reporter_is_missing() -> None:
    """The other one serves."""
    from mpi4py import MPI

    size, rank = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
    if size == 1:
        pytest.skip("nobody to wait for")
    text, _ = collected(0, 2)
    assert rank == 0 or text == expected(rank, size, [0])


def test_all_reporters_are_missing() -> None:
    """Nobody hears of anybody, and each says so in time."""
    from mpi4py import MPI

    size, rank = MPI.COMM_WORLD.Get_size(), MPI.COMM_WORLD.Get_rank()
    if size == 1:
        pytest.skip("nobody to wait for")
    text, _ = collected(0, 1)
    assert rank == 0 or text == expected(rank, size, [other for other in range(size) if other != rank])


def test_many_different_calls_are_told_of_most_ranks() -> None:
    """Pure: what a reporter tells of more calls than it tells has a bound."""
    from syncline.collectives.backends.mpi.timeout_report import _Statements

    statements = _Statements("all_reduce", 0)
    statements.add("all_reduce", range(1, 10_000))
    for other in range(20):
        statements.add(f"call {other}", [10_000 + other])
    packed = statements.packed()
    assert len(packed) < 500
    told = _Statements("mine", 20_000)
    told.add_packed(packed)
    assert told.heard == {*range(10_020), 20_000}
    assert sorted(map(len, told.ranks.values())) == [1] * 8 + [13, 10_000]
