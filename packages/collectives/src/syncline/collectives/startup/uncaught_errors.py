"""Print an uncaught error in full on only one rank of a node, and leave out the stack frames inside Syncline and torch.

Note [Who speaks]
~~~~~~~~~~~~~~~~~
One failure makes many ranks fail, but only one rank of a node speaks: it prints its error in full. The first rank that fails
speaks, and notes this in a small file. The processes of one user on a node share this file. The other ranks print one line that
points to the first rank.

The first rank that fails is usually the cause. But a rank that has only lost a connection knows less than other ranks. So such
a rank first waits up to `_VAGUE_S` seconds for another rank to speak.

A rank tries to lock the file for `_LOCK_S` seconds. A rank that cannot use the file speaks.
"""

from __future__ import annotations

import atexit
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
from typing import IO, TextIO
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
    text_of,
)
from ..health.exit_status import let_go
from ..health.liveness import Run, current_run, own_identity
from .launch import process_manager
from .silent_ranks import let_silent_ranks_report
from .user_secret import private_folder

logger = logging.getLogger("syncline.collectives")

# We assume that one failure makes all affected ranks fail within this time.
FRESH_S = 30.0
# We assume that a launcher starts all ranks within this time. A rank may fail before the last rank has started.
_STARTS_WITHIN_S = 5.0
_VAGUE_S = 1.0
_LOCK_S = 1.0
_LONGEST_LINE = 200
_FAILED_TO_CONNECT = "_syncline_failed_to_connect"
_STACK_IN_TEXT = "\n\nAt:\n"
TRACEBACKS_VARIABLE = "SYNCLINE_FULL_TRACEBACKS"
_IMPORTED_S = time.time()

_is_handled = False
_shows_all_frames = False

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def show_all_frames(are_shown: bool) -> None:
    """Set whether tracebacks at exit show the stack frames inside Syncline and torch."""
    global _shows_all_frames
    _shows_all_frames = are_shown


def handle_uncaught_elsewhere() -> None:
    """Tell Syncline that this process handles uncaught exceptions itself. Afterwards, Syncline sets no excepthook.

    `syncline run` calls this function.
    """
    global _is_handled
    _is_handled = True


def are_handled_elsewhere() -> bool:
    """Return whether this process handles uncaught exceptions itself, as `syncline run` does."""
    return _is_handled


def print_failure_once(is_connected: Callable[[], bool], *, has_siblings: bool, failure: BaseException | None = None) -> None:
    """Set an excepthook that prints an exception in full on one rank of a node. See Note [Who speaks].

    Before the ranks are connected, they do not know which other processes belong to their run. Ranks with the same parent
    process may all end with `failure` and the same text. Then the first rank prints the text in full, and each other rank
    prints one line. `failure` is the exception that `init_process_group` raises. The hook calls `is_connected` to learn whether
    the ranks are connected. `has_siblings` says whether a launcher started this process.
    """
    # The program may catch this exception, go on, and end with another exception. So mark this exception. A mark does not keep
    # the frames of the traceback alive, but a reference to the exception would.
    if failure is not None:
        setattr(failure, _FAILED_TO_CONNECT, True)
    # Do not set the hook twice, nor at a Python prompt, nor if `syncline run` prints the error.
    if not (_is_handled or hasattr(sys, "ps1") or isinstance(sys.excepthook, _OncePerNode)):
        sys.excepthook = _OncePerNode(sys.excepthook, is_connected, has_siblings)


def print_failures_of_the_run(*, has_siblings: bool) -> None:
    """If the program has set no excepthook, set one as in Note [Who speaks]. Call this when the ranks are connected."""
    # A hook that the user or an MPI group has set stays.
    if sys.excepthook is sys.__excepthook__:
        print_failure_once(lambda: True, has_siblings=has_siblings)


