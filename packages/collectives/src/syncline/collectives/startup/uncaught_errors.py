"""An uncaught error: one rank of a node prints it in full, without the frames inside Syncline and torch.

Note [Who speaks]
~~~~~~~~~~~~~~~~~
One failure makes many ranks fail. The processes of a node and a user share a small file, in which the first rank that fails
writes that it speaks. The others print one line that points there.

The first rank to fail is mostly the cause. But one that only lost a connection knows less than the rank that knows why. So it
waits for `_VAGUE_S` seconds, for another rank to speak.

Nothing here waits for another rank without limit: the file's lock is tried for `_LOCK_S` seconds. If the file cannot be used,
every rank speaks.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO
from zlib import crc32

from ..errors import (
    CollectiveTimeout,
    LaunchError,
    RankGivenUpError,
    RankLostError,
    StoreError,
    SynclineError,
    TransportError,
    fitted,
)
from ..health.liveness import Run, current_run, own_identity
from .user_secret import private_folder

logger = logging.getLogger("syncline.collectives")

# Ranks of one job fail within that time.
FRESH_S = 30.0
_VAGUE_S = 1.0
_LOCK_S = 1.0
_LONGEST_LINE = 200
TRACEBACKS_VARIABLE = "SYNCLINE_FULL_TRACEBACKS"
_IMPORTED_S = time.time()

_is_handled = False
_shows_all_frames = False

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def show_all_frames(are_shown: bool) -> None:
    """Whether tracebacks that are printed at exit have the frames inside Syncline and torch."""
    global _shows_all_frames
    _shows_all_frames = are_shown


def handle_uncaught_elsewhere() -> None:
    """Leave uncaught exceptions to `syncline run`, which sees them all and ends the job."""
    global _is_handled
    _is_handled = True


def are_handled_elsewhere() -> bool:
    """Whether `syncline run` sees to uncaught exceptions."""
    return _is_handled


def print_failure_once(is_connected: Callable[[], bool], *, has_siblings: bool) -> None:
    """Let an uncaught exception be printed briefly, and in full by one rank of a node. See Note [Who speaks].

    Ranks that are not connected have no name for their run. But those that one launcher started on a node share a parent
    process. Of these, ranks that fail with the same words as another one print nothing.

    Args:
        is_connected: whether the ranks are connected after all, when an exception is not caught.
        has_siblings: whether a launcher started this process.
    """
    if not (_is_handled or hasattr(sys, "ps1") or isinstance(sys.excepthook, _OncePerNode)):
        sys.excepthook = _OncePerNode(sys.excepthook, is_connected, has_siblings)


def print_failures_of_the_run(*, has_siblings: bool) -> None:
    """Let uncaught exceptions be printed as Note [Who speaks] says, now that the ranks are connected.

    Only where Python's own hook would print: one of the user's, and that of MPI's ranks, stay.
    """
    if sys.excepthook is sys.__excepthook__:
        print_failure_once(lambda: True, has_siblings=has_siblings)


class _OncePerNode:
    """An excepthook. A hook of the user's that was there before prints instead."""

    def __init__(self, previous: _Hook, is_connected: Callable[[], bool], has_siblings: bool) -> None:
        self._previous = previous
        self._is_connected = is_connected
        self._has_siblings = has_siblings

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        run = current_run()
        is_ours = self._previous is sys.__excepthook__
        if run is not None:
            if is_ours:
                sys.stderr.write(last_words(f"[syncline] {run.who()}", "failed", error, trace).text)
            else:
                self._previous(kind, error, trace)
            return
        words = "".join(traceback.format_exception_only(kind, error))
        asks = self._has_siblings and not self._is_connected()
        if asks and not is_first(f"{os.getppid()} {crc32(words.encode()):08x}", started_s()):
            return
        if is_ours:
            sys.stderr.write(in_text(error, trace))
        else:
            self._previous(kind, error, trace)


