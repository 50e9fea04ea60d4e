"""Ends a test that hangs, and prints the stacks of all threads of this rank."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Callable

# When a test hangs, time is up on all ranks at once. Wait so that all can print their stacks before the first ends the job.
_OTHERS_S = 1.0
# If C code never releases the GIL, the timer's thread cannot run. faulthandler's thread needs no GIL, and ends the process.
_LAST_RESORT_S = 5.0


class Watchdog:
    """Ends the job when a time limit passes. First it writes the name of this rank and the stacks of all threads.

    Args:
        who: the name of this rank, for messages.
        stderr: a file descriptor of the true standard error, which pytest does not capture.
        end_job: ends all ranks.
    """

    def __init__(self, who: str, stderr: int, end_job: Callable[[], None]) -> None:
        self._who = who
        self._stderr = stderr
        self._end_job = end_job
        self._timer: threading.Timer | None = None

    def arm(self, what: str, limit_s: float) -> None:
        """Restart the clock: `what` may take `limit_s` seconds."""
        self.disarm()
        self._timer = threading.Timer(limit_s, self._on_time_up, (what, limit_s))
        self._timer.daemon = True
        self._timer.start()
        faulthandler.dump_traceback_later(limit_s + _LAST_RESORT_S, exit=True, file=self._stderr)

    def disarm(self) -> None:
        """Stop the clock."""
        faulthandler.cancel_dump_traceback_later()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time_up(self, what: str, limit_s: float) -> None:
        os.write(self._stderr, f"\n{self._who}: {what} took more than {limit_s:g} s; all threads of this rank:\n".encode())
        faulthandler.dump_traceback(self._stderr, all_threads=True)
        threading.Event().wait(_OTHERS_S)
        self._end_job()
