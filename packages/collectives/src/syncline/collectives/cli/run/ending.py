"""End a rank of a job, so that no other rank waits for this rank for ever.

1. An uncaught exception ends the job at once. The rank that failed first prints the exception. Other ranks that fail at about
   the same time print one line that names the first rank.
2. A status other than 0 (`sys.exit(3)`) ends the job with this status, after the script's own exit handlers. If all ranks end
   at about the same time, the job is not aborted.
3. A rank that ends without failure sleeps until the other ranks end, too. Then all ranks finalize MPI: otherwise the launcher
   kills the other ranks. `os._exit(0)` does not finalize MPI, so this module replaces `os._exit`.

These rules do not hold for child processes of ranks.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from ...health.exit_status import as_status, set_exit_status
from ...startup.mpi_library import abort_job, ending_job_if_interrupted
from ...startup.silent_ranks import let_silent_ranks_report
from ...startup.uncaught_errors import (
    also_failed,
    flush_output,
    handle_uncaught_elsewhere,
    in_text,
    is_first,
    run_began_s,
    say,
)
from .ranks import Job, end_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

_FAILURE = 1  # MPI's tag of the messages (notices) in which a rank tells the other ranks when it failed
# Ranks that fail for the same reason fail within this time of each other. A notice also arrives within this time.
_TOGETHER_S = 0.3
# A rank that was not the first to fail waits this long until the first rank ends the job.
_PATIENCE_S = 10.0


class Ending:
    """Handles the end of this process. With MPI, the constructor replaces `os._exit` and registers an exit handler.

    Make this object right after MPI has started. Python runs exit handlers in reverse order, so this handler then runs last.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self.status = 0
        self._leave_at_once = os._exit
        self._register = atexit.register
        self._ours: list[Callable[[], object]] = []
        handle_uncaught_elsewhere()
        if job.world is not None:
            atexit.register(self._on_exit)
            atexit.register = self._note_ours  # type: ignore[assignment] # its arguments have less precise types
            os._exit = self._exit_at_once

    def note_exit(self, error: SystemExit) -> None:
        """Note the exit status. `error` is the SystemExit with which the script has ended."""
        self.status = as_status(error.code)
        set_exit_status(self.status)

    def fail(self, error: BaseException) -> NoReturn:
        """End the job because of an uncaught exception. Print the exception.

        If another rank failed before, print one line that names this other rank instead.
        """
        self.status = status = 130 if isinstance(error, KeyboardInterrupt) else 1
        set_exit_status(status)
        if os.getpid() != self._job.pid:
            sys.excepthook(type(error), error, error.__traceback__)
            raise SystemExit(status)
        try:
            first = self._failed_first()
            if first is None:
                _print(error)
                if self._job.size > 1:
                    say(f"{self._job.who()} failed and ends the job")
            else:
                say(f"{self._job.who()} {also_failed(error, error.__traceback__)}; {first}")
            if first is not None and self._has_mpi():
                time.sleep(_PATIENCE_S)  # the first rank ends the job meanwhile
            # Without MPI, the launcher may end all ranks as soon as one rank has ended, so each rank waits.
            else:
                let_silent_ranks_report(error, failed_first=first is None)
        # End the job even if Ctrl-C interrupts the lines above, because the other ranks must not wait for this rank.
        finally:
            if self._has_mpi():
                flush_output()
                abort_job(status)
        raise SystemExit(status)

    def _failed_first(self) -> str | None:
        job = self._job
        if not self._has_mpi():
            # Without MPI the ranks cannot send notices. The ranks of one node have the same parent, so they share a file.
            is_alone = job.size == 1 or is_first(f"failed-{os.getppid()}-{job.run_id}", run_began_s())
            return None if is_alone else "another rank failed first, and its traceback says why"
        assert job.world is not None
        try:
            first = first_to_fail(job.world, time.time())
        except Exception:  # noqa: BLE001 - MPI has lost a rank (ULFM), so this rank cannot know more than its own error
            return None
        return None if first == job.rank else f"rank {first} failed first, and its traceback says why"

    def _note_ours(self, function: Callable[..., object], *arguments: object, **named: object) -> Callable[..., object]:
        """Register a handler with `atexit.register`. Also note Syncline's own handlers, because `_exit_at_once` calls them."""
        if (getattr(function, "__module__", None) or "").startswith("syncline."):  # C functions may have no module
            self._ours.append(lambda: function(*arguments, **named))
        return self._register(function, *arguments, **named)

    def _on_exit(self) -> None:
        if not self._has_mpi():
            return
        world = self._job.world
        assert world is not None
        flush_output()
        with ending_job_if_interrupted(self._job.who):
            everybody = world.Ibarrier()
            end_s = time.monotonic() + _TOGETHER_S
            pause_s = 1e-4
            while not everybody.Test():
                if self.status and time.monotonic() > end_s:
                    say(f"{self._job.who()} exits with status {self.status} and ends the job")
                    abort_job(self.status)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 0.01)
        world.Free()
        end_mpi()

    def _exit_at_once(self, status: int) -> NoReturn:
        """Do the work of `os._exit`. With MPI, first run Syncline's exit handlers, but not the script's, and finalize MPI."""
        if self._has_mpi():
            # Set the status first: Syncline's handlers tell the other ranks whether this rank leaves in good order.
            self.status = status & 0xFF
            set_exit_status(self.status)
            while self._ours:
                self._ours.pop()()
            self._on_exit()
            _leave_hydra()
        self._leave_at_once(status)

    def _has_mpi(self) -> bool:
        if self._job.world is None or os.getpid() != self._job.pid:
            return False
        from mpi4py import MPI

        return not MPI.Is_finalized()


