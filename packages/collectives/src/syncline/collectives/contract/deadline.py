"""A point in time after which waiting is an error."""

from __future__ import annotations

import math
from datetime import timedelta
from time import monotonic

from ..errors import InvalidArgumentError

DEFAULT_TIMEOUT_S = 1800.0


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
    """`timeout_s` seconds from the moment of construction, on the monotonic clock; or the moment of `cancel`."""

    __slots__ = ("_end", "timeout_s", "was_cancelled")

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.was_cancelled = False
        self._end = monotonic() + timeout_s

    def cancel(self) -> None:
        """Let the time be up now. May be called from another thread than the one that waits."""
        self.was_cancelled = True
        self._end = -math.inf

    def remaining_s(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self._end - monotonic())

    def expired(self) -> bool:
        """Whether the time is up."""
        return monotonic() >= self._end
