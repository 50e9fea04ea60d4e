"""After a time-out, the silent ranks of a node write their reports before the job ends.

A rank that times out in a collective does not know why: the cause is in the rank that did not come. That rank may notice
nothing, and the launcher or MPI ends it as soon as the first rank fails. So there are two steps:

1. A rank with an uncaught `CollectiveTimeout` leaves a note in the folder that the processes of one user on a node share, and
   waits before it ends the job (`let_silent_ranks_report`).
2. The monitor of each rank looks for the note every second. If the note is there, the rank writes its report, with the stacks
   of its threads (`SilentRank`).

Ranks on other nodes do not see the note.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CollectiveTimeout, LaunchError
from ..health.liveness import current_run
from ..health.monitor import call_now_and_then
from .user_secret import private_folder

if TYPE_CHECKING:
    from ..health.report import Reporter  # loads torch, which `syncline run` must not load

_LOOK_S = 1.0
# The other ranks need one look to see the note, and then write a file.
_WAIT_S = 2.5
# A rank that fails together with the rank that timed out has written its own report within this time.
_TOGETHER_S = 10.0


class SilentRank:
    """Writes this rank's report when another rank of the node has timed out. The monitor calls `look`.

    Args:
        reporter: writes the report.
        note: the file that the other rank makes.
    """

    period_s = _LOOK_S
    may_block = False  # the note is in a local folder, and another thread writes the report
    is_idle = False

    def __init__(self, reporter: Reporter, note: Path) -> None:
        self._reporter = reporter
        self._note = note

    def look(self, now_s: float) -> None:
        """If the note is there, write the report once, unless this rank has just written a report of its own failure."""
        if self._note.exists():
            self.is_idle = True
            if now_s - self._reporter.latest_s > _TOGETHER_S:
                self._reporter.write_within("another rank of this node timed out in a collective", 0.0)


_silent_rank: SilentRank | None = None  # keeps the object alive, because the monitor holds only a weak reference


def report_if_silent(reporter: Reporter | None) -> None:
    """From now on, write this rank's report if another rank of this node times out. Call this when the ranks are connected."""
    global _silent_rank
    note = _note()
    if reporter is not None and note is not None:
        _silent_rank = SilentRank(reporter, note)
        call_now_and_then(_silent_rank)


def let_silent_ranks_report(error: BaseException) -> None:
    """If an uncaught error is a time-out, wait 2.5 seconds, so that the silent ranks of this node can write their reports."""
    # If a future of torch fails with our error, torch's DDP raises a RuntimeError with its text.
    if not isinstance(error, CollectiveTimeout) and f"{CollectiveTimeout.__name__}: " not in str(error):
        return
    from ..health.report import report_folder  # here, because this loads torch

    note = _note()
    if note is None or not report_folder():
        return
    # Ctrl-C ends the wait. If the note cannot be written, nobody reports, and the job must end in any case.
    with suppress(OSError, KeyboardInterrupt):
        note.touch()
        time.sleep(_WAIT_S)
    with suppress(OSError):
        note.unlink(missing_ok=True)


def _note() -> Path | None:
    """Return the path of the note; None if this process is no rank of a job, or if the ranks of this node share no folder."""
    run = current_run()
    if run is None:
        return None
    try:
        return private_folder() / f"timed-out-{run.name}"
    except (OSError, LaunchError):
        return None
