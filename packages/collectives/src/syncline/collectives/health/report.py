"""Reporter: what this rank knows, written to a file when something fails or somebody asks for it."""

from __future__ import annotations

import itertools
import json
import os
import socket
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path
from typing import Any

from ..errors import SynclineError
from .recorder import Recorder

REPORT_VARIABLE = "SYNCLINE_REPORT_DIR"
_MOST_GROUPS = 32
_MOST_STACK_CHARACTERS = 200_000
_MOST_REPORTS = 16
_WRITE_S = 10.0  # so long an error waits for its report


class Reporter:
    """Writes the records of this process's groups and the stacks of its threads.

    A file holds at most `_MOST_GROUPS` groups of 256 calls, and `_MOST_STACK_CHARACTERS` of stacks: 3 MB; a process writes at
    most `_MOST_REPORTS` of them. It holds the groups' records weakly.

    Args:
        job: names the run, alike on all ranks.
        rank: of the job.
        size: of the job.
        folder: where the folder of the run is made, or "" for no reports; by default `SYNCLINE_REPORT_DIR`, else "." at the
            moment of the first report.
    """

    def __init__(self, job: str, rank: int, size: int, folder: str | None = None) -> None:
        self.job = job
        self.rank = rank
        self.size = size
        self._folder = folder
        self._recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
        self._numbers = itertools.count(1)  # no lock: a signal's handler may interrupt whoever holds it
        self._pid = os.getpid()

    def watch(self, recorder: Recorder) -> None:
        """Report this group, too."""
        self._recorders.add(recorder)

    def write(self, reason: str) -> Path | None:
        """Write a report. Any thread may call it. It never raises: it is called while errors are on their way.

        Args:
            reason: why it is written.

        Returns:
            The folder of the run; None if reports are switched off, were written often, or cannot be written, and in a fork of
            the process.
        """
        base = self._folder if self._folder is not None else os.environ.get(REPORT_VARIABLE, ".")
        if not base or os.getpid() != self._pid:  # in a fork, such as a worker of a data loader
            return None
        number = next(self._numbers)
        if number > _MOST_REPORTS:
            return None
        folder = Path(base).absolute() / f"syncline-report-{self.job}"
        try:
            text = json.dumps(self._content(reason))
            folder.mkdir(parents=True, exist_ok=True)
            _write_new(folder, f"rank-{self.rank}", number, text)
        except Exception as error:  # noqa: BLE001 - the error that is reported matters more
            print(f"syncline: rank {self.rank} cannot write its report to {folder}: {error}", file=sys.stderr)
            return None
        return folder

    def write_within(self, reason: str, limit_s: float) -> Path | None:
        """`write` on a thread of its own, for a file system may not answer; also None if that takes longer.

        Where no thread can start, it is written on this one.
        """
        written: list[Path | None] = []
        thread = threading.Thread(target=lambda: written.append(self.write(reason)), name="syncline-report", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return self.write(reason)
        thread.join(limit_s)
        return written[0] if written else None

    def _content(self, reason: str) -> dict[str, Any]:
        recorders = sorted(self._recorders, key=lambda recorder: recorder.latest(), reverse=True)[:_MOST_GROUPS]
        return {
            "version": 1,
            "rank": self.rank,
            "size": self.size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "written_at": time.time(),
            "reason": reason,
            "groups": [
                {
                    "name": recorder.group_name,
                    "rank": recorder.rank,
                    "ranks": recorder.ranks,
                    "calls": [record.as_dict() for record in recorder.records()],
                }
                for recorder in recorders
            ],
            "stacks": _stacks()[:_MOST_STACK_CHARACTERS],
        }


def reported(reporter: Reporter | None, failure: BaseException) -> BaseException:
    """Write a report of a failure, if somebody reports.

    Returns:
        The failure; if it is ours, in words that say where the report is.
    """
    if reporter is None or not isinstance(failure, Exception):  # who presses Ctrl-C wants no folder
        return failure
    folder = reporter.write_within(f"{type(failure).__name__}: {failure}", _WRITE_S)
    if folder is None or not isinstance(failure, SynclineError):
        return failure
    return failure.reworded(f"{failure}. Each rank that fails writes what it knows to {folder}; read it with `syncline report`")


def _write_new(folder: Path, stem: str, number: int, text: str) -> None:
    """Write a file that did not exist: several groups of one process, or two jobs of one name, keep all that they wrote."""
    while True:
        path = folder / f"{stem}.{number}.json"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
        except FileExistsError:
            number += 1
            continue
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        return


def _stacks() -> str:
    """The Python stacks of all threads."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )
