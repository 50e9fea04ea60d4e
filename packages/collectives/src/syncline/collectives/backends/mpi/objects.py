"""Python objects that ranks show one another, without any of them blocking inside MPI."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import TypeVar

from mpi4py import MPI

_T = TypeVar("_T")

#: Runs an operation that is started so, to its end; `Meeting.run` for one call is one.
Run = Callable[[Callable[[], MPI.Request]], object]


def all_gather(communicator: MPI.Intracomm, mine: _T, run: Run) -> list[_T]:
    """What each rank of a communicator gives.

    mpi4py's own form blocks. That has no deadline, and with some MPI libraries it stops the other threads of the process, in
    which other groups may be doing the same: on two ranks in different order, and both wait for ever.
    """
    packed = MPI.pickle.dumps(mine)
    sizes = array("q", [0]) * communicator.Get_size()
    size = array("q", [len(packed)])
    run(lambda: communicator.Iallgather([size, MPI.INT64_T], [sizes, MPI.INT64_T]))
    block = bytearray(sum(sizes))
    starts = [0, *accumulate(sizes)]
    run(lambda: communicator.Iallgatherv([packed, MPI.BYTE], [block, (list(sizes), starts[:-1]), MPI.BYTE]))
    return [MPI.pickle.loads(block[start:stop]) for start, stop in pairwise(starts)]