@dataclass(frozen=True)
class LastWords:
    """What a rank prints at its end, and whether that is all; else it points to the rank of this node that says all."""

    text: str
    is_all: bool


def last_words(who: str, did: str, error: BaseException, trace: TracebackType | None) -> LastWords:
    """What this rank prints of an exception that nobody caught. See Note [Who speaks].

    Args:
        who: this rank.
        did: what it did, such as "failed".
        error: the exception.
        trace: its traceback.
    """
    run = current_run()
    said_by = None if run is None else _who_spoke(run, error)
    if said_by is None:
        return LastWords(f"{who} {did}:\n{in_text(error, trace)}", True)
    return LastWords(f"{who} {also_failed(error, trace)}; {said_by} failed first, and its traceback says why\n", False)


def _who_spoke(run: Run, error: BaseException) -> str | None:
    """Which rank of this node has spoken before, in words; None if this rank speaks."""
    name, mine, began_s = f"failed-{run.name}", f"rank {run.rank}", started_s()
    end_s = time.monotonic() + _VAGUE_S
    while _is_vague(error) and time.monotonic() < end_s:
        said_by = spoke_before(name, began_s, None)
        if said_by is not None:
            return said_by
        time.sleep(0.05)
    return spoke_before(name, began_s, mine)


def _is_vague(error: BaseException) -> bool:
    """Whether another rank may know more: this one only saw that the machinery failed."""
    told = (RankLostError, RankGivenUpError, CollectiveTimeout, StoreError)
    return isinstance(error, TransportError) and not isinstance(error, told)


def also_failed(error: BaseException, trace: TracebackType | None) -> str:
    """One line for a rank that fails when another one has said why: of an error of ours the place and the type alone."""
    place = ""
    for frame in traceback.extract_tb(trace):
        if not _is_inside(frame.filename):
            place = f", at {os.path.basename(frame.filename)}:{frame.lineno}"
    what = type(error).__name__
    if not isinstance(error, SynclineError):
        what = " ".join(f"{what}: {error}".split())
    return f"failed, too{place}: {what if len(what) <= _LONGEST_LINE else f'{what[: _LONGEST_LINE - 3]}...'}"


# ---- tracebacks ----


def in_text(error: BaseException, trace: TracebackType | None) -> str:
    """An exception as Python prints it, without the frames inside Syncline and torch, and without what an error of ours says.

    All is shown where a setting asks for it, to those who log at DEBUG, and of what may be a bug of Syncline.
    """
    shown = error
    if isinstance(error, SynclineError):
        shown = error.reworded(fitted(str(error)))
        shown.__context__, shown.__suppress_context__ = error.__context__, error.__suppress_context__
    told = traceback.TracebackException(type(error), shown, trace)
    said = os.environ.get(TRACEBACKS_VARIABLE, "")
    shows_all = said != "0" if said else _shows_all_frames
    if not (shows_all or logger.isEnabledFor(logging.DEBUG) or _is_bug(error, trace)) and _shorten(told, error):
        note = f"(Frames inside Syncline and torch are left out; {TRACEBACKS_VARIABLE}=1 shows them.)\n"
    else:
        note = ""
    return "".join(told.format()) + note


def _shorten(told: traceback.TracebackException, error: BaseException) -> bool:
    """Leave out frames and causes; whether frames of an error that is not ours are missing.

    Our own errors are not chained to each other, or to what a library reported: their text says it. What the user's code raised
    before is kept.
    """
    is_ours = isinstance(error, SynclineError)
    kept = [frame for frame in told.stack if not _is_inside(frame.filename)]
    if not is_ours and told.stack and _is_inside(told.stack[-1].filename):
        kept.append(told.stack[-1])  # where torch refused something
    is_shorter = not is_ours and len(kept) < len(told.stack)
    told.stack = traceback.StackSummary.from_list(kept)
    for name in ("__cause__", "__context__"):
        chained, earlier = getattr(told, name), getattr(error, name)
        # Between an error of ours and one of the user's, which was on its way, may lie some that were caught inside.
        while is_ours and earlier is not None and (isinstance(earlier, SynclineError) or not _reached_user(earlier)):
            chained, earlier = getattr(chained, "__context__", None), earlier.__context__
        setattr(told, name, chained)
        if chained is not None and earlier is not None:
            told.__suppress_context__ &= not is_ours
            is_shorter |= _shorten(chained, earlier)
    return is_shorter