def _leave_hydra() -> None:
    """Tell MPICH's mpiexec that this process ends without failure. Otherwise mpiexec would kill the other ranks.

    MPICH's own exit handler tells mpiexec, but `os._exit` skips exit handlers.
    """
    number = os.environ.get("PMI_FD", "")
    if number.isdecimal() and "HYDI_CONTROL_FD" in os.environ:
        try:
            os.write(int(number), b"cmd=finalize\n")
            os.read(int(number), 64)
        except OSError:
            pass  # the connection is closed: the MPI library is not MPICH, or has closed it


def _print(error: BaseException) -> None:
    # Do not call the hook of `torch.distributed`, which only puts the rank before each line.
    is_torchs = (getattr(sys.excepthook, "__module__", None) or "").startswith("torch.")
    if sys.excepthook is not sys.__excepthook__ and not is_torchs:
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except BaseException as in_hook:  # noqa: BLE001 - as in Python: both errors are printed
            say(f"Error in sys.excepthook:\n{in_text(in_hook, in_hook.__traceback__)}\nOriginal exception was:")
        else:
            return
    say(in_text(error, error.__traceback__), sys.stderr)


def first_to_fail(world: MPI.Intracomm, failed_at: float) -> int:
    """Return the rank that failed first. All ranks that fail at about the same time call this function.

    `failed_at` is the time of this rank's failure, in seconds since the epoch.
    """
    from mpi4py import MPI

    mine = first = (failed_at, world.Get_rank())
    began_s = time.monotonic()
    notices = [world.isend(mine, dest=rank, tag=_FAILURE) for rank in range(world.Get_size()) if rank != mine[1]]
    missing = len(notices)
    # The notice of a later rank may arrive before the notice of the first rank. So read until all notices have come, or until
    # the first rank itself stops reading, `_TOGETHER_S` after its failure.
    while missing and time.monotonic() - began_s < _TOGETHER_S - (mine[0] - first[0]):
        if not world.iprobe(MPI.ANY_SOURCE, _FAILURE):
            time.sleep(0.005)
            continue
        first = min(first, world.recv(source=MPI.ANY_SOURCE, tag=_FAILURE))
        missing -= 1
    return first[1]
