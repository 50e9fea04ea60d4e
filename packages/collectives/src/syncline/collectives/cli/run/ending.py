"""How a rank leaves its job, so that no other waits for it in vain.

torchrun ends a job when one of its workers fails, and lets each end in its time if none does. Here

1. an exception that nobody caught is printed by the rank that failed first, and ends the job at once. Ranks that fail meanwhile
   say one line that names the first.
2. A status other than 0 (`sys.exit(3)`) ends the job with that status, after the script's own exit handlers; unless all ranks
   end at about the same time.
3. A rank that ends in good order waits for the others, asleep. MPI must not be left by a process that does not take leave: its
   launcher would end the others' work (`os._exit(0)`).

A child of a rank does none of this.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable
from typing import NoReturn

from ...health.exit_status import as_status, set_exit_status
from ...startup.uncaught_errors import also_failed, handle_uncaught_elsewhere, in_text, is_first, started_s
from .ranks import Job, end_mpi

_FAILURE = 1  # the tag of notices
# Ranks that fail for the same reason fail within that time; a notice comes at least as fast.
_TOGETHER_S = 0.3
# mpiexec passes on what ranks print in its own time; what it has not read when the job is aborted is lost (MPICH 5.0).
_FORWARDING_S = 0.3
# A rank that was not the first to fail gives that one so long to end the job.
_PATIENCE_S = 10.0


class Ending:
    """What happens when this process ends. Making it changes `os._exit` and registers what runs last at exit.

    Made right after MPI has started: of all that runs at exit it comes last.
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
            atexit.register = self._note_ours  # type: ignore[assignment] # with less said of its arguments
            os._exit = self._exit_at_once

    def note_exit(self, error: SystemExit) -> None:
        """The script ends by SystemExit."""
        self.status = as_status(error.code)
        set_exit_status(self.status)

    def fail(self, error: BaseException) -> NoReturn:
        """Nobody has caught this exception. Print it, or who failed first, and end the job."""
        status = 130 if isinstance(error, KeyboardInterrupt) else 1
        set_exit_status(status)
        if os.getpid() != self._job.pid:
            sys.excepthook(type(error), error, error.__traceback__)
            raise SystemExit(status)
        first = self._failed_first()
        if first is None:
            _print(error)
            if self._job.size > 1:
                _say(f"{self._job.who()} failed and ends the job")
        else:
            _say(f"{self._job.who()} {also_failed(error, error.__traceback__)}; {first}")
        if self._has_mpi():
            if first is not None:
                time.sleep(_PATIENCE_S)  # that one ends the job
            self._abort(status)
        raise SystemExit(status)

    def _failed_first(self) -> str | None:
        """Which rank failed before this one, in words; None if none is known."""
        job = self._job
        if not self._has_mpi():
            # Where ranks cannot talk, those of one node know one another by their parent.
            is_alone = job.size == 1 or is_first(f"failed-{os.getppid()}-{job.run_id}", started_s())
            return None if is_alone else "another rank failed first, and its traceback says why"
        from mpi4py import MPI

        assert job.world is not None
        mine = (time.time(), job.rank)
        others = [rank for rank in range(job.size) if rank != job.rank]
        notices = [job.world.isend(mine, dest=rank, tag=_FAILURE) for rank in others]
        end_s = time.monotonic() + _TOGETHER_S
        while others and time.monotonic() < end_s:
            if not job.world.iprobe(MPI.ANY_SOURCE, _FAILURE):
                time.sleep(0.005)
                continue
            other = job.world.recv(source=MPI.ANY_SOURCE, tag=_FAILURE)
            if other < mine:
                return f"rank {other[1]} failed first, and its traceback says why"
        del notices
        return None

    def _note_ours(self, function: Callable[..., object], *arguments: object, **named: object) -> Callable[..., object]:
        """In place of `atexit.register`: Syncline's own handlers close what uses MPI, and are known here as well."""
        if (getattr(function, "__module__", None) or "").startswith("syncline."):  # C functions have none
            self._ours.append(lambda: function(*arguments, **named))
        return self._register(function, *arguments, **named)

    def _on_exit(self) -> None:
        if not self._has_mpi():
            return
        world = self._job.world
        assert world is not None
        _flush()
        everybody = world.Ibarrier()
        end_s = time.monotonic() + _TOGETHER_S
        pause_s = 1e-4
        while not everybody.Test():
            if self.status and time.monotonic() > end_s:
                _say(f"{self._job.who()} exits with status {self.status} and ends the job")
                self._abort(self.status)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.01)
        world.Free()
        end_mpi()

    def _exit_at_once(self, status: int) -> NoReturn:
        """In place of `os._exit`, which leaves without a word to MPI. The script's own handlers do not run, and ours do."""
        if self._has_mpi():
            while self._ours:
                self._ours.pop()()
            self.status = status & 0xFF
            self._on_exit()
            _leave_hydra()
        self._leave_at_once(status)

    def _has_mpi(self) -> bool:
        """Whether this process is a rank of a job of MPI that has not ended."""
        if self._job.world is None or os.getpid() != self._job.pid:
            return False
        from mpi4py import MPI

        return not MPI.Is_finalized()

    def _abort(self, status: int) -> None:
        from mpi4py import MPI

        _flush()
        time.sleep(_FORWARDING_S)
        MPI.COMM_WORLD.Abort(status)


def _leave_hydra() -> None:
    """Tell MPICH's mpiexec that this process ends in good order.

    MPICH says so when the C library runs its exit handlers, which `os._exit` skips. mpiexec would kill the other ranks.
    """
    number = os.environ.get("PMI_FD", "")
    if number.isdigit() and "HYDI_CONTROL_FD" in os.environ:
        try:
            os.write(int(number), b"cmd=finalize\n")
            os.read(int(number), 64)
        except OSError:
            pass  # it is closed: another library's way


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            pass  # it is closed, or nobody reads it


def _print(error: BaseException) -> None:
    """As Python does, but without the frames inside Syncline and torch, unless the script has a hook of its own."""
    if sys.excepthook is sys.__excepthook__:
        _flush()
        sys.stderr.write(in_text(error, error.__traceback__))
    else:
        sys.excepthook(type(error), error, error.__traceback__)


def _say(text: str) -> None:
    _flush()
    stream = sys.__stderr__ or sys.stderr
    stream.write(f"{text}\n")
    stream.flush()
