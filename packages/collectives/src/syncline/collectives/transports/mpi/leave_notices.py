"""The notices of ranks that have left the job, passed on from neighbour to neighbour."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from mpi4py import MPI

from ...health.leaving import Leaving
from ...health.statements import ranks_of, runs
from .library import Tag
from .neighbours import connect_neighbours

_TELL_EVERY_S = 0.2


class LeaveNotices:
    """Tells the neighbours (see Note [Neighbours] in `neighbours`) that this rank has left, and which others have.

    A rank passes on what it hears when it looks for notices: often while it waits for others, in a call or at the end of the
    job, and now and then while it computes (see `ExitBarrier`). Any thread may call.

    Cost: for N ranks 2 log2 N messages from each rank for all that leave within `_TELL_EVERY_S` seconds. Those that have
    started the same are told together.

    Args:
        communicator: of all processes of the job; on it nothing else has the tag `LEAVING`. Making this is a collective.
        clock: seconds.
    """

    def __init__(self, communicator: MPI.Intracomm, clock: Callable[[], float] = time.monotonic) -> None:
        self._communicator = communicator
        self._clock = clock
        self._neighbours = connect_neighbours(communicator)
        self._lock = threading.Lock()
        self._known: set[int] = set()
        self._news: list[Leaving] = []
        self._next_telling = 0.0
        self._passes_on = True
        self._is_closed = False
        self._sent: list[MPI.Request] = []

    def leave(self, started: Mapping[str, int]) -> None:
        """This rank leaves; `started` as in `Leaving`."""
        with self._lock:
            self._note(Leaving(self._communicator.Get_rank(), started))
            self._tell()

    def receive(self) -> list[Leaving]:
        """Who has left since the last call, as far as this rank hears; pass it on."""
        with self._lock:
            found: list[Leaving] = []
            if self._is_closed:
                return found
            while (message := self._communicator.improbe(tag=Tag.LEAVING)) is not None:
                told = (Leaving(rank, started) for started, among in message.recv() for rank in ranks_of(among))
                found += [notice for notice in told if self._note(notice)]
            if self._news and self._passes_on and self._clock() >= self._next_telling:
                self._tell()
            return found

    def stop(self) -> None:
        """All ranks have left: nothing is passed on from now on."""
        with self._lock:
            self._passes_on = False

    def close(self) -> None:
        """The communicator is about to be freed: nothing is received from now on."""
        with self._lock:
            self._is_closed = True

    def are_sent(self) -> bool:
        """Whether MPI has taken all that this rank has said."""
        with self._lock:
            self._sent = [request for request in self._sent if not request.Test()]
            return not self._sent

    def _note(self, notice: Leaving) -> bool:
        """Whether it is new."""
        is_new = notice.rank not in self._known
        if is_new:
            self._known.add(notice.rank)
            self._news.append(notice)
        return is_new

    def _tell(self) -> None:
        same: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for notice in self._news:
            same.setdefault(tuple(sorted(notice.started.items())), []).append(notice.rank)
        message = [(dict(started), runs(sorted(ranks))) for started, ranks in same.items()]
        for neighbour in self._neighbours:
            with suppress(MPI.Exception):  # one that is lost need not know
                self._sent.append(self._communicator.isend(message, neighbour, Tag.LEAVING))
        self._news.clear()
        self._next_telling = self._clock() + _TELL_EVERY_S
