"""With which status this process ends, known while it still can do something about it.

Python tells nobody: neither `sys.excepthook` nor `atexit` see the status of `sys.exit(3)`. So `sys.exit` is wrapped, and with
it `exit` and `quit`, which the module `site` offers to scripts. Many programs catch what it raises (argparse in a test, a
server's loop), so what counts is an exception that nobody caught: Python releases that one when no frame of the main thread is
left, and one that was caught while some frame still runs. An exception that something else keeps alive is taken for caught.

What is raised by other means (`raise SystemExit(3)`) is seen by `syncline run` alone; else the status reaches the launcher when
the process ends.
"""

from __future__ import annotations

import builtins
import sys
import threading
from typing import Any, NoReturn

_python_exit = sys.exit
_status: int | None = None


class _Exit(SystemExit):
    """What `sys.exit` raises in the main thread."""

    def __del__(self) -> None:
        global _status
        if _status is None and sys._getframe().f_back is None:  # the first: an earlier one that was caught may hang on it
            _status = as_status(self.code)


def _exit(status: object = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status); see Python's `sys.exit`."""
    if threading.current_thread() is threading.main_thread():
        raise _Exit(status)
    _python_exit(status)  # type: ignore[arg-type]  # `threading` compares the type


def watch_exit_status() -> None:
    """Wrap `sys.exit`, `exit` and `quit`. A second call is harmless."""
    if sys.exit is _python_exit:
        sys.exit = _exit
        for name in ("exit", "quit"):
            quitter = getattr(builtins, name, None)
            if type(quitter).__name__ == "Quitter":  # not where `python -S` has none, or a shell its own
                setattr(builtins, name, _Quitter(quitter))


class _Quitter:
    """In place of `exit` or `quit`. Theirs also close the standard input, which matters at a prompt only."""

    def __init__(self, before: Any) -> None:
        self._before = before

    def __repr__(self) -> str:
        return repr(self._before)

    def __call__(self, code: object = None) -> None:
        if hasattr(sys, "ps1"):
            self._before(code)
        _exit(code)


def set_exit_status(status: int) -> None:
    """This process ends with that status, as `syncline run` has seen: a script raised SystemExit, or anything else."""
    global _status
    _status = status


def exit_status() -> int:
    """The status with which `sys.exit` has ended this process, 0 if it has not. To be asked at the interpreter's exit."""
    return _status or 0


def as_status(code: object) -> int:
    """The status, 0 to 255, that the system sees of an argument of `sys.exit`. A pure function."""
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1
