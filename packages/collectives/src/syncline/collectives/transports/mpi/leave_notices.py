"""Notices of ranks that have left the job. Each rank passes them on to its neighbours."""

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
    """Tells the neighbours that this rank has left, and which other ranks have left. See Note [Neighbours] in `neighbours`.

    A rank receives notices and passes them on when it looks for them. It looks often while it waits for others (in a call or at
    the end of the job), and now and then while it computes (see `ExitBarrier`). Any thread may call the methods.

    Cost: with N ranks, each rank sends 2 log2 N messages for all ranks that leave within `_TELL_EVERY_S` seconds. Ranks that
    have started the same calls share one entry. Construction is a collective.

    Args:
        communicator: a communicator of all processes of the job. No other message on it has the tag `LEAVING`.
        clock: returns seconds.
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
        """Tell the neighbours that this rank leaves. `started` is as in `Leaving`."""
        with self._lock:
            self._note(Leaving(self._communicator.Get_rank(), started))
            self._tell()

    def receive(self) -> list[Leaving]:
        """Receive the notices that have arrived since the last call, return new ones, and pass them on."""
        with self._lock:
            found: list[Leaving] = []
            # The communicator is freed, or will be in a moment.
            if self._is_closed:
                return found
            while (message := self._communicator.improbe(tag=Tag.LEAVING)) is not None:
                # Notices come by several ways, so most arrive more than once.
                told = (Leaving(rank, started) for started, among in message.recv() for rank in ranks_of(among))
                found += [notice for notice in told if self._note(notice)]
            # News of several ranks travel together, so a job that ends sends few messages.
            if self._news and self._passes_on and self._clock() >= self._next_telling:
                self._tell()
            return found

    def stop(self) -> None:
        """Stop passing notices on, because all ranks have left."""
        with self._lock:
            self._passes_on = False

    def close(self) -> None:
        """Stop receiving, because the communicator is about to be freed."""
        with self._lock:
            self._is_closed = True

    def are_sent(self) -> bool:
        """Whether MPI has finished all sends of this rank."""
        with self._lock:
            self._sent = [request for request in self._sent if not request.Test()]
            return not self._sent

    def _note(self, notice: Leaving) -> bool:
        """Remember a notice. Returns whether it is new."""
        is_new = notice.rank not in self._known
        if is_new:
            self._known.add(notice.rank)
            self._news.append(notice)
        return is_new

    def _tell(self) -> None:
        same: dict[tuple[tuple[str, int], ...], list[int]] = {}
        for notice in self._news:
            # Ranks of one job mostly leave after the same calls, so they share one entry.
            same.setdefault(tuple(sorted(notice.started.items())), []).append(notice.rank)
        message = [(dict(started), runs(sorted(ranks))) for started, ranks in same.items()]
        for neighbour in self._neighbours:
            with suppress(MPI.Exception):  # a lost neighbour need not know
                self._sent.append(self._communicator.isend(message, neighbour, Tag.LEAVING))
        self._news.clear()
        self._next_telling = self._clock() + _TELL_EVERY_S
