"""A point in time after which waiting is an error."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from time import monotonic

from ..errors import InvalidArgumentError, TransportError

DEFAULT_TIMEOUT_S = 1800.0
_PATIENCE_S = 0.05
_LOOK_S = 0.01


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


class Deadline:
    """`timeout_s` seconds from the moment of construction, on the monotonic clock; or the moment of `cancel`.

    Args:
        timeout_s: seconds.
        interrupt: why waiting is in vain, or None. `expired` asks now and then, once it has been asked for `_PATIENCE_S`.

    Attributes:
        was_cancelled: `cancel` was called.
        reason: what whoever waits shall raise; None: that the time is up, or that the group was aborted.
        was_noticed: whoever waits has seen that the time is up.
    """

    # One deadline is made for each collective, and most end before anybody asks: the rest is the class's until it changes.
    __slots__ = ("__dict__", "_end", "_interrupt", "timeout_s")
    was_cancelled = False
    was_noticed = False
    reason: TransportError | None = None
    _next_look: float | None = None

    def __init__(self, timeout_s: float, interrupt: Callable[[], TransportError | None] | None = None) -> None:
        self.timeout_s = timeout_s
        self._end = monotonic() + timeout_s
        self._interrupt = interrupt

    def cancel(self, reason: TransportError | None = None) -> None:
        """Let the time be up now. May be called from another thread than the one that waits."""
        self.reason = self.reason or reason
        self.was_cancelled = True
        self._end = -math.inf

    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._end - monotonic())

    def expired(self) -> bool:
        """Whether the time is up, or waiting is in vain. Whoever waits asks, nobody else."""
        now = monotonic()
        if self._next_look is None:
            self._next_look = now + _PATIENCE_S
        if self._interrupt is not None and now >= self._next_look:
            self._next_look = now + _LOOK_S
            reason = self._interrupt()
            if reason is not None:
                self.cancel(reason)
        if now >= self._end:
            self.was_noticed = True
        return self.was_noticed
