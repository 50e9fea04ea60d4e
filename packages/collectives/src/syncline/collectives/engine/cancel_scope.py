"""CancelScope: ends the waits of a call; and DetachedCall, for a call of a library that nobody can end. Without torch."""

from __future__ import annotations

import atexit
import math
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from time import monotonic
from typing import Generic, TypeVar

from ..errors import InvalidArgumentError

DEFAULT_TIMEOUT_S = 1800.0
# The thread that waits asks `ask` for the first time after _PATIENCE_S, then every _ASK_S: most calls end before that.
_PATIENCE_S = 0.05
_ASK_S = 0.01

T = TypeVar("T")


def seconds(timeout: timedelta | float | None, default_s: float = DEFAULT_TIMEOUT_S) -> float:
    """Convert a public `timeout` argument (a timedelta as in torch, or seconds) to seconds.

    Raises:
        InvalidArgumentError: it is zero, negative or not a number.
    """
    if timeout is None:
        return default_s
    timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if math.isnan(timeout_s) or timeout_s <= 0:
        raise InvalidArgumentError(f"a timeout must be a positive number of seconds or a timedelta, found {timeout!r}")
    return timeout_s


class CancelScope:
    """Ends a wait: after `timeout_s` seconds, or when somebody cancels it with a reason.

    The thread that waits calls `check` between two looks. Any thread may call `cancel`.

    Args:
        timeout_s: seconds from now.
        ask: returns the reason why the wait is in vain, or None. The waiting thread asks it now and then.

    Attributes:
        ask: as given; whoever keeps the scope when the wait is over sets it to None.
        reason: the exception that `check` raises; None while nobody has cancelled the scope.
        was_noticed: whether `check` has raised. The monitor leaves such a call alone for longer.
    """

    # Every call makes one, and most calls end before anybody checks: the defaults stand in the class.
    __slots__ = ("__dict__", "_end_s", "ask", "timeout_s")
    reason: BaseException | None = None
    was_noticed = False
    _next_ask_s: float | None = None

    def __init__(self, timeout_s: float, ask: Callable[[], BaseException | None] | None = None) -> None:
        self.timeout_s = timeout_s
        self._end_s = monotonic() + timeout_s
        self.ask = ask

    def cancel(self, reason: BaseException) -> None:
        """End the scope now. The first reason counts."""
        if self.reason is None:
            self.reason = reason
        self._end_s = -math.inf

    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._end_s - monotonic())

    def is_over(self) -> bool:
        """Whether the time limit was reached, or somebody has cancelled the scope."""
        return self.reason is not None or monotonic() >= self._end_s

    def check(self, what: str = "the time limit was reached") -> None:
        """Return if the scope goes on.

        Args:
            what: the text of the `TimeoutError`: what is known of the other ranks.

        Raises:
            TimeoutError: the time limit was reached.
            BaseException: the reason with which somebody has cancelled the scope, or that `ask` has given.
        """
        now_s = monotonic()
        if self._next_ask_s is None:
            self._next_ask_s = now_s + _PATIENCE_S
        if self.reason is None and self.ask is not None and now_s >= self._next_ask_s:
            self._next_ask_s = now_s + _ASK_S
            reason = self.ask()
            if reason is not None:
                self.cancel(reason)
        if now_s >= self._end_s or self.reason is not None:
            self.was_noticed = True
            if self.reason is not None:
                raise self.reason
            raise TimeoutError(what)


class DetachedCall(Generic[T]):
    """Calls a function once, on a thread of its own, which is left behind if the function never returns.

    For libraries that block in C code and cannot be asked to stop. `wait` is how a thread blocks but ends when its scope ends.
    At the end of the process such threads get a few seconds to come back: a thread that is inside torch when the interpreter is
    taken down crashes the process.

    Args:
        function: what is called. It is not held after the call.
        name: of the thread, a daemon.
        context: is entered around the call, on its thread.

    Attributes:
        done: is set when the function has returned or raised.
    """

    def __init__(
        self, function: Callable[[], T], name: str, context: Callable[[], AbstractContextManager[object]] = nullcontext
    ) -> None:
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.done = threading.Event()
        thread = threading.Thread(target=self._run, args=(function, context), name=name, daemon=True)
        _detached.add(thread)
        thread.start()

    def wait(self, scope: CancelScope, look_s: float = 0.1, what: str = "the library did not return") -> T:
        """Block until the function has returned, and return its result; end when the scope ends.

        Args:
            scope: is checked every `look_s` seconds.
            look_s: seconds.
            what: as for `CancelScope.check`.

        Raises:
            BaseException: what the function raised, or what `CancelScope.check` raises.
        """
        while not self.done.wait(min(look_s, max(scope.remaining_s(), 1e-3))):
            scope.check(what)
        return self.result()

    def result(self) -> T:
        """What the function returned; raises what it raised. Call it when `done` is set."""
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self, function: Callable[[], T], context: Callable[[], AbstractContextManager[object]]) -> None:
        try:
            with context():
                self._result.append(function())
        except BaseException as error:  # noqa: BLE001 - whoever asks for the result gets it
            self._error = error
        self.done.set()


_EXIT_S = 5.0
_detached: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _finish_detached() -> None:
    """Wait for all of them, together no longer than `_EXIT_S` seconds."""
    scope = CancelScope(_EXIT_S)
    for thread in list(_detached):
        if thread.is_alive():
            thread.join(scope.remaining_s())


if hasattr(os, "register_at_fork"):  # the parent's threads do not run in a forked child
    os.register_at_fork(after_in_child=_detached.clear)
