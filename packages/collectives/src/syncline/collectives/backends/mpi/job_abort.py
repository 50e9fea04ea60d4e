"""A rank that leaves the job early must not leave the others hanging.

MPI ends a job when all its processes have called MPI_Finalize, which mpi4py does at the interpreter's exit. So a rank that
dies of an exception waits there, silently, for ranks that wait for it in a collective, for ever. Two guards end that:

1. An exception that nobody caught (in the main thread) is printed with the rank, and the job is aborted.
2. A rank that exits in any other way first meets all others in a barrier of a communicator used for nothing else. If they
   do not come within `EXIT_BARRIER_S` seconds, it says so and aborts the job.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import time
import traceback
from types import TracebackType

from mpi4py import MPI

EXIT_BARRIER_S = 30.0
# mpiexec passes on what ranks print in its own time; what it has not read when the job is aborted is lost (MPICH 5.0).
_FORWARDING_S = 0.3


def abort_on_uncaught() -> None:
    """Install the first guard. Concerns this process only, so it can be done before anything that may fail."""
    sys.excepthook = _on_uncaught


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    lines = "".join(traceback.format_exception(kind, error, trace))
    _say(f"{_who()} failed and ends the job:\n{lines}")
    _abort(130 if issubclass(kind, KeyboardInterrupt) else 1)


class ExitBarrier:
    """The second guard. Making one is a collective of all processes of the job."""

    def __init__(self) -> None:
        self._communicator = MPI.COMM_WORLD.Dup()
        atexit.register(self._on_exit)

    def _on_exit(self) -> None:
        if MPI.Is_finalized():
            return
        request = self._communicator.Ibarrier()
        end = time.monotonic() + EXIT_BARRIER_S
        pause_s = 1e-5
        while not request.Test():
            if time.monotonic() > end:
                _say(
                    f"{_who()} has left, but {EXIT_BARRIER_S:g} s later not all other ranks have: they may be waiting for it "
                    "in a collective. The job is ended. Did this rank return early, or take another branch?"
                )
                _abort(1)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)
        self._communicator.Free()


def _abort(status: int) -> None:
    time.sleep(_FORWARDING_S)
    MPI.COMM_WORLD.Abort(status)


def _who() -> str:
    world = MPI.COMM_WORLD
    return f"[syncline] rank {world.Get_rank()} of {world.Get_size()} (host {socket.gethostname()}, pid {os.getpid()})"


def _say(text: str) -> None:
    """Write to the stream that the process began with: torch.distributed lends its excepthook another, to print it later."""
    sys.stdout.flush()
    stream = sys.__stderr__ or sys.stderr
    stream.write(text + "\n")
    stream.flush()
