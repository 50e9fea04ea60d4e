"""A rank that leaves the job early must not leave the others hanging, and one that finishes first must not end their work.

MPI ends a job when all its processes have called MPI_Finalize, which mpi4py does at the interpreter's exit. So a rank that
dies of an exception waits there, silently, for ranks that wait for it in a collective, for ever. Three guards end that:

1. An exception that nobody caught (in the main thread) is printed with the rank, and the job is aborted. At an interactive
   prompt it ends what was typed, and nothing else.
2. `sys.exit` with a status other than 0, before the group was closed, aborts the job with that status.
3. A rank that exits in any other way meets all others in a barrier of a communicator used for nothing else, for as long as
   they take, but not for one whose process is gone: MPI cannot end such a job in order, so it is aborted then, unless MPI
   tolerates the fault; the process then has `FINALIZE_S` seconds to end. If they do not come at once, it tells that it has
   left (see `LeaveNotices`). Whoever waits for that rank hears of it and fails, with words that say in which call: see Note
   [Who will not come] in `health.leaving`.

A program may end MPI itself, by `MPI.Finalize()`, and go on. MPI then runs what was registered for its end before anything else
happens to it (the attributes of MPI_COMM_SELF): our groups are closed there, and the ranks meet as in 3. After it no thread
of ours may call MPI, which would abort the process. Those that look now and then do so under `while_mpi_runs`; the end waits
for none of them for longer than a second, since MPI may hold up the thread meanwhile.

A fork of a rank is no rank: its exceptions, its status and its end are its own, and it leaves MPI alone. See Note [Forks] in
`forks`.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import io
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from mpi4py import MPI
from typing_extensions import override

from ...engine.queue import all_idle
from ...errors import RankLostError, SynclineError
from ...forks import Inherited, generation, tell_in_forks
from ...health.exit_status import exit_status, watch_exit_status
from ...health.leaving import Leavers
from ...health.liveness import Liveness, own_identity
from ...health.monitor import call_now_and_then
from ...startup.uncaught_errors import are_handled_elsewhere, last_words
from .fault_tolerance import failed_ranks, is_fault_tolerant
from .leave_notices import LeaveNotices
from .library import no_more_mpi, while_mpi_runs

# Open MPI 5.0.11 sometimes never leaves MPI_Finalize in a job that lost ranks. Its mpiexec takes a rank that a signal ends
# there for another one that was lost, and ends with status 0 all the same.
FINALIZE_S = 15.0
# Ranks that leave at about the same time need no notices.
NOTICE_AFTER_S = 0.1
# A rank that points to another one gives that one so long to end the job.
_PATIENCE_S = 10.0
# mpiexec passes on what ranks print in its own time; what it has not read when the job is aborted is lost (MPICH 5.0).
_FORWARDING_S = 0.3


def abort_on_uncaught() -> None:
    """Install the first guard. Concerns this process only, so it can be done before anything that may fail."""
    if are_handled_elsewhere():
        return
    if sys.excepthook is not _on_uncaught:
        _previous_hook.append(sys.excepthook)
        sys.excepthook = _on_uncaught


_generation = generation()  # of the process that has MPI
_previous_hook: list[Callable[[type[BaseException], BaseException, TracebackType | None], object]] = []


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if is_interactive() or MPI.Is_finalized() or generation() != _generation:
        _previous_hook[-1](kind, error, trace)
        return
    words = last_words(_who(), "failed and ends the job", error, trace)
    _say(words.text)
    if not words.is_all:
        with suppress(KeyboardInterrupt):
            time.sleep(_PATIENCE_S)  # the rank that says why ends the job
    _abort(130 if issubclass(kind, KeyboardInterrupt) else 1)


def is_interactive() -> bool:
    """Whether somebody sits at a prompt of this process: `python`, `python -i`, IPython or Jupyter."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or hasattr(builtins, "get_ipython")


