"""StallWatch: who waits for whom, said long before the time is over."""

from __future__ import annotations

import atexit
import json
import logging
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..contract.statements import ranks_in_words

if TYPE_CHECKING:
    from .flight_recorder import FlightRecorder  # it brings torch, which `syncline run` must not load

logger = logging.getLogger("syncline.collectives")

DEFAULT_STALL_WARNING_S = 30.0
# The ranks notice a stall, and rank 0 says so as many looks later as lines take to it: with a store within the limit and two
# tenths of it; where ranks pass on lines of others, within log2 N tenths more.
_LOOKS_IN_LIMIT = 10
_STOP_S = 1.0
_LONGEST = 1000


class StatusPost(ABC):
    """Where the ranks of a group leave a line each for rank 0. One thread calls it, while others communicate.

    It waits for no rank, but perhaps for a library's lock, or for a store's answer. So the watchdog must not call it.

    Attributes:
        hops: after so many looks of all ranks rank 0 has a line.
    """

    hops = 1

    @abstractmethod
    def post(self, line: str) -> None:
        """Leave this rank's line, in place of the one before."""

    @abstractmethod
    def posted(self) -> Mapping[int, str]:
        """On rank 0: the latest line of each rank that has left one since this was called last; perhaps older ones, too."""

    def pass_on(self) -> None:  # noqa: B027 - most have nothing to do
        """On another rank: bring lines of others that are with this one nearer to rank 0."""


@dataclass(frozen=True)
class Waiting:
    """What a rank waits in.

    Attributes:
        position: of the call in the group's total order.
        call: in words.
    """

    position: int
    call: str


class StallWatch:
    """Looks at one group now and then. Rank 0 logs which ranks wait in a call that has run for long, and which are not in it.

    Args:
        recorder: of the group.
        status_post: of the group.
        limit_s: how long a call may run, in seconds.
    """

    def __init__(self, recorder: FlightRecorder, status_post: StatusPost, limit_s: float) -> None:
        self.limit_s = limit_s
        self._recorder = recorder
        self._post = status_post
        self._lock = threading.Lock()
        self._is_over = False
        self._position: int | None = None  # of the call that runs
        self._since = 0.0
        self._said: Waiting | None = None
        self._heard: dict[int, Waiting | None] = {}
        self._noticed: int | None = None
        self._log_at_s: float | None = None

    def stop(self) -> None:
        """There will be no other look."""
        self._is_over = True
        if self._lock.acquire(timeout=_STOP_S):  # the one that is under way
            self._lock.release()

    def look(self, now_s: float) -> None:
        """Look once.

        Args:
            now_s: on the monotonic clock.
        """
        with self._lock:
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
        record = self._recorder.running()
        position = None if record is None else record.position
        if position != self._position:
            self._position, self._since = position, now_s
        if record is None or position is None or now_s - self._since < self.limit_s:
            return None
        return Waiting(position, str(record)[:_LONGEST])

    def _say(self, mine: Waiting | None) -> None:
        if mine != self._said:
            self._said = mine
            self._post.post("" if mine is None else json.dumps([mine.position, mine.call]))

    def _log(self, waiting: Mapping[int, Waiting], now_s: float) -> None:
        """Once, when the others have had the looks that it takes to say where they are."""
        first = min((one.position for one in waiting.values()), default=None)
        if first != self._noticed:
            self._noticed, self._log_at_s = first, now_s + self._post.hops * self.limit_s / _LOOKS_IN_LIMIT
        elif first is not None and self._log_at_s is not None and now_s >= self._log_at_s:
            self._log_at_s = None
            recorder = self._recorder
            logger.warning("%s", stall_in_words(recorder.group_name, recorder.ranks, waiting, self.limit_s))


def _parsed(line: str) -> Waiting | None:
    return Waiting(*json.loads(line)) if line else None


def stall_in_words(group_name: str, ranks: tuple[int, ...], waiting: Mapping[int, Waiting], limit_s: float) -> str:
    """Who waits for whom, and in what. A pure function.

    Args:
        group_name: how messages call the group.
        ranks: for each rank of the group its rank in the job.
        waiting: for each rank of the group that waits, in what.
        limit_s: for how long, at least.
    """
    calls: dict[Waiting, list[int]] = {}
    for rank, one in sorted(waiting.items()):
        calls.setdefault(one, []).append(ranks[rank])
    parts = [f"{ranks_in_words(found)} in {one.call}" for one, found in calls.items()]
    missing = [ranks[rank] for rank in range(len(ranks)) if rank not in waiting]
    rest = f"; not in a call: {ranks_in_words(missing)} (still computing, stopped, or gone)" if missing else ""
    return f"group '{group_name}': waiting for {limit_s:g} s and more: {', '.join(parts)}{rest}"


class Looked(Protocol):
    """What a thread of the process looks at.

    Attributes:
        limit_s: it looks at least ten times in so many seconds.
    """

    limit_s: float

    def look(self, now_s: float) -> None:
        """Look once. May wait for a library's lock, but for no rank. An exception ends the looks."""


class _Watcher:
    """The thread that looks at all groups of this process.

    It is not the watchdog's: to leave a line it calls a library, behind whose lock it may wait for as long as a call that hangs
    there. The watchdog has to end just such a call.
    """

    def __init__(self) -> None:
        self._watches: weakref.WeakSet[Looked] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def add(self, watch: Looked) -> None:
        with self._lock:
            self._watches.add(watch)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="syncline-stalls", daemon=True)
                self._thread.start()

    def _all(self) -> list[Looked]:
        with self._lock:  # another thread may just add one
            return list(self._watches)

    def _run(self) -> None:
        while not self._stopping.wait(min((watch.limit_s for watch in self._all()), default=1.0) / _LOOKS_IN_LIMIT):
            for watch in self._all():
                try:
                    watch.look(time.monotonic())
                except Exception as error:  # noqa: BLE001 - a warning shall not become a failure
                    logger.debug("no more looks at %s: %s: %s", type(watch).__name__, type(error).__name__, error)
                    self._watches.discard(watch)

    def stop(self) -> None:
        """A thread that is inside torch when the interpreter is taken down crashes the process."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(_STOP_S)


_watcher = _Watcher()
atexit.register(lambda: _watcher.stop())


def _forget() -> None:
    """In a fork, in which the thread of the parent does not run, and its lock may be held for ever."""
    global _watcher
    _watcher = _Watcher()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def look_now_and_then(looked: Looked) -> None:
    """Look from now on, as long as somebody holds it."""
    _watcher.add(looked)
