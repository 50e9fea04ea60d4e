"""The report that ranks exchange when they run out of time."""

from __future__ import annotations

import pytest

from syncline.collectives.health.statements import ranks_in_words

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("which", ["first", "last", "middle", "none"])
def test_ranks_that_wait_and_those_that_say_nothing_are_named(which: str) -> None:
    """Ranks with an even number wait for "a", the others for "b"."""
    from mpi4py import MPI

    from syncline.collectives.transports.mpi.neighbours import TimeoutReport

    communicator = MPI.COMM_WORLD.Dup()
    size, rank = communicator.Get_size(), communicator.Get_rank()
    if size == 1:
        pytest.skip("nobody to wait for")
    silent = {"first": [0], "last": [size - 1], "middle": [size // 2], "none": []}[which]
    report = TimeoutReport(communicator)
    text = "" if rank in silent else report.collect("ab"[rank % 2])
    communicator.Barrier()
    assert text == ("" if rank in silent else expected(rank, size, silent))


def expected(rank: int, size: int, silent: list[int]) -> str:
    """The text of a rank about the others."""
    heard = [other for other in range(size) if other not in (rank, *silent)]
    waiting = sorted(([other for other in heard if other % 2 == number], line) for number, line in enumerate("ab"))
    words = [f"{ranks_in_words(of)} {'waits' if len(of) == 1 else 'wait'} in {line}" for of, line in waiting if of]
    words += [f"{ranks_in_words(silent)} said nothing"] if silent else []
    return "; ".join(words) or "no other rank takes part"