def _reached_user(error: BaseException) -> bool:
    return any(not _is_inside(frame.filename) for frame in traceback.extract_tb(error.__traceback__))


def _is_bug(error: BaseException, trace: TracebackType | None) -> bool:
    """Whether Syncline raised what is no error of its own, and nobody has pressed Ctrl-C."""
    if isinstance(error, SynclineError) or not isinstance(error, Exception):
        return False
    frames = traceback.extract_tb(trace)
    return bool(frames) and _is_in(frames[-1].filename, _syncline_folders())


def _is_inside(filename: str) -> bool:
    """Whether a frame is none of the user's: of Syncline, torch, or what Python's library does between them."""
    if filename.startswith("<frozen"):
        return True
    return _is_in(filename, _syncline_folders()) or _is_in(filename, _torch_folders()) or filename in _between()


def _is_in(filename: str, folders: list[str]) -> bool:
    return any(filename.startswith(folder) for folder in folders)


def _syncline_folders() -> list[str]:
    """Where the packages are. A user's folder may be called syncline, too."""
    return [path + os.sep for path in getattr(sys.modules.get("syncline"), "__path__", [])]


def _torch_folders() -> list[str]:
    return [path + os.sep for path in getattr(sys.modules.get("torch"), "__path__", [])]


def _between() -> tuple[str, ...]:
    folder = sysconfig.get_path("stdlib")
    return tuple(os.path.join(folder, name) for name in ("contextlib.py", "functools.py", "threading.py"))


# ---- who speaks ----


def is_first(name: str, started_s: float, folder: Path | None = None) -> bool:
    """Whether no process of this user has asked for that name since this one started, or nobody can tell.

    A shell, or torchrun's agent, may start one run after the other, with the same error. The processes of a run have all
    started before the first of them fails; so a process that has started later is of another run, and speaks again.

    Args:
        name: what would be said, and by whose children.
        started_s: when this process started, in seconds since the epoch.
        folder: where it is remembered who has spoken, in one file for all.
    """
    return spoke_before(name, started_s, "", folder) is None


def spoke_before(name: str, started_s: float, who: str | None, folder: Path | None = None) -> str | None:
    """Who has spoken: what the first process gave as `who`; None if none has, and from now on this one has.

    Args:
        name: as for `is_first`.
        started_s: as for `is_first`.
        who: this process, as others shall call it; None: it only asks.
        folder: as for `is_first`.
    """
    try:
        with (private_folder(folder) / "spoken").open("a+") as file:
            _lock(file)
            file.seek(0)
            now = time.time()
            spoken = {}
            with suppress(ValueError, TypeError, AttributeError):  # it was cut short
                spoken = {said: (at_s, by) for said, (at_s, by) in json.load(file).items() if now - FRESH_S < at_s <= now}
            at_s, by = spoken.get(name, (-1.0, ""))
            if at_s > started_s:
                return str(by)
            if who is not None:
                spoken[name] = now, who
                file.truncate(0)
                json.dump(spoken, file)
    except (OSError, LaunchError):
        pass
    return None


def _lock(file: IO[str]) -> None:
    """Lock it. A process that is stopped may hold the lock, so this is tried for a while.

    Raises:
        OSError: another process held it all the time.
    """
    end_s = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.005)
        else:
            return


def started_s() -> float:
    """When this process started, in seconds since the epoch."""
    identity = own_identity()
    if identity is None:
        return _IMPORTED_S
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - identity.started / os.sysconf("SC_CLK_TCK"))
