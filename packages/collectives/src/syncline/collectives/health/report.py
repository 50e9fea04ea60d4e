"""Write a report file on each rank when something fails or SIGUSR1 arrives. Read the report files of all ranks."""

from __future__ import annotations

import argparse
import atexit
import itertools
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar, get_origin, get_type_hints

from ..engine.call import DONE, CallRecord
from ..engine.cancel_scope import start_thread
from ..engine.living_set import LivingSet
from ..errors import InvalidArgumentError
from ..tensors.checks import is_list_of_integers
from .exit_status import let_go
from .recorder import Recorder, find_divergence
from .statements import ranks_in_words

T = TypeVar("T")

logger = logging.getLogger("syncline.collectives")


@dataclass(frozen=True)
class GroupRecord:
    """The last calls of one rank in one group, in the order of issue. `ranks` are ranks in the job.

    `begun` is the number of calls that the rank has begun, except calls that only some ranks issue.
    """

    name: str
    ranks: tuple[int, ...]
    begun: int
    calls: tuple[CallRecord, ...]


@dataclass(frozen=True)
class RankReport:
    """The report of one rank. `rank` is its rank in the job of `size` ranks. `written_at` is in seconds since the epoch."""

    rank: int
    size: int
    host: str
    pid: int
    written_at: float
    reason: str
    groups: tuple[GroupRecord, ...]
    stacks: str

    @classmethod
    def parse(cls, text: str) -> RankReport:
        """Read the text of a report file.

        Raises:
            ValueError, KeyError, TypeError, RecursionError: the text is not a report.
        """
        content = json.loads(text)
        return cls(groups=tuple(map(_group, content["groups"])), **_checked(cls, content))


def _group(content: Any) -> GroupRecord:
    ranks = tuple(content["ranks"])
    if not is_list_of_integers(ranks):
        raise TypeError(f"expected integers as ranks, found {ranks!r:.80}")
    calls = tuple(CallRecord.from_dict(_checked(CallRecord, call)) for call in content["calls"])
    return GroupRecord(ranks=ranks, calls=calls, **_checked(GroupRecord, content))


@cache
def _kinds(record: type) -> dict[str, Any]:
    """Return the types of a dataclass's fields, except tuple fields.

    A float field also allows an int, because JSON may write a float as an integer.
    """
    hints = {name: hint for name, hint in get_type_hints(record).items() if get_origin(hint) is not tuple}
    return {name: int | float if hint is float else hint for name, hint in hints.items()}


def _checked(record: type, content: Any) -> dict[str, Any]:
    """Return the entries of `content` for the fields of a dataclass, except tuple fields. Check the types of the entries."""
    for name, kind in _kinds(record).items():
        if not isinstance(content[name], kind):
            raise TypeError(f"expected {getattr(kind, '__name__', kind)} as {name}, found {content[name]!r:.80}")
    return {name: content[name] for name in _kinds(record)}


def read_reports(folder: Path) -> list[RankReport]:
    """Return all reports, in the order of ranks. The reports of one rank are in the order of time.

    Earlier reports of a rank are returned without groups and stacks. For each file that cannot be read, log a warning.

    Raises:
        InvalidArgumentError: the folder has no report that can be read.
    """
    latest: dict[int, RankReport] = {}
    earlier: list[RankReport] = []
    for report in read_each(sorted(folder.glob("rank-*.json")), _read_report, _warn_of_unreadable):
        # A rank may have written several reports, one for each failing group or signal.
        known = [latest[report.rank]] if report.rank in latest else []
        *older, latest[report.rank] = sorted([*known, report], key=lambda report: report.written_at)
        earlier += [replace(one, groups=(), stacks="") for one in older]  # a report may have 3 MB
    if not latest:
        raise InvalidArgumentError(f"expected files rank-*.json in {folder}, found none; give the folder that the error named")
    return sorted([*earlier, *latest.values()], key=lambda report: (report.rank, report.written_at))