class _OncePerNode:
    def __init__(self, previous: _Hook, is_connected: Callable[[], bool], has_siblings: bool) -> None:
        self._previous = previous
        self._is_connected = is_connected
        self._has_siblings = has_siblings

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        run = current_run()
        # A program may wrap the exception: `raise ... from error`.
        failed_to_connect = any(hasattr(one, _FAILED_TO_CONNECT) for one in (error, error.__cause__))
        if run is None and self._has_siblings and failed_to_connect and not self._is_connected():
            words = "".join(traceback.format_exception_only(kind, error))
            if not is_first(f"{os.getppid()} {crc32(words.encode()):08x}", run_began_s()):
                # The processes may be of different jobs with different logs, so print where to look.
                told = f"[syncline] process {os.getpid()} {also_failed(error, trace)}"
                sys.stderr.write(
                    f"{told}; a process with the same parent (pid {os.getppid()}) has printed this error in full\n"
                )
                return
        if self._previous is not sys.__excepthook__:
            self._previous(kind, error, trace)
        elif run is None:
            # Without a run, this rank has no name to print.
            sys.stderr.write(in_text(error, trace))
        else:
            last = last_words(f"[syncline] {run.who()}", "failed", error, trace)
            # Wait at exit and not here: a hook of torch may have called this hook, and prints the text when this hook has
            # returned. All ranks with a time-out wait, because torchrun kills the others when the first rank ends.
            atexit.unregister(let_silent_ranks_report)  # the program may have called the hook before
            atexit.register(let_silent_ranks_report, error, failed_first=last.is_all)
            sys.stderr.write(last.text)


@dataclass(frozen=True)
class LastWords:
    """The last text that a rank prints. If `is_all` is false, the text only points to another rank of this node."""

    text: str
    is_all: bool


def last_words(who: str, did: str, error: BaseException, trace: TracebackType | None) -> LastWords:
    """Return the text that this rank prints for an uncaught exception. See Note [Who speaks].

    `who` is this rank in words. `did` is a verb, such as "failed".
    """
    run = current_run()
    said_by = None if run is None else _who_spoke(run, error)
    if said_by is None:
        return LastWords(f"{who} {did}:\n{in_text(error, trace)}", True)
    return LastWords(f"{who} {also_failed(error, trace)}; {said_by} failed first, and its traceback says why\n", False)


def _who_spoke(run: Run, error: BaseException) -> str | None:
    """Return, in words, which rank of this node has printed its error. Return None if this rank must print its error."""
    name, mine, began_s = f"failed-{run.name}", f"rank {run.rank}", run_began_s()
    end_s = time.monotonic() + _VAGUE_S
    while _is_vague(error) and time.monotonic() < end_s:
        said_by = spoke_before(name, began_s, None)
        if said_by is not None:
            return said_by
        time.sleep(0.05)
    return spoke_before(name, began_s, mine)


def _is_vague(error: BaseException) -> bool:
    """Return whether another rank may know more, because this rank has only seen that the transport failed."""
    told = (RankLostError, RankGivenUpError, CollectiveTimeout, StoreError)
    return isinstance(error, TransportError) and not isinstance(error, told)


def also_failed(error: BaseException, trace: TracebackType | None) -> str:
    """Return one line for a rank that fails after another rank has printed the reason."""
    place = ""
    for frame in traceback.extract_tb(trace):
        # The last frame of the user's code counts, because it is nearest to the error.
        if not _is_inside(frame.filename):
            place = f", at {os.path.basename(frame.filename)}:{frame.lineno}"
    what = type(error).__name__
    if not isinstance(error, SynclineError):
        with suppress(Exception):  # the error may have no text
            what = " ".join(f"{what}: {error}".split())
    return f"failed, too{place}: {what if len(what) <= _LONGEST_LINE else f'{what[: _LONGEST_LINE - 3]}...'}"


# ---- output ----


def flush_output() -> None:
    """Flush standard output and standard error. Ignore streams that are closed or full, or whose reader has ended."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()


def say(text: str, stream: TextIO | None = None, *, end: str = "\n") -> None:
    """Write a text to a stream, if possible, with `end` after it. By default, to the standard error of the process's start."""
    flush_output()
    # torch's excepthook replaces `sys.stderr`.
    stream = stream or sys.__stderr__ or sys.stderr
    try:
        stream.write(text.rstrip("\n") + end)
        stream.flush()
    except BrokenPipeError:
        let_go(stream)
    except (AttributeError, OSError, ValueError):
        pass


