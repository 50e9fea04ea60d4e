"""SIGUSR1 writes a report, also while the main thread is inside a library."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from .report import Reporter

# One signal is heard twice: by the thread below, and by the main thread when it is in Python.
_ONCE_S = 1.0

# What the thread is told at exit; no signal has that number.
_STOP = b"\0"
_STOP_S = 5.0


def report_on_signal(reporter: Reporter) -> bool:
    """Let SIGUSR1 write a report from now on. A handler of Python's that is there already is called as well.

    A handler that the program sets after the first call takes the signal over, for good: there is no report then, and a later
    call, for another group, does not take the signal back.

    Python runs handlers between two instructions of the main thread, which may be inside a library for long. So a thread
    listens, too: Python's own handler in C tells it by a pipe (`signal.set_wakeup_fd`), unless the program uses that already.

    Returns:
        Whether it was set: only the main thread can, and not over a handler that was set by C code, or after our own.
    """
    global _ours
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR1"):
        return False
    earlier = signal.getsignal(signal.SIGUSR1)
    if isinstance(earlier, _OnSignal):
        earlier.reporter = reporter
        return True
    if earlier is None or _ours is not None:
        return False
    _ours = handler = _OnSignal(reporter, earlier)
    signal.signal(signal.SIGUSR1, handler)
    _listen(handler)
    return True


class _OnSignal:
    """The handler of SIGUSR1, and the one that was there before."""

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
        """Whether no other handler of Python's has taken the signal over."""
        return signal.getsignal(signal.SIGUSR1) is self

    def report(self) -> None:
        """Write once for each signal. Does not wait for another thread that does, for it may be this one, interrupted."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            if time.monotonic() - self._latest_s < _ONCE_S:
                return
            folder = self.reporter.write("SIGUSR1")
            self._latest_s = time.monotonic()
        finally:
            self._writing.release()
        if folder is not None:
            print(f"syncline: rank {self.reporter.rank} has written its report to {folder}", file=sys.stderr)


_ours: _OnSignal | None = None


def _listen(handler: _OnSignal) -> None:
    heard, told = os.pipe()
    os.set_blocking(told, False)
    others = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    if others != -1:
        signal.set_wakeup_fd(others)
        os.close(heard)
        os.close(told)
        return
    thread = threading.Thread(target=_report_when_told, args=(heard, handler), name="syncline-report", daemon=True)
    thread.start()
    atexit.register(_stop, thread, told, os.getpid())


def _report_when_told(heard: int, handler: _OnSignal) -> None:
    """A byte comes for each signal that Python has caught, until the end, or until the program has closed the pipe."""
    while True:
        try:
            signals = os.read(heard, 64)
        except OSError:
            return
        if signal.SIGUSR1 in signals and handler.is_set():
            handler.report()
        if not signals or _STOP in signals:
            return


def _stop(thread: threading.Thread, told: int, pid: int) -> None:
    if os.getpid() == pid:  # not in a fork, which has the same pipe
        with suppress(OSError):  # the program has closed the pipe, or it is full
            os.write(told, _STOP)
        thread.join(_STOP_S)
