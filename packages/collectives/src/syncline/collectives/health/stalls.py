"""Stall warnings: long before the time limit, rank 0 logs which ranks wait in a call, and which ranks do not."""

from __future__ import annotations

import json
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .statements import ranks_in_words

if TYPE_CHECKING:
    from .recorder import Recorder  # imports torch, which `syncline run` must not load

logger = logging.getLogger("syncline.collectives")

DEFAULT_STALL_WARNING_S = 30.0
# The limit is `StallWatch.limit_s`. A rank posts a line for rank 0 when the rank has waited for a tenth of the limit, so that
# the warning also names ranks that came late. The rank posts a second line shortly before the limit, so that rank 0 has this
# line when the limit is reached. If rank 0 has waited as long as the other ranks, rank 0 warns within two looks after the
# limit. If rank 0 came later, it warns when it has read the second line.
_LOOKS_IN_LIMIT = 30
_LOOKS_BEFORE_LINE = 3
_STOP_S = 1.0
_LONGEST = 1000


class StatusPost(ABC):
    """Brings one line of text from each rank of a group to rank 0.

    Only one thread at a time calls the methods, while other threads may run collectives. The methods never wait for another
    rank.

    Attributes:
        hops: the largest number of messages, one after the other, that bring a line to rank 0.
    """

    hops = 1

    @abstractmethod
    def post(self, line: str) -> None:
        """Send this rank's line to rank 0. The line replaces this rank's earlier line."""

    @abstractmethod
    def posted(self) -> Mapping[int, str]:
        """On rank 0, return the latest line of each rank from which a line has arrived since the last call.

        Some subclasses also return the latest lines of other ranks, although an earlier call has already returned them.
        """

    def pass_on(self) -> None:  # noqa: B027 - most have nothing to do
        """On ranks other than 0, forward to rank 0 the lines of other ranks that have arrived here."""


@dataclass(frozen=True)
class Waiting:
    """The call in which a rank waits.

    Attributes:
        position: the call's position in the group's order of calls.
        call: the call as text.
        is_long: whether the rank has waited for almost `StallWatch.limit_s` seconds.
    """

    position: int
    call: str
    is_long: bool = True


class StallWatch:
    """Looks at one group now and then. If a call takes longer than `limit_s` seconds, rank 0 logs which ranks wait."""

    may_block = True
    is_idle = False

    def __init__(self, recorder: Recorder, status_post: StatusPost, limit_s: float) -> None:
        self.limit_s = limit_s
        self.period_s = limit_s / _LOOKS_IN_LIMIT
        self._recorder = recorder
        self._post = status_post
        self._lock = threading.Lock()
        self._is_over = False
        self._position: int | None = None  # the position of the running call
        self._since = 0.0
        self._said: Waiting | None = None
        self._heard: dict[int, Waiting | None] = {}
        self._noticed: int | None = None
        self._log_at_s: float | None = None

    @property
    def _gather_s(self) -> float:
        """How many seconds rank 0 waits for the lines of other ranks."""
        return (self._post.hops + 1) * self.period_s

    def stop(self) -> None:
        """Stop looking. If a look is running, wait at most 1 second for its end."""
        self._is_over = True
        if self._lock.acquire(timeout=_STOP_S):  # a running look holds the lock
            self._lock.release()

    def look(self, now_s: float) -> None:
        """Look once at the call that the group runs. `now_s` is the time on the monotonic clock."""
        with self._lock:
            # `stop` was called after this look was scheduled.
            if self._is_over:
                return
            mine = self._stalled(now_s)
            if self._recorder.rank != 0:
                self._say(mine)
                self._post.pass_on()
            else:
                self._heard |= {rank: _parsed(line) for rank, line in self._post.posted().items()}
                self._heard[0] = mine
                self._log({rank: waiting for rank, waiting in self._heard.items() if waiting is not None}, now_s)

    def _stalled(self, now_s: float) -> Waiting | None:
        call = self._recorder.running()
        position = None if call is None else call.position
        # Another call runs than at the last look, so the time counts anew.
        if position != self._position:
            self._position, self._since = position, now_s
        waited_s = now_s - self._since
        if call is None or position is None or waited_s < _LOOKS_BEFORE_LINE * self.period_s:
            return None
        return Waiting(position, str(call.record())[:_LONGEST], waited_s >= self.limit_s - self._gather_s)

    def _say(self, mine: Waiting | None) -> None:
        # Only changes are posted, because each post costs a message.
        if mine != self._said:
            self._said = mine
            self._post.post("" if mine is None else json.dumps([mine.position, mine.call, mine.is_long]))

    def _log(self, waiting: Mapping[int, Waiting], now_s: float) -> None:
        """Warn once for each call in which ranks wait for long. Before a warning, give other ranks' lines time to arrive."""
        first = min((one.position for one in waiting.values() if one.is_long), default=None)
        # The earliest call in which ranks wait for long has changed: set the time of the warning anew.
        if first != self._noticed:
            mine = waiting.get(0)
            # If rank 0 came late to this call, its own waiting time does not show how long the others have waited.
            is_mine = mine is not None and mine.is_long and mine.position == first
            limit_s = self._since + self.limit_s if is_mine else now_s
            self._noticed, self._log_at_s = first, max(limit_s, now_s + self._gather_s)
        elif first is not None and self._log_at_s is not None and now_s >= self._log_at_s:
            self._log_at_s = None
            recorder = self._recorder
            logger.warning("%s", stall_in_words(recorder.group_name, recorder.ranks, waiting, self.limit_s))


def _parsed(line: str) -> Waiting | None:
    return Waiting(*json.loads(line)) if line else None


def stall_in_words(group_name: str, ranks: tuple[int, ...], waiting: Mapping[int, Waiting], limit_s: float) -> str:
    """Return the text of the warning: which ranks wait in which call, and which ranks do not wait. A pure function.

    `waiting` has ranks of the group; the text has ranks of the job.
    """
    calls: dict[tuple[int, str], list[int]] = {}
    for rank, one in sorted(waiting.items()):
        calls.setdefault((one.position, one.call), []).append(ranks[rank])
    parts = [f"{ranks_in_words(found)} in {call}" for (_, call), found in calls.items()]
    missing = [ranks[rank] for rank in range(len(ranks)) if rank not in waiting]
    rest = f"; not in a call: {ranks_in_words(missing)} (still computing, stopped, or gone)" if missing else ""
    return f"group '{group_name}': a call has run for {limit_s:g} s and more: {', '.join(parts)}{rest}"