# ---- tracebacks ----


def in_text(error: BaseException, trace: TracebackType | None) -> str:
    """Return the text that Python prints for an exception, but without stack frames inside Syncline and torch.

    The text also lacks the causes of a `SynclineError`. But the text has all frames and causes if SYNCLINE_FULL_TRACEBACKS or
    the setting `full_tracebacks` asks for them, if logging is at DEBUG, or if the exception may be a bug of Syncline.
    """
    said = os.environ.get(TRACEBACKS_VARIABLE, "")
    shows_all = (said != "0" if said else _shows_all_frames) or logger.isEnabledFor(logging.DEBUG) or _is_bug(error, trace)
    shown = error
    if isinstance(error, SynclineError):
        shown = error.reworded(fitted(str(error)))
    # If a future of torch fails with our error, torch raises its text, followed by the Python stack in another form.
    elif type(error) is RuntimeError and not shows_all and _STACK_IN_TEXT in text_of(error):
        shown = RuntimeError(_without_our_frames(text_of(error)))
        shown.__cause__ = error.__cause__
        if hasattr(error, "__notes__"):
            shown.__notes__ = error.__notes__  # type: ignore[attr-defined]  # Python 3.10 has no notes
    shown.__context__, shown.__suppress_context__ = error.__context__, error.__suppress_context__
    told = traceback.TracebackException(type(error), shown, trace)
    if not shows_all and _shorten(told, error):
        note = f"(Frames inside Syncline and torch are left out; {TRACEBACKS_VARIABLE}=1 shows them.)\n"
    else:
        note = ""
    return "".join(told.format()) + note


def _without_our_frames(text: str) -> str:
    """From a stack that torch has added to an error's text, leave out the lines of Syncline, torch and Python's library."""
    text, _, stack = text.partition(_STACK_IN_TEXT)
    stdlib, installed = _library_folders()
    kept = [
        line
        for line in stack.splitlines()
        if line and not _is_inside(line.strip()) and (_is_in(line.strip(), installed) or not _is_in(line.strip(), stdlib))
    ]
    return text + (_STACK_IN_TEXT + "\n".join(kept) if kept else "")


def _shorten(told: traceback.TracebackException, error: BaseException) -> bool:
    """Leave out frames and causes of an exception. Return whether an error other than a `SynclineError` lost frames.

    The text of a `SynclineError` contains its causes, so the causes are left out. Earlier errors of the user's code are kept.
    """
    is_ours = isinstance(error, SynclineError)
    kept = [frame for frame in told.stack if not _is_inside(frame.filename)]
    if not is_ours and told.stack and _is_inside(told.stack[-1].filename):
        kept.append(told.stack[-1])  # the line in torch that raised
    is_shorter = not is_ours and len(kept) < len(told.stack)
    told.stack = traceback.StackSummary.from_list(kept)
    for name in ("__cause__", "__context__"):
        chained, earlier = getattr(told, name), getattr(error, name)
        # Skip errors that were caught inside Syncline: an older error in the chain may come from the user's code.
        while is_ours and earlier is not None and (isinstance(earlier, SynclineError) or not _reached_user(earlier)):
            chained, earlier = getattr(chained, "__context__", None), earlier.__context__
        setattr(told, name, chained)
        if chained is not None and earlier is not None:
            told.__suppress_context__ &= not is_ours
            is_shorter |= _shorten(chained, earlier)
    return is_shorter


def _reached_user(error: BaseException) -> bool:
    """Return whether the user's code has caught the error, or has a frame in the error's traceback.

    If the user's code has caught the error, the traceback begins in this code.
    """
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    stdlib, installed = _library_folders()
    return bool(files) and (
        not _is_inside(files[0]) or any(not _is_inside(file) and not _is_in(file, stdlib + installed) for file in files)
    )


def _is_bug(error: BaseException, trace: TracebackType | None) -> bool:
    if isinstance(error, SynclineError) or not isinstance(error, Exception):
        return False
    frames = traceback.extract_tb(trace)
    return bool(frames) and _is_in(frames[-1].filename, _syncline_folders())


