"""An uncaught error at the start: one rank of a node speaks for those that fail alike, and says no more than its user needs."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from zlib import crc32

from ..errors import LaunchError, SynclineError
from ..health.liveness import own_identity
from .user_secret import private_folder

logger = logging.getLogger("syncline.collectives")

# Ranks of one job fail within that time.
FRESH_S = 30.0
_OURS = f"{os.sep}syncline{os.sep}"
_IMPORTED_S = time.time()

_is_handled = False

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def handle_uncaught_elsewhere() -> None:
    """Leave uncaught exceptions to `syncline run`, which sees them all and ends the job."""
    global _is_handled
    _is_handled = True


def are_handled_elsewhere() -> bool:
    """Whether `syncline run` sees to uncaught exceptions."""
    return _is_handled


def print_failure_once(is_connected: Callable[[], bool], *, has_siblings: bool) -> None:
    """Let the uncaught exception that follows be printed briefly, and by one rank of a node if others fail with the same words.

    Ranks that are not connected cannot ask one another. But those that one launcher started on a node share a parent process,
    and a folder that only their user can write.

    Args:
        is_connected: whether the ranks are connected after all, when an exception is not caught.
        has_siblings: whether a launcher started this process.
    """
    if not (_is_handled or hasattr(sys, "ps1") or isinstance(sys.excepthook, _OncePerNode)):
        sys.excepthook = _OncePerNode(sys.excepthook, is_connected, has_siblings)


class _OncePerNode:
    """An excepthook; keeps the one that was there."""

    def __init__(self, previous: _Hook, is_connected: Callable[[], bool], has_siblings: bool) -> None:
        self._previous = previous
        self._is_connected = is_connected
        self._has_siblings = has_siblings

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        words = "".join(traceback.format_exception_only(kind, error))
        asks = self._has_siblings and not self._is_connected()
        if asks and not is_first(f"{os.getppid()} {crc32(words.encode()):08x}", started_s()):
            return
        if self._previous is sys.__excepthook__ and isinstance(error, SynclineError):
            sys.stderr.write(in_text(error, trace))
        else:
            self._previous(kind, error, trace)


def in_text(error: BaseException, trace: TracebackType | None) -> str:
    """An exception as Python prints it. One of ours ends at the line of the user's that called us, without what caused it.

    An error of ours says all that its reader needs; where in Syncline it was raised is for those who log at DEBUG.
    """
    if not isinstance(error, SynclineError) or logger.isEnabledFor(logging.DEBUG):
        return "".join(traceback.format_exception(type(error), error, trace))
    return "".join(traceback.format_exception(type(error), error, _until_ours(trace), chain=False))


def _until_ours(trace: TracebackType | None) -> TracebackType | None:
    frames = []
    while trace is not None and _OURS not in trace.tb_frame.f_code.co_filename:
        frames.append(trace)
        trace = trace.tb_next
    kept: TracebackType | None = None
    for entry in reversed(frames):
        kept = TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def is_first(name: str, started_s: float, folder: Path | None = None) -> bool:
    """Whether no process of this user has asked for that name since this one started, or nobody can tell.

    A shell, or torchrun's agent, may start one run after the other, with the same error. The processes of a run have all
    started before the first of them fails; so a process that has started later is of another run, and speaks again.

    Args:
        name: what would be said, and by whose children.
        started_s: when this process started, in seconds since the epoch.
        folder: where it is remembered who has spoken, in one file for all.
    """
    try:
        with (private_folder(folder) / "spoken").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            now = time.time()
            spoken = {}
            with suppress(ValueError, TypeError, AttributeError):  # it was cut short
                spoken = {said: at_s for said, at_s in json.load(file).items() if now - FRESH_S < at_s <= now}
            if spoken.get(name, -1.0) > started_s:
                return False
            spoken[name] = now
            file.truncate(0)
            json.dump(spoken, file)
    except (OSError, LaunchError):
        pass
    return True


def started_s() -> float:
    """When this process started, in seconds since the epoch."""
    identity = own_identity()
    if identity is None:
        return _IMPORTED_S
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - identity.started / os.sysconf("SC_CLK_TCK"))
