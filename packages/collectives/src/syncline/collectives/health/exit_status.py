"""Find out the exit status of this process before the process ends.

In Python, neither `sys.excepthook` nor `atexit` can see the status of `sys.exit(3)`. So this module wraps `sys.exit`, `exit`
and `quit`. The wrapped functions raise SystemExit. Its status counts only if no code catches the SystemExit.

Python frees an uncaught exception when no frame of the main thread is left. It frees a caught exception earlier. If other code
keeps the exception alive, the module treats the exception as caught.

If a script itself raises SystemExit (`raise SystemExit(3)`), only `syncline run` knows the status before the process ends.
"""

from __future__ import annotations

import builtins
import os
import sys
import threading
from contextlib import suppress
from typing import Any, NoReturn, TextIO

_python_exit = sys.exit
_status: int | None = None


class _Exit(SystemExit):
    """The exception that `sys.exit` raises in the main thread."""

    def __del__(self) -> None:
        global _status
        # Only the first exception that is freed here counts. It may have kept alive an earlier exception that was caught.
        if _status is None and sys._getframe().f_back is None:
            _status = as_status(self.code)


def _exit(status: object = None, /) -> NoReturn:
    """Exit the interpreter by raising SystemExit(status); see Python's `sys.exit`."""
    # In another thread, `sys.exit` ends only that thread, so its status is not the status of the process.
    if threading.current_thread() is threading.main_thread():
        raise _Exit(status)
    # `threading` looks for exactly SystemExit, and would print a traceback for an `_Exit`.
    _python_exit(status)  # type: ignore[arg-type]


def watch_exit_status() -> None:
    """Wrap `sys.exit`, `exit` and `quit`. A second call does nothing."""
    if sys.exit is _python_exit:
        sys.exit = _exit
        for name in ("exit", "quit"):
            quitter = getattr(builtins, name, None)
            if type(quitter).__name__ == "Quitter":  # `python -S` has none, and some shells have their own
                setattr(builtins, name, _Quitter(quitter))


class _Quitter:
    def __init__(self, before: Any) -> None:
        self._before = before

    def __repr__(self) -> str:
        return repr(self._before)

    def __call__(self, code: object = None) -> None:
        # At a prompt, the original also closes the standard input.
        if hasattr(sys, "ps1"):
            self._before(code)
        _exit(code)


def set_exit_status(status: int) -> None:
    """Set the exit status. `syncline run` calls this function when a script ends by an exception or by `os._exit`."""
    global _status
    _status = status


def exit_status() -> int:
    """Return the status of an uncaught `sys.exit` or of `set_exit_status`; 0 if neither was called.

    Call this function in an exit handler, because the status is not known earlier.
    """
    return _status or 0


def let_go(stream: TextIO) -> None:
    """Discard what is left in the buffer of a stream. Call this function if nobody reads the stream any more.

    Python flushes the standard streams at exit. If the flush fails, Python replaces the exit status by 120.
    """
    with suppress(AttributeError, OSError, ValueError):  # not a file, or closed
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


def as_status(code: object) -> int:
    """Return the exit status of the process (0 to 255) for an argument of `sys.exit`. A pure function."""
    if code is None:
        return 0
    # A text or another object: Python prints it and exits with 1. A number is cut to 8 bits by the system.
    return code & 0xFF if isinstance(code, int) else 1
