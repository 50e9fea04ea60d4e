"""One message where the ranks of a node fail alike before they are connected."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from zlib import crc32

from ..errors import LaunchError
from .launch import Launch
from .user_secret import private_folder

# Ranks of one job fail within that time; a later failure with the same words, after a restart, is told again.
FRESH_S = 30.0

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def print_failure_once(launch: Launch | None, is_connected: Callable[[], bool]) -> None:
    """Let only one rank of a node print the uncaught exception that follows, if others fail with the same words.

    Ranks that are not connected cannot ask one another. But those that one launcher started on a node share a parent process,
    and a folder that only their user can write.

    Args:
        launch: what the launcher says.
        is_connected: whether the ranks are connected after all, when an exception is not caught.
    """
    if launch is None or hasattr(sys, "ps1") or isinstance(sys.excepthook, _OncePerNode):
        return
    sys.excepthook = _OncePerNode(sys.excepthook, is_connected)


class _OncePerNode:
    """An excepthook; keeps the one that was there."""

    def __init__(self, previous: _Hook, is_connected: Callable[[], bool]) -> None:
        self._previous = previous
        self._is_connected = is_connected

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        words = "".join(traceback.format_exception_only(kind, error))
        if self._is_connected() or is_first(f"said-{os.getppid()}-{crc32(words.encode()):08x}"):
            self._previous(kind, error, trace)


def is_first(name: str, folder: Path | None = None) -> bool:
    """Whether no process of this user has asked for that name within the last `FRESH_S` seconds, or nobody can tell."""
    try:
        path = private_folder(folder) / name
        try:
            path.touch(mode=0o600, exist_ok=False)
        except FileExistsError:
            if time.time() - path.stat().st_mtime < FRESH_S:
                return False
            path.touch()
    except (OSError, LaunchError):
        return True
    return True