def _read_report(path: Path) -> RankReport:
    try:
        return RankReport.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidArgumentError(f"{path} is no report of Syncline: {type(error).__name__}: {error}") from error


def _warn_of_unreadable(words: str) -> None:
    logger.warning("left out: %s", words)


def read_each(paths: Iterable[Path], read: Callable[[Path], T], warn: Callable[[str], object]) -> list[T]:
    """Call `read` with each path, and return the results. If `read` fails for some paths, call `warn` with each error's text.

    Raises:
        InvalidArgumentError: `read` raised this error for all paths. In this case, `warn` is not called.
    """
    found: list[T] = []
    problems: list[str] = []
    for path in paths:
        try:
            found.append(read(path))
        except InvalidArgumentError as error:
            problems.append(str(error))
    if problems and not found:
        raise InvalidArgumentError("\n".join(problems))
    for words in problems:
        warn(words)
    return found


def merged(every: Sequence[RankReport]) -> str:
    """Return the reports of all ranks as text. A pure function.

    The text names the rank that reported first, and its reason. For each group, the text has a table of the ranks, and the
    result of `sentence`. Table and sentence come from the latest report of each rank.

    Args:
        every: a result of `read_reports`.
    """
    reports = list({report.rank: report for report in every}.values())
    missing = sorted(set(range(reports[0].size)) - {report.rank for report in reports})
    lines = [f"{len(reports)} of {reports[0].size} rank(s) have reported"]
    if missing:
        lines.append(
            f"{ranks_in_words(missing)} wrote nothing: not running any more, or not come so far as to notice a failure"
        )
    # A signal asks for a report when a job seems to hang, perhaps long before it fails.
    causes = [report for report in every if report.reason != _SIGNAL] or every
    first = min(causes, key=lambda report: report.written_at)
    lines += ["", f"rank {first.rank} reported first: {first.reason}"]
    for name, ranks in _groups(reports):
        lines += ["", f"group '{name}' of {ranks_in_words(ranks)}", *_group_lines(name, ranks, reports)]
    return "\n".join(lines)


def _groups(reports: Sequence[RankReport]) -> Iterator[tuple[str, tuple[int, ...]]]:
    found = dict.fromkeys((group.name, group.ranks) for report in reports for group in report.groups)
    yield from found


def _group_lines(name: str, ranks: tuple[int, ...], reports: Sequence[RankReport]) -> list[str]:
    calls: dict[int, Sequence[CallRecord]] = {}
    begun: dict[int, int] = {}
    rows = [("rank", "host", "pid", "calls begun", "last call", "state")]
    for report in reports:
        for group in report.groups:
            # Two groups may have one name, if their ranks differ.
            if (group.name, group.ranks) == (name, ranks):
                calls[report.rank], begun[report.rank] = group.calls, group.begun
                last = current_call(group.calls)
                what = ("-", "-") if last is None else (str(last), last.state)
                rows.append((str(report.rank), report.host, str(report.pid), str(group.begun), *what))
    return [*_columns(rows), sentence(calls, begun, sorted(set(ranks) - set(calls)))]


def sentence(calls: Mapping[int, Sequence[CallRecord]], begun: Mapping[int, int], missing: Sequence[int] = ()) -> str:
    """Return one sentence that names a group's problem, or says that all ranks finished the same calls.

    `calls` and `begun` are as for `find_divergence`. `missing` are ranks of the group that have not reported. A pure function.
    """
    divergence = find_divergence(calls, begun)
    # Different calls explain everything else, so they come first.
    if divergence is not None:
        return divergence.sentence
    all_who = f"all that reported ({ranks_in_words(sorted(calls))})" if missing else "all"
    rest = f"; what {ranks_in_words(missing)} called is not known" if missing else ""
    waiting = {rank: current for rank, mine in calls.items() if (current := current_call(mine)) and current.state != DONE}
    # All ranks made the same calls, but some ranks are still in a call: a rank did not come to it, or the library hangs.
    if waiting:
        unfinished = f"{ranks_in_words(sorted(waiting))} did not finish {next(iter(waiting.values()))}"
        return f"{all_who} made the same calls; {unfinished}{rest}"
    return f"{all_who} made the same calls, and finished them{rest}"


