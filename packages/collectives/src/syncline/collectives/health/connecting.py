"""Connecting: what a rank waits in until its group is there, looked at as a collective is."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from ..engine.cancel_scope import CancelScope
from ..errors import TransportError
from .liveness import Liveness
from .monitor import call_now_and_then, watch

logger = logging.getLogger("syncline.collectives")

_LOOKS_IN_LIMIT = 10


def speakers(size: int) -> list[int]:
    """The ranks that say what goes wrong at the start, for all: the first, the middle and the last one. A pure function.

    Three, because one of them may be the rank that does not come; and not all, because a job of 64 ranks must not say 64 times
    the same.
    """
    return sorted({0, size // 2, size - 1})


class Connecting:
    """A context in which this thread connects a group. Libraries may wait there for ranks that never come.

    1. The thread checks `scope`, wherever it waits by looking.
    2. If it sits in a library, the monitor ends the process a little after the limit, and says in which step it sits.
    3. After `warning_s` seconds in one step the monitor says so, on the ranks in `speakers`.

    Args:
        timeout_s: how long it may take to connect, in seconds.
        warning_s: see 3; 0: never.

    Attributes:
        scope: of the whole.
        liveness: of the ranks, once they are known.
        who: this rank, in words.
        is_over: whether the context was left.
    """

    may_block = False

    def __init__(self, timeout_s: float, warning_s: float) -> None:
        self.scope = CancelScope(timeout_s, self.reason_to_give_up)
        self.liveness: Liveness | None = None
        self.period_s = warning_s / _LOOKS_IN_LIMIT
        self._warning_s = warning_s
        self.is_over = False
        self.who, self._speaks = "this process", True
        self._step, self._missing = "what comes first", ""
        self._since_s, self._has_warned = time.monotonic(), True

    def set_place(self, rank: int, size: int | None) -> None:
        """Which rank this is, and of how many, as far as that is known."""
        self.who = f"rank {rank}" if size is None else f"rank {rank} of {size}"
        self._speaks = size is None or rank in speakers(size)

    @contextmanager
    def step(self, words: str) -> Iterator[None]:
        """What this thread does now: where it is, a colon, and what is wrong if it does not get on."""
        self._step, self._since_s, self._has_warned = words, time.monotonic(), False
        self._missing = ""
        yield
        self._step, self._missing, self._has_warned = "what comes next", "", True

    def say_who_is_missing(self, words: str, *, speaks: bool) -> None:
        """Add it to what is said of the present step; whether this rank is the one that warns of it."""
        self._missing, self._speaks = words, speaks

    def __enter__(self) -> Connecting:
        watch(self)
        if self._warning_s > 0:
            call_now_and_then(self)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.is_over = True

    # ---- for the monitor ----

    @property
    def running(self) -> Connecting | None:
        """This, until it is over."""
        return None if self.is_over else self

    def reason_to_give_up(self) -> TransportError | None:
        """That a rank which has come is lost, if one is."""
        return None if self.liveness is None else self.liveness.reason_to_give_up()

    def interrupt(self) -> None:
        """No library can be told to stop there."""

    def missing_in_words(self) -> str:
        """What this rank waits in, and for whom."""
        lost = self.reason_to_give_up()
        if lost is not None:
            return f"{self.who} was not connected: {lost}. It was in {self._step}"
        return f"{self.who} was not connected within {self.scope.timeout_s:g} s (timeout); it is in {self._in_words()}"

    def report(self, reason: str) -> None:
        """There are no calls yet to tell of."""

    @property
    def is_idle(self) -> bool:
        """Whether it is over, or this rank has warned of the present step, or is none of those that speak."""
        return self.is_over or self._has_warned or not self._speaks

    def look(self, now_s: float) -> None:
        """Look once."""
        if self.is_idle or now_s - self._since_s < self._warning_s:
            return
        self._has_warned = True
        logger.warning("%s waits for %g s and more in %s", self.who, self._warning_s, self._in_words())

    def _in_words(self) -> str:
        return f"{self._step}{self._missing and f' ({self._missing})'}"
