"""`CancelScope` ends the waits of a call. `DetachedCall` calls a library function that may block for ever.

This module does not import torch.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from time import monotonic
from typing import Generic, TypeVar

from ..errors import InvalidArgumentError
from .living_set import LivingSet

DEFAULT_TIMEOUT_S = 1800.0
# A thread that waits calls its scope's `ask` for the first time after _PATIENCE_S, because most calls end sooner. Then the
# thread calls `ask` every _ASK_S.
_PATIENCE_S = 0.05
_ASK_S = 0.01

_LONGEST_S = 30 * 365 * 24 * 3600.0  # libraries need a finite number, and count nanoseconds in 64 bits

T = TypeVar("T")


def seconds(timeout: timedelta | float | None, default_s: float = DEFAULT_TIMEOUT_S) -> float:
    """Convert a number of seconds or a timedelta to seconds, at most 30 years. None becomes `default_s`.

    Raises:
        InvalidArgumentError: `timeout` is zero, negative or not a number.
    """
    if timeout is None:
        return default_s
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    try:
        # A limit of NaN would never be reached, because every comparison with it is false.
        is_positive = not math.isnan(timeout_s) and timeout_s > 0
    except (TypeError, ValueError, RuntimeError, OverflowError):  # RuntimeError: a tensor with more than one element
        is_positive = False
    if not is_positive:
        raise InvalidArgumentError(f"a timeout must be a positive number of seconds or a timedelta, found {timeout!r}")
    return min(float(timeout_s), _LONGEST_S)


class CancelScope:
    """Ends a wait after `timeout_s` seconds, or when a thread calls `cancel` with a reason.

    The thread that waits calls `check` regularly. Any thread may call `cancel`.

    Args:
        timeout_s: the time limit of the wait, in seconds from now.
        ask: returns an exception if the wait can never succeed, or None. `check` calls `ask` now and then. If
            `ask` returns an exception, the scope ends.

    Attributes:
        ask: the function `ask`, or None. The function may keep a group alive, so set `ask` to None if you keep the scope.
        reason: the exception that `cancel` got or `ask` returned, or None.
        was_noticed: whether `check` has raised an error.
    """

    # Every call makes a scope, and most calls end before any check. Defaults are in the class, so that a scope costs little.
    __slots__ = ("__dict__", "_end_s", "ask", "timeout_s")
    reason: BaseException | None = None
    was_noticed = False
    _next_ask_s: float | None = None
    _outer: CancelScope | None = None  # the scope whose `within` made this one

    def __init__(self, timeout_s: float, ask: Callable[[], BaseException | None] | None = None) -> None:
        self.timeout_s = timeout_s
        self._end_s = monotonic() + timeout_s
        self.ask = ask

    def cancel(self, reason: BaseException) -> None:
        """End the scope now: `check` raises `reason`, or the earlier reason if there is one."""
        # The first reason is the cause. Later reasons are mostly consequences of the first.
        if self.reason is None:
            self.reason = reason
        self._end_s = -math.inf

    def within(self, limit_s: float, ask: Callable[[], BaseException | None] | None = None) -> CancelScope:
        """Return a new scope that ends together with this scope, but after `limit_s` seconds at the latest.

        If `ask` is None, the new scope uses the `ask` of this scope.
        """
        part = CancelScope(min(self.remaining_s(), limit_s), ask or self.ask)
        part._outer = self
        return part

    def remaining_s(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self._end_s - monotonic())

    def is_over(self) -> bool:
        """Whether the scope has ended, by its time limit or by `cancel`."""
        return self.reason is not None or monotonic() >= self._end_s

    def check(self, what: str = "the time limit was reached") -> None:
        """Raise an error if the scope has ended.

        Args:
            what: the text of the `TimeoutError`, for example which ranks are missing.

        Raises:
            TimeoutError: the time limit was reached.
            BaseException: the reason that `cancel` got, or that `ask` returned.
        """
        now_s = monotonic()
        # The first check: a wait that ends within `_PATIENCE_S` never asks.
        if self._next_ask_s is None:
            self._next_ask_s = now_s + _PATIENCE_S
        # The thread that cancels the outer scope does not know this scope.
        if self._outer is not None and self._outer.reason is not None:
            self.cancel(self._outer.reason)
        # A scope that has a reason needs no second reason. `ask` may cost a system call, so it is not called at every check.
        if self.reason is None and self.ask is not None and now_s >= self._next_ask_s:
            self._next_ask_s = now_s + _ASK_S
            reason = self.ask()
            if reason is not None:
                self.cancel(reason)
        if now_s >= self._end_s or self.reason is not None:
            self.was_noticed = True
            # The monitor looks only at the outer scope.
            if self._outer is not None:
                self._outer.was_noticed = True
            # A reason says more than a time limit, so it comes first.
            if self.reason is not None:
                raise self.reason
            raise TimeoutError(what)


def start_thread(thread: threading.Thread) -> None:
    """Start a thread.

    Raises:
        RuntimeError: there are too many threads, or the interpreter ends.
    """
    # Before Python 3.12, `Thread.start` waits for ever if the interpreter ends.
    if sys.is_finalizing():
        raise RuntimeError("no thread can start while the interpreter ends")
    thread.start()


class DetachedCall(Generic[T]):
    """Calls a function once, on a new daemon thread, which stays blocked if the function never returns.

    Use this class for a library function that may block in C code. When the scope of `wait` ends, `wait` raises an error,
    even if the function is still blocked. At exit, the process waits at most 5 seconds for the threads of all such calls.

    Args:
        function: the function to call. This object keeps no reference to the function after the call.
        name: the name of the thread.
        context: returns a context manager, inside which the thread calls the function.

    Attributes:
        done: an event that is set when the function has returned or raised an error.
    """

    def __init__(
        self, function: Callable[[], T], name: str, context: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.done = threading.Event()
        thread = threading.Thread(target=self._run, args=(function, context), name=name, daemon=True)
        _detached.add(thread)
        start_thread(thread)

    def wait(self, scope: CancelScope, look_s: float = 0.1, what: str = "the library did not return") -> T:
        """Wait until the function returns, and return its result. Check the scope every `look_s` seconds.

        Raises:
            BaseException: the function's error, or the error that `CancelScope.check` raises.
        """
        # Wait at least 1 ms, so that this never becomes a busy loop.
        while not self.done.wait(min(look_s, max(scope.remaining_s(), 1e-3))):
            scope.check(what)
        return self.result()

    def result(self) -> T:
        """Return the function's result, or raise its error. Call `result` only when `done` is set."""
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self, function: Callable[[], T], context: Callable[[], AbstractContextManager[object]]) -> None:
        try:
            with context():
                self._result.append(function())
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self._error = error
        self.done.set()


_EXIT_S = 5.0
_detached: LivingSet[threading.Thread] = LivingSet()


@atexit.register
def _finish_detached() -> None:
    scope = CancelScope(_EXIT_S)
    for thread in _detached:
        if thread.is_alive():
            thread.join(scope.remaining_s())


if hasattr(os, "register_at_fork"):  # the parent's threads do not run in a forked child, which must not wait for them
    os.register_at_fork(after_in_child=_detached.clear)