def current_call(calls: Sequence[CallRecord]) -> CallRecord | None:
    """Return the first call that has begun but not succeeded; else the last call that has begun; else the last call."""
    begun = [call for call in calls if call.state != "queued"]
    unfinished = [call for call in begun if call.state != DONE]
    # The rank is in its first call that failed or still runs.
    if unfinished:
        return unfinished[0]
    return next(reversed(begun or calls), None)


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


EXPECTED = "files rank-*.json (what ranks wrote when something failed), there or in syncline-report-*"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the option `--stacks` to the parser of a command that shows reports."""
    parser.add_argument(
        "--stacks", type=int, metavar="RANK", help="also show where the threads of this rank were when it wrote its report"
    )


def is_in(folder: Path) -> bool:
    """Whether there are reports in the folder, or in its subfolders `syncline-report-*`."""
    return bool(_folders(folder))


def text(folder: Path, arguments: argparse.Namespace) -> str:
    """Return the merged reports of all ranks. If the folder has reports of several jobs, return one text for each job.

    Raises:
        InvalidArgumentError: no report of a job can be read, or `--stacks` names a rank that has written no report.
    """
    reports = read_each(_folders(folder), read_reports, _warn_of_unreadable)
    written = sorted({report.rank for of_job in reports for report in of_job})
    if arguments.stacks is not None and arguments.stacks not in written:
        raise InvalidArgumentError(
            f"--stacks {arguments.stacks}: that rank wrote no report in {folder}; {ranks_in_words(written)} wrote one"
        )
    return "\n\n".join(_text(of_job, arguments.stacks) for of_job in reports)


def _folders(folder: Path) -> list[Path]:
    return [one for one in (folder, *sorted(folder.glob("syncline-report-*"))) if any(one.glob("rank-*.json"))]


def _text(reports: Sequence[RankReport], stacks_of: int | None) -> str:
    shown = [merged(reports)]
    latest = [report for report in reports if report.rank == stacks_of][-1:]
    shown += [f"the threads of rank {one.rank}, which reported because of: {one.reason}\n{one.stacks}" for one in latest]
    return "\n\n".join(shown)


REPORT_VARIABLE = "SYNCLINE_REPORT_DIR"
_MOST_GROUPS = 32
_MOST_STACK_CHARACTERS = 200_000
_MOST_REPORTS = 16
_SIGNAL = "SIGUSR1"  # the reason of a report that a signal asks for


_site_folder: str | None = None


def set_report_folder(folder: str | None) -> None:
    """Set the folder for reports from the site file. None: the site file names no folder."""
    global _site_folder
    _site_folder = folder


def report_folder() -> str:
    """Return the folder for reports: `SYNCLINE_REPORT_DIR`, else the site file's folder, else the working directory.

    An empty text means no reports.
    """
    return os.environ.get(REPORT_VARIABLE, "." if _site_folder is None else _site_folder)


class Reporter:
    """Writes files with the last calls of this process's groups, and with the stacks of the process's threads.

    A file has the last 256 calls of at most 32 groups: about 3 MB. A process writes at most 16 files.

    Args:
        run_name: the name of the run, which is the same on all ranks.
        rank: the rank in the job.
        size: the number of ranks in the job.
        folder: a folder, in which the reporter makes a folder for the run. "": no reports. None: use `report_folder()`.

    Attributes:
        failed_at: when this process last began to report a failure, in seconds since the epoch; 0 if it never did.
    """

    def __init__(self, run_name: str, rank: int, size: int, folder: str | None = None) -> None:
        self.run_name = run_name
        self.rank = rank
        self.size = size
        self._folder = folder
        self._recorders: LivingSet[Recorder] = LivingSet()
        self._numbers = itertools.count(1)  # no lock, because a signal's handler may interrupt the thread that holds it
        self._pid = os.getpid()
        self.failed_at = 0.0

    def watch(self, recorder: Recorder) -> None:
        """Include the calls of `recorder` in later reports. The reporter keeps only a weak reference to `recorder`."""
        self._recorders.add(recorder)

    def write(self, reason: str) -> Path | None:
        """Write a report. Any thread may call this method. It raises no error.

        Returns:
            The folder of the run. None if reports are off, this process has written 16 reports, writing fails, or this process
                is a forked child.
        """
        base = self._folder if self._folder is not None else report_folder()
        if not base or os.getpid() != self._pid:  # a forked child, such as a data loader's worker, is not the rank
            return None
        if reason != _SIGNAL:
            self.failed_at = time.time()
        number = next(self._numbers)
        # A program that fails again and again must not fill the disk.
        if number > _MOST_REPORTS:
            return None
        folder = Path(base) / f"syncline-report-{self.run_name}"
        try:
            folder = folder.absolute()  # an error if the working directory was removed
            text = json.dumps(self._content(reason))
            folder.mkdir(parents=True, exist_ok=True)
            _write_new(folder, f"rank-{self.rank}", number, text)
        except Exception as error:  # noqa: BLE001 - the error that is reported matters more
            _say(f"syncline: rank {self.rank} cannot write its report to {folder}: {error}")
            return None
        return folder

    def write_within(self, reason: str, limit_s: float) -> Path | None:
        """Call `write` on a new thread, and wait at most `limit_s` seconds, because a file system may not answer.

        Return None if `write` takes longer. If no thread can start, call `write` on this thread.
        """
        written: list[Path | None] = []
        thread = threading.Thread(target=lambda: written.append(self.write(reason)), name="syncline-report", daemon=True)
        try:
            start_thread(thread)
        # The process has too many threads, or the interpreter ends.
        except RuntimeError:
            return self.write(reason)
        thread.join(limit_s)
        return written[0] if written else None

    def _content(self, reason: str) -> dict[str, Any]:
        # Write only the groups with the latest calls, because a job may have made many groups.
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
                    "ranks": recorder.members,  # a reporter keeps its rank after `shrink`
                    "calls": [record.as_dict() for record in recorder.records()],
                    # Read `begun` after the calls: a call that begins meanwhile is then unknown, not missing.
                    "begun": recorder.count.begun,
                }
                for recorder in recorders
            ],
            "stacks": _stacks()[:_MOST_STACK_CHARACTERS],
        }


def _say(text: str) -> None:
    # Ignore all errors: this may run in a signal's handler, and an error would end the training. Printing may fail for many
    # reasons. For example, standard error may be closed, or the handler may have interrupted another write to it.
    try:
        print(text, file=sys.stderr)
    except BrokenPipeError:
        let_go(sys.stderr)
    except Exception:  # noqa: BLE001
        pass


def _write_new(folder: Path, stem: str, number: int, text: str) -> None:
    """Write a file that does not exist yet.

    The launcher may kill this process meanwhile. So write the text to a hidden file first, and rename the complete file.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    aside = folder / f".{stem}.{os.getpid()}.{number}"
    try:
        with os.fdopen(os.open(aside, flags, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        # One reporter gives each number once. Only a file of an earlier reporter of this run may have the name.
        while (path := folder / f"{stem}.{number}.json").exists():
            number += 1
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


# Each signal comes twice: to the thread that `_listen` starts, and to the main thread as soon as the main thread runs Python
# code. So within this time after a report, no second report is written.
_ONCE_S = 1.0

# The byte that ends the thread at exit. No signal has this number.
_STOP = b"\0"
_STOP_S = 5.0


def report_on_signal(reporter: Reporter) -> bool:
    """Write a report on every SIGUSR1 from now on, even while the main thread is inside a library.

    An earlier Python handler of the program is still called. If the program sets a handler later, that handler replaces
    Syncline's handler for good.

    Returns:
        Whether the signal writes reports. False if the caller is not the main thread, if C code has set a handler, or if the
            program has replaced Syncline's handler.
    """
    global _ours, _latest
    _latest = reporter
    # Python allows only the main thread to set handlers, and Windows has no such signal.
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR1"):
        return False
    earlier = signal.getsignal(signal.SIGUSR1)
    # Our handler is still set, so only the reporter changes.
    if isinstance(earlier, _OnSignal):
        earlier.reporter = reporter
        return True
    # Do nothing if C code has set the handler, because Python cannot call it, or if the program has replaced our handler.
    if earlier is None or _ours is not None:
        return False
    _ours = handler = _OnSignal(reporter, earlier)
    signal.signal(signal.SIGUSR1, handler)
    _listen(handler)
    return True


class _OnSignal:
    def __init__(self, reporter: Reporter, earlier: Any) -> None:
        self.reporter = reporter
        self._earlier = earlier
        self._writing = threading.Lock()
        self._latest_s = -_ONCE_S

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.report()
        if callable(self._earlier):
            self._earlier(number, frame)

    def is_set(self) -> bool:
        return signal.getsignal(signal.SIGUSR1) is self

    def report(self) -> None:
        """Write one report for each signal. If another report is being written, do nothing."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            # The main thread and the thread of `_listen` both get each signal. The other thread has already written the report.
            if time.monotonic() - self._latest_s < _ONCE_S:
                return
            folder = self.reporter.write(_SIGNAL)
            self._latest_s = time.monotonic()
        finally:
            self._writing.release()
        if folder is not None:
            _say(f"syncline: rank {self.reporter.rank} has written its report to {folder}")


@atexit.register
def _ignore_signal() -> None:
    # After the exit functions, Python restores the default action of each signal that has a handler. But MPI_Finalize may still
    # wait for other ranks then, and SIGUSR1 would end this process. Python leaves ignored signals alone.
    is_main = threading.current_thread() is threading.main_thread()  # `os._exit` in a thread may call this function
    if is_main and _ours is not None and _ours.is_set():
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)


_ours: _OnSignal | None = None
_latest: Reporter | None = None


def latest_reporter() -> Reporter | None:
    """Return the reporter of the latest group that started in this process and was not made from another group."""
    return _latest


def _listen(handler: _OnSignal) -> None:
    # Python runs a handler only between two instructions of the main thread, which may stay inside a library for long. But
    # Python's C handler writes to this pipe at once.
    heard, told = os.pipe()
    os.set_blocking(told, False)
    others = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    # The program or another library has set its own pipe, so set that pipe again. Then only Python's handler writes reports.
    if others != -1:
        signal.set_wakeup_fd(others)
        os.close(heard)
        os.close(told)
        return
    thread = threading.Thread(target=_report_when_told, args=(heard, handler), name="syncline-report", daemon=True)
    thread.start()
    atexit.register(_stop, thread, told, os.getpid())


def _report_when_told(heard: int, handler: _OnSignal) -> None:
    """Write a report for each SIGUSR1 byte in the pipe. A zero byte ends the loop."""
    while True:
        try:
            signals = os.read(heard, 64)
        # The pipe was closed.
        except OSError:
            return
        if signal.SIGUSR1 in signals and handler.is_set():
            handler.report()
        if not signals or _STOP in signals:
            return


def _stop(thread: threading.Thread, told: int, pid: int) -> None:
    if os.getpid() == pid:  # a forked child has the same pipe, and must not end the parent's thread
        with suppress(OSError):  # the program has closed the pipe, or it is full
            os.write(told, _STOP)
        thread.join(_STOP_S)
