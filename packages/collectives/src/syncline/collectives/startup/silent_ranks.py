"""After a time-out, the silent ranks of a node (ranks that did not come) write their reports before the job ends.

A rank that times out in a collective does not know why: the cause is in the rank that did not come. That rank may notice
nothing, and the launcher or MPI ends that rank as soon as the first rank has ended. So there are two steps:

1. A rank may end with an uncaught `CollectiveTimeout`, or with an error that follows from a `CollectiveTimeout`. Such a rank
   leaves a note in the folder that the processes of one user on a node share. Then the rank waits before it ends
   (`let_silent_ranks_report`). If a rank fails only because the first rank has closed its connections, the rank waits as long
   as the first rank.
2. The monitor of each rank looks for the note every second. When the monitor finds the note, the rank writes its report, with
   the stacks of its threads (`NoteWatch`). A rank that has just reported a failure of its own does not report again.

Ranks on other nodes do not see the note.
"""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CollectiveTimeout, LaunchError, SynclineError, TransportError, text_of
from ..health.liveness import current_run
from ..health.monitor import call_now_and_then
from .user_secret import private_folder

if TYPE_CHECKING:
    from ..health.report import Reporter  # loads torch, which `syncline run` must not load

_LOOK_S = 1.0
# In this time the other ranks look for the note at least once, and write their reports.
_WAIT_S = 2.5
# A rank that fails after another rank waits this long for the other rank's note.
_NOTE_S = 1.0
# A rank that failed less than this time ago has written its own report.
_TOGETHER_S = 60.0
# If a rank is killed while it waits, its note stays. Other ranks remove notes that are older than this.
_OLD_S = 3600.0


class NoteWatch:
    """Writes this rank's report when another rank of the node has timed out. The monitor thread calls `look`.

    Args:
        reporter: writes the report.
        note: the file that the other rank makes.
    """

    period_s = _LOOK_S
    may_block = True  # the folder for temporary files may be on a file system that does not answer
    is_idle = False

    def __init__(self, reporter: Reporter, note: Path) -> None:
        self._reporter = reporter
        self._note = note

    def look(self, _: float) -> None:
        """If the note exists, write this rank's report once. If this rank has just reported its own failure, write nothing."""
        # Look at `is_idle` last: this rank sets it before it leaves a note of its own.
        if self._note.exists() and not self.is_idle:
            self.is_idle = True
            if time.time() - self._reporter.failed_at > _TOGETHER_S:
                self._reporter.write("another rank of this node timed out in a collective")


_watch: NoteWatch | None = None  # keeps the object alive, because the monitor holds only a weak reference


def watch_for_note(reporter: Reporter | None) -> None:
    """From now on, write this rank's report if another rank of this node times out. Call this when the ranks are connected."""
    global _watch
    note = _note()
    if reporter is not None and note is not None:
        _watch = NoteWatch(reporter, note)
        call_now_and_then(_watch)


def let_silent_ranks_report(error: BaseException, *, failed_first: bool = True) -> None:
    """If an uncaught error is a time-out, wait 2.5 seconds, so that the silent ranks of this node can write their reports.

    `failed_first` says whether this rank failed before the other ranks of the node. If another rank failed first, and `error`
    is about the connection to other ranks, wait as long as the other rank waits.
    """
    is_time_out = _comes_from(error, CollectiveTimeout)
    if not is_time_out and (failed_first or not _comes_from(error, TransportError)):
        return
    from ..health.report import report_folder  # here, because this loads torch

    note = _note()
    if note is None or not report_folder():
        return
    if not is_time_out:
        with suppress(OSError, KeyboardInterrupt):
            _wait_for_other(note)
        return
    if _watch is not None:
        _watch.is_idle = True  # this rank must not take its own note for another rank's
    # Ctrl-C ends the wait. If the note cannot be written, nobody reports, and the job must end in any case.
    with suppress(OSError, KeyboardInterrupt):
        note.touch()
        time.sleep(_WAIT_S)
    for old in note.parent.glob("timed-out-*"):
        # Another rank may remove the same note at this moment.
        with suppress(OSError):
            if old == note or old.stat().st_mtime < time.time() - _OLD_S:
                old.unlink()


def _wait_for_other(note: Path) -> None:
    """Wait until another rank has made its note and removed the note again. If no note appears, wait `_NOTE_S` seconds."""
    began_s = time.monotonic()
    while (waited_s := time.monotonic() - began_s) < _NOTE_S + _WAIT_S and (note.exists() or waited_s < _NOTE_S):
        time.sleep(0.05)


def _comes_from(error: BaseException, kind: type[SynclineError]) -> bool:
    """Return whether an error is of this kind, or follows from an error of this kind."""
    earlier: BaseException | None = error
    for _ in range(20):  # causes may form a cycle
        # If Ctrl-C came while the program handled such an error, Ctrl-C is the reason.
        if not isinstance(earlier, Exception):
            return False
        # If a future of torch fails with our error, torch's DDP raises a RuntimeError with the text of our error.
        is_text = type(earlier) is RuntimeError and f"{kind.__name__}: " in text_of(earlier)
        if isinstance(earlier, kind) or is_text:
            return True
        earlier = earlier.__cause__ or (None if earlier.__suppress_context__ else earlier.__context__)
    return False


def _note() -> Path | None:
    """Return the path of the note; None if this process is not a rank, or if the ranks of this node share no folder."""
    run = current_run()
    if run is None:
        return None
    try:
        return private_folder() / f"timed-out-{run.name}"
    except (OSError, LaunchError):
        return None
