"""Shows how MPI itself handles processes that it starts in place of lost ranks: without Syncline, only mpi4py.

    mpirun --with-ft ulfm -n 4 python tools/test_support/spawned_newcomers.py [lose] [again] [kill]

With "lose" rank 1 is killed, and the others shrink. Then one process is spawned (with "again" another one later), and merged
with the present ranks. With "kill" the newcomer is killed, too, and the others shrink again. Without any of these words it
needs no ULFM, and runs under MPICH as well.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from mpi4py import MPI


def killed_soon() -> None:
    """Give the others time to wait for this rank."""
    time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)


def shrunk(communicator: MPI.Intracomm) -> MPI.Intracomm:
    """Notice that a rank is lost; returns a communicator of the remaining ranks."""
    try:
        communicator.Barrier()
    except MPI.Exception as error:
        print(f"noticed: error class {error.Get_error_class()}", flush=True)
    if not communicator.Is_revoked():
        communicator.Revoke()
    return tolerant(MPI.Intracomm(communicator.Shrink()))


def tolerant(communicator: MPI.Intracomm) -> MPI.Intracomm:
    """The communicator, with errors that are raised."""
    communicator.Set_errhandler(MPI.ERRORS_RETURN)
    return communicator


def joined(communicator: MPI.Intracomm, words: list[str]) -> MPI.Intracomm:
    """A communicator of these ranks and a process that the first of them has started."""
    began = time.perf_counter()
    inter = communicator.Spawn(sys.executable, [str(Path(__file__).resolve()), *words], 1, root=0)
    merged = tolerant(inter.Merge(high=False))
    took_s = time.perf_counter() - began
    print(f"rank {merged.rank} of {merged.size} after {took_s:.1f} s, sum {merged.allreduce(1)}", flush=True)
    return merged


def main(words: list[str]) -> None:
    """Run the steps that the words name."""
    parent = MPI.Comm.Get_parent()
    if parent != MPI.COMM_NULL:
        merged = tolerant(MPI.Intercomm(parent).Merge(high=True))
        print(f"newcomer: rank {merged.rank} of {merged.size}, sum {merged.allreduce(1)}", flush=True)
        if "kill" in words:
            killed_soon()
        return
    communicator = tolerant(MPI.Intracomm(MPI.COMM_WORLD.Dup()))
    if "lose" in words:
        if communicator.rank == 1:
            killed_soon()
        communicator = shrunk(communicator)
    merged = joined(communicator, words)
    if "again" in words:
        merged = joined(communicator, words)
    if "kill" in words:
        merged = shrunk(merged)
        print(f"shrunk again: {merged.size}, sum {merged.allreduce(1)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
