"""Write a report on SIGUSR1, also while the main thread is inside a library."""

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

# Each signal comes twice: to the thread of `_listen`, and to the main thread when it runs Python code. So within this time
# after a report, no second report is written.
_ONCE_S = 1.0

# The byte that ends the thread at exit. No signal has this number.
_STOP = b"\0"
_STOP_S = 5.0


def report_on_signal(reporter: Reporter) -> bool:
    """Write a report on every SIGUSR1 from now on.

    If the program has already set a Python handler, the signal calls that handler, too.

    If the program sets its own handler after the first call of this function, the program's handler replaces ours, and there
    are no more reports. A later call of this function, for another group, does not set our handler again.

    Python runs handlers between two instructions of the main thread, but the main thread may be inside a library for long. So
    another thread waits for the signal, too. Python's own C handler tells that thread through a pipe (`signal.set_wakeup_fd`).
    If the program has set such a pipe itself, there is no other thread.

    Returns:
        Whether the signal writes reports. False if the caller is not the main thread, if C code has set a handler, or if the
        program has replaced our handler.
    """
    global _ours
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
    """The handler of SIGUSR1, which also calls the earlier handler."""

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
        """Whether this is still Python's handler of the signal."""
        return signal.getsignal(signal.SIGUSR1) is self

    def report(self) -> None:
        """Write one report for each signal. If another report is being written, do nothing.

        Do not wait for the other report. Its writer may be this thread, which the signal has interrupted.
        """
        if not self._writing.acquire(blocking=False):
            return
        try:
            # The other listener has already written the report of this signal.
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
    """Read the pipe and write reports. The pipe gets one byte for each signal.

    Stop at a zero byte, or when the pipe is closed.
    """
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