def _is_inside(filename: str) -> bool:
    if filename.startswith("<frozen"):
        return True
    return _is_in(filename, _syncline_folders()) or _is_in(filename, _torch_folders()) or filename in _between()


def _is_in(filename: str, folders: list[str]) -> bool:
    return any(filename.startswith(folder) for folder in folders)


def _syncline_folders() -> list[str]:
    # Do not search for the name "syncline": a user's folder may have this name, too.
    return [path + os.sep for path in getattr(sys.modules.get("syncline"), "__path__", [])]


def _torch_folders() -> list[str]:
    return [path + os.sep for path in getattr(sys.modules.get("torch"), "__path__", [])]


def _library_folders() -> tuple[list[str], list[str]]:
    """Return the folders of Python's own library, and the folders of installed packages, which may be inside the former."""
    stdlib, installed = (
        [sysconfig.get_path(name) + os.sep for name in names] for names in (("stdlib", "platstdlib"), ("purelib", "platlib"))
    )
    return stdlib, installed


def _between() -> tuple[str, ...]:
    folder = sysconfig.get_path("stdlib")
    return tuple(os.path.join(folder, name) for name in ("contextlib.py", "functools.py", "threading.py"))


# ---- who speaks ----


def is_first(name: str, began_s: float, folder: Path | None = None) -> bool:
    """Return whether no other process of this user has printed under the key `name` since the run began.

    If this function cannot read the file with the keys, it returns True.

    If the result is True, this process counts from now on as the one that has printed. Entries of other processes count for
    `FRESH_S` seconds. `name` is a key for the text that this process would print, different for each parent process. `began_s`
    is from `run_began_s`. `folder` is the folder of the file with the keys, by default the folder that `private_folder`
    returns.
    """
    return spoke_before(name, began_s, "", folder) is None


def spoke_before(name: str, began_s: float, who: str | None, folder: Path | None = None) -> str | None:
    """Return the `who` of the process that has spoken (printed its error in full) for this name, or None.

    If no process has spoken, and `who` (this process in words) is given, this process now counts as the one that has spoken.
    `name`, `began_s` and `folder` are as in `is_first`. Ranks that are connected pass a key of their run as `name`.
    """
    try:
        with (private_folder(folder) / "spoken").open("a+") as file:
            _lock(file)
            file.seek(0)
            now = time.time()
            spoken = {}
            with suppress(ValueError, TypeError, AttributeError):  # the file is incomplete
                spoken = {said: (at_s, by) for said, (at_s, by) in json.load(file).items() if now - FRESH_S < at_s <= now}
            # A shell, or torchrun's agent, may start several runs that fail with the same error. So entries from before this
            # run do not count.
            at_s, by = spoken.get(name, (-1.0, ""))
            if at_s > began_s:
                return str(by)
            if who is not None:
                spoken[name] = now, who
                file.truncate(0)
                json.dump(spoken, file)
    except (OSError, LaunchError):
        # Nobody can know who has spoken, so this process speaks.
        pass
    return None


def _lock(file: IO[str]) -> None:
    """Lock the file. After `_LOCK_S` seconds give up with an OSError, because a stopped process may hold the lock."""
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


def run_began_s() -> float:
    """Return the earliest time at which a rank of this run may have started, in seconds since the epoch.

    If a process manager of MPI started this process, this time is `_STARTS_WITHIN_S` before the start of this process.
    Otherwise it is the start time of this process.
    """
    # Without a process manager of MPI, a parent such as torchrun's agent may start this run right after another run. Failures
    # of the earlier run must not count for this run.
    return started_s() - (0.0 if process_manager(os.environ) is None else _STARTS_WITHIN_S)


def started_s() -> float:
    """Return the start time of this process, in seconds since the epoch."""
    identity = own_identity()
    if identity is None:
        # Without /proc, the time of the import is the best estimate.
        return _IMPORTED_S
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - identity.started / os.sysconf("SC_CLK_TCK"))