class ExitBarrier(Inherited):
    """The second and the third guard. Making it is a collective of all processes of the job.

    The job is what the groups of this rank can know of: all ranks of MPI, or those of the communicator that
    `init_process_group` was given.

    Args:
        job: a communicator of all its ranks.

    Attributes:
        leavers: who has left.
        liveness: whose process is gone.
        period_s: so often the monitor has this rank look for notices, also while it computes, and pass them on.
        may_block: yes: a look calls MPI.
    """

    period_s = 1.0
    may_block = True
    is_idle = False

    def __init__(self, job: MPI.Intracomm) -> None:
        self._communicator = job.Dup()
        self._notices = LeaveNotices(self._communicator)
        self._has_told = False
        self.leavers = Leavers(self._notices.receive)
        said = enumerate(self._communicator.allgather(own_identity()))
        members = {rank: process for rank, process in said if process is not None}
        self.liveness = Liveness(members, self._communicator.Get_rank(), lambda: failed_ranks(self._communicator))
        self._has_met = False
        watch_exit_status()
        call_now_and_then(self)
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=self._on_finalize), self)
        atexit.register(self._on_exit)
        tell_in_forks(self)

    @override
    def in_fork(self) -> None:
        """The guards are the rank's. mpi4py would end MPI at the very end; in a fork that never returns."""
        atexit.unregister(self._on_exit)
        atexit.register(_end_without_mpi)

    @classmethod
    def of(cls, job: MPI.Intracomm) -> ExitBarrier:
        """That of a communicator with these ranks, in this order; made at the first call. A collective of them."""
        same = (MPI.IDENT, MPI.CONGRUENT)
        for made in _made:
            if not made._has_met and MPI.Comm.Compare(job, made._communicator) in same:
                return made
        _made.append(cls(job))
        return _made[-1]

    def look(self, _: float) -> None:
        """See `period_s`."""
        with suppress(MPI.Exception), while_mpi_runs() as runs:  # a rank is lost; the others may leave all the same
            if runs:
                self.leavers.left()

    def _on_finalize(self, *_: object) -> None:
        """The program ends MPI: close our groups first, the latest one first, and meet the other ranks."""
        if self._has_met:
            return
        for group in self.leavers.open_groups():
            with suppress(SynclineError):  # it has failed before, and whoever used it was told
                group.close()
        self._end(0)
        no_more_mpi()

    def _on_exit(self) -> None:
        if self._has_met or MPI.Is_finalized():
            return
        status = exit_status()
        if status and self.leavers.has_open_group() and not is_interactive():
            _say(f"{_who()} exits with status {status} and ends the job")
            _abort(status)
        self._end(status)

    def _end(self, status: int) -> None:
        self._has_met = True
        try:
            self._meet()
        except (RankLostError, MPI.Exception) as error:
            if not is_fault_tolerant():
                _say(f"{_who()} cannot end MPI in order, and ends the job: {error}")
                _abort(status or 1)
            _end_within(FINALIZE_S)

    def _meet(self) -> None:
        everybody_left = self._communicator.Ibarrier()
        notice_s = time.monotonic() + NOTICE_AFTER_S
        self._wait(lambda: self._have_left(everybody_left, notice_s))
        self._notices.stop()
        self._wait(self._notices.are_sent)
        everybody_read = self._communicator.Ibarrier()  # all notices are sent, so that none is left when MPI ends
        self._wait(everybody_read.Test)
        self._notices.close()
        self._communicator.Free()

    def _have_left(self, everybody_left: MPI.Request, notice_s: float) -> bool:
        """Whether all ranks are here; tells of this rank when they are not and it has nothing in flight."""
        if everybody_left.Test():
            return True
        if not self._has_told and time.monotonic() > notice_s and all_idle():
            self._has_told = True
            self._notices.leave(self.leavers.own())
        return False

    def _wait(self, is_over: Callable[[], bool]) -> None:
        pause_s = 1e-5
        while not is_over():
            self.leavers.left()  # so that nobody's notice waits to be read
            lost = self.liveness.reason_to_give_up()
            if lost is not None:
                raise lost
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)


_made: list[ExitBarrier] = []


def _end_without_mpi() -> None:
    """End this process as Python does, but for functions in C that libraries have left for the very end.

    What was registered later has been called. As Python does, call the rest, and write what files have not written yet.
    """
    atexit.unregister(_end_without_mpi)
    atexit._run_exitfuncs()
    status = exit_status() or int(getattr(sys, "last_value", None) is not None)  # of an exception that nobody caught
    for thing in gc.get_objects():
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with suppress(OSError, ValueError):  # it was closed, perhaps by the other side
                thing.flush()
    os._exit(status)


def _end_within(limit_s: float) -> None:
    """Have the system end this process by SIGALRM, if it has not ended by then: nothing of Python runs in MPI_Finalize."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit_s)


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
    stream.write(text.rstrip("\n") + "\n")
    stream.flush()
