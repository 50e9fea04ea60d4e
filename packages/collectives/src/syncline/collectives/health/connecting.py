"""`Connecting` limits the time in which a rank connects its group, and warns if the rank waits long."""

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
    """Return the ranks that log warnings while the ranks connect: the first, the middle and the last rank. A pure function."""
    # One rank is not enough, because this rank may be the missing one. 64 ranks must not print the same message.
    return sorted({0, size // 2, size - 1})


class Connecting:
    """A context manager for connecting a group. In its `with` block, the calling thread may wait for ranks that never come.

    1. After `warning_s` seconds in one step, the monitor logs a warning on the ranks that `speakers` returns. 0: no warning.
    2. At the time limit, a thread that checks `scope` regularly raises an error.
    3. If the thread is stuck in a library, the monitor ends the process, a little after the time limit.

    Attributes:
        scope: has the time limit of all steps together. The scope also ends if a rank is lost.
        liveness: finds out which ranks are lost; None until the ranks are known.
        who: this rank in words, such as "rank 1 of 4".
        is_over: whether the thread has left the `with` block.
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
        """Set this rank, and the number of ranks if it is known."""
        self.who = f"rank {rank}" if size is None else f"rank {rank} of {size}"
        # Before the size is known, nobody knows which ranks warn, so this rank warns.
        self._speaks = size is None or rank in speakers(size)

    @contextmanager
    def step(self, words: str) -> Iterator[None]:
        """A context manager for one step. `words` is the step's name, a colon, and the usual cause of a hang in this step."""
        self._step, self._since_s, self._has_warned = words, time.monotonic(), False
        self._missing = ""
        yield
        # Do not put this into a `finally`: after an error, the messages must still name the step that failed.
        self._step, self._missing, self._has_warned = "what comes next", "", True

    def say_who_is_missing(self, words: str, *, speaks: bool) -> None:
        """Set the text that names the missing ranks of this step. `speaks`: whether this rank logs warnings from now on."""
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
        """This object, or None after the thread has left the `with` block."""
        return None if self.is_over else self

    def reason_to_give_up(self) -> TransportError | None:
        """Return an error if a rank was lost after it had connected. Otherwise return None."""
        return None if self.liveness is None else self.liveness.reason_to_give_up()

    def interrupt(self) -> None:
        """Do nothing, because no library can stop while it connects."""

    def missing_in_words(self) -> str:
        """Return a sentence that names the step in which this rank waits, and the missing or lost ranks."""
        lost = self.reason_to_give_up()
        if lost is not None:
            return f"{self.who} was not connected: {lost}. It was in {self._step}"
        return f"{self.who} was not connected within {self.scope.timeout_s:g} s (timeout); it is in {self._in_words()}"

    def report(self, reason: str) -> None:
        """Do nothing, because there are no calls yet."""

    @property
    def is_idle(self) -> bool:
        """Whether no warning can come from this rank now."""
        return self.is_over or self._has_warned or not self._speaks

    def look(self, now_s: float) -> None:
        """Warn if the current step of connecting takes too long. The monitor calls this method."""
        if self.is_idle or now_s - self._since_s < self._warning_s:
            return
        self._has_warned = True
        logger.warning("%s waits for %g s and more in %s", self.who, self._warning_s, self._in_words())

    def _in_words(self) -> str:
        return f"{self._step}{self._missing and f' ({self._missing})'}"
