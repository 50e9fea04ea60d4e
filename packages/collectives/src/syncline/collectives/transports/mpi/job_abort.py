"""End the job when a rank fails, but keep the job running when a rank only finishes earlier than the other ranks.

At the interpreter's exit, mpi4py calls MPI_Finalize, which waits for all processes. A rank that failed with an exception would
wait there for ever, and the other ranks would wait for this rank in a collective. Three guards prevent this:

1. If an exception in the main thread is not caught, the rank prints the exception, and aborts the job. At an interactive
   prompt, the job goes on.
2. If a rank calls `sys.exit` with a status other than 0 while a group is open, the rank aborts the job with this status.
3. If a rank exits in any other way, it waits in a barrier until all ranks come. After a moment it tells the other ranks that it
   has left (see `LeaveNotices`). Ranks that wait for this rank then fail with an error that names the call: see Note [Who will
   not come] in `health.leaving`.

   If the process of another rank is gone, the exiting rank aborts the job, because MPI_Finalize would wait for the lost rank.
   If MPI tolerates the loss of a rank, the exiting rank only ends itself, within 15 seconds.

   If Ctrl-C interrupts the wait in the barrier, the rank aborts the job.

A program may end MPI itself with `MPI.Finalize()`, and continue. `MPI.Finalize()` calls a callback of this module. The callback
closes Syncline's groups, and then waits for the other ranks as in guard 3. Afterwards, any call of MPI would abort the process.
So Syncline's threads call MPI only inside `while_mpi_runs`.

A forked child of a rank is not a rank: none of the guards holds for it. See Note [Forks] in `forks`.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType

from mpi4py import MPI
from typing_extensions import override

from ...engine.queue import all_idle
from ...errors import RankLostError
from ...forks import Inherited, fork_count, tell_in_forks
from ...health.exit_status import exit_status, watch_exit_status
from ...health.leaving import Leavers
from ...health.liveness import Liveness, own_identity, rank_here
from ...health.monitor import call_now_and_then
from ...startup.mpi_library import abort_job, ending_job_if_interrupted
from ...startup.silent_ranks import let_silent_ranks_report
from ...startup.uncaught_errors import are_handled_elsewhere, last_words, say
from .library import failed_ranks, is_fault_tolerant, no_more_mpi, while_mpi_runs
from .neighbours import LeaveNotices

# Open MPI 5.0.11 sometimes never returns from MPI_Finalize in a job that lost ranks. So a signal ends the process after this
# time. mpiexec counts the process as another lost rank, and still ends with status 0.
FINALIZE_S = 15.0
# If all ranks leave within this time, no rank sends a notice.
NOTICE_AFTER_S = 0.1
# If another rank knows the cause of a failure, this rank waits this long, so that the other rank can say the cause.
_PATIENCE_S = 10.0


def abort_on_uncaught() -> None:
    """Set an excepthook that aborts the job after an uncaught exception. Call this function before any step that may fail."""
    # `syncline run` or another caller prints the exception itself.
    if are_handled_elsewhere():
        return
    # Install the hook only once: if a second group installed it again, the hook would call itself.
    if sys.excepthook is not _on_uncaught:
        _previous_hook.append(sys.excepthook)
        sys.excepthook = _on_uncaught


_own_fork_count = fork_count()  # the count differs in a forked child, which has no MPI
_previous_hook: list[Callable[[type[BaseException], BaseException, TracebackType | None], object]] = []


def _on_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if is_interactive() or MPI.Is_finalized() or fork_count() != _own_fork_count:
        _previous_hook[-1](kind, error, trace)
        return
    try:
        words = last_words(_who(), "failed and ends the job", error, trace)
        say(words.text)
        if words.is_all:
            let_silent_ranks_report(error)
        # If another rank knows the cause, wait, because an early abort could lose that rank's message.
        else:
            with suppress(KeyboardInterrupt):
                time.sleep(_PATIENCE_S)  # the rank that says why ends the job
    # End the job also if Ctrl-C interrupts the lines above, or if the error cannot be printed: the other ranks would hang.
    finally:
        # 130 is the shell's status for a process that Ctrl-C ended.
        abort_job(130 if issubclass(kind, KeyboardInterrupt) else 1)


def is_interactive() -> bool:
    """Return whether this process has an interactive prompt: `python`, `python -i`, IPython or Jupyter."""
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or hasattr(builtins, "get_ipython")


class ExitBarrier(Inherited):
    """Makes ranks that exit wait for one another. Aborts the job if a rank exits with an error while a group is open.

    All ranks of `job` call the constructor together. `job` has all ranks of MPI, or of the communicator that was passed to
    `init_process_group`.

    Attributes:
        leavers: knows which ranks have left the job, and how many collectives this rank has started in each group.
        liveness: finds out which ranks are lost.
        period_s: the seconds between two calls of `look` by the monitor.
    """

    period_s = 1.0
    may_block = True
    is_idle = False

    def __init__(self, job: MPI.Intracomm) -> None:
        self._communicator = job.Dup()
        # The program's main thread may compute for minutes, so the monitor receives the notices.
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
        """In a forked child, remove mpi4py's exit handler, and everything that `ExitBarrier` does at exit."""
        # `_end_without_mpi` skips mpi4py's exit handler. This handler ends MPI, and would never return in a child.
        atexit.unregister(self._on_exit)
        atexit.register(_end_without_mpi)

    @classmethod
    def of(cls, job: MPI.Intracomm) -> ExitBarrier:
        """Return the exit barrier of the job. The first call makes the barrier. Every rank of `job` calls this method."""
        # Communicators of the same ranks in the same order need only one barrier.
        same = (MPI.IDENT, MPI.CONGRUENT)
        for made in _made:
            if not made._has_met and MPI.Comm.Compare(job, made._communicator) in same:
                return made
        _made.append(cls(job))
        return _made[-1]

    def look(self, _: float) -> None:
        """Receive notices that ranks have left, and pass them on to other ranks. The monitor calls this method regularly."""
        with suppress(MPI.Exception), while_mpi_runs() as runs:  # if a rank is lost, others may still leave
            if runs:
                self.leavers.left()

    def _on_finalize(self, *_: object) -> None:
        """Close all groups, and wait for the other ranks. MPI calls this method when the program calls `MPI.Finalize()`."""
        # If `_on_exit` has met the other ranks already, nothing is left to do.
        if self._has_met:
            return
        with ending_job_if_interrupted(_who):
            for group in self.leavers.open_groups():
                with suppress(Exception):  # MPI calls this method, and nobody could catch an error
                    group.close()
            self._end(0)
        no_more_mpi()

    def _on_exit(self) -> None:
        # If the program has ended MPI itself, the ranks have met in `_on_finalize`.
        if self._has_met or MPI.Is_finalized():
            return
        status = exit_status()
        # If a group is open, other ranks may wait for this rank. At a prompt, an error status is no failure of the job.
        if status and self.leavers.has_open_group() and not is_interactive():
            say(f"{_who()} exits with status {status} and ends the job")
            abort_job(status)
        with ending_job_if_interrupted(_who):
            self._end(status)

    def _end(self, status: int) -> None:
        self._has_met = True
        try:
            self._meet()
        except (RankLostError, MPI.Exception) as error:
            # The ranks that are left cannot meet without the lost rank, and MPI_Finalize would wait for the lost rank.
            if not is_fault_tolerant():
                say(f"{_who()} cannot end MPI in order, and ends the job: {error}")
                abort_job(status or 1)
            _end_within(FINALIZE_S)

    def _meet(self) -> None:
        everybody_left = self._communicator.Ibarrier()
        notice_s = time.monotonic() + NOTICE_AFTER_S
        self._wait(lambda: self._have_left(everybody_left, notice_s))
        self._notices.stop()
        self._wait(self._notices.are_sent)
        everybody_read = self._communicator.Ibarrier()  # then no rank sends notices, so none is in flight when MPI ends
        self._wait(everybody_read.Test)
        self._notices.close()
        # All messages of this communicator have been received, so none of them can keep MPI from ending.
        self._communicator.Free()

    def _have_left(self, everybody_left: MPI.Request, notice_s: float) -> bool:
        """Return whether all ranks are at the barrier. If not, tell the other ranks, but only once, that this rank has left."""
        if everybody_left.Test():
            return True
        # The notice says how many calls this rank has started. So wait until the queue has started and finished all its calls.
        if not self._has_told and time.monotonic() > notice_s and all_idle():
            self._has_told = True
            self._notices.leave(self.leavers.own())
        return False

    def _wait(self, is_over: Callable[[], bool]) -> None:
        pause_s = 1e-5
        while not is_over():
            self.leavers.left()  # read the notices of others, so that their sends complete
            lost = self.liveness.reason_to_give_up()
            # A lost rank never comes to the barrier.
            if lost is not None:
                raise lost
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)


_made: list[ExitBarrier] = []


def _end_without_mpi() -> None:
    """Run Python's exit functions, and flush files. Then end this process, without C exit functions such as that of mpi4py."""
    atexit.unregister(_end_without_mpi)
    atexit._run_exitfuncs()
    status = exit_status() or int(getattr(sys, "last_value", None) is not None)  # 1 after an uncaught exception
    for thing in gc.get_objects():
        if type(thing) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom):
            with suppress(OSError, ValueError):  # the file or its other end is closed
                thing.flush()
    os._exit(status)


def _end_within(limit_s: float) -> None:
    """Set a timer: after `limit_s` seconds, SIGALRM ends this process. Python code cannot do this while MPI_Finalize hangs."""
    # Only the main thread may set handlers. Exit functions normally run there.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, limit_s)


def _who() -> str:
    world = MPI.COMM_WORLD
    return f"[syncline] {rank_here(world.Get_rank(), world.Get_size(), os.getpid())}"
