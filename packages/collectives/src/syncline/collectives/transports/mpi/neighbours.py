"""Messages between neighbours: after a time-out, if a call takes long, and if a rank leaves the job.

Note [Neighbours]
~~~~~~~~~~~~~~~~~
If each of N ranks sent a message to every other rank, there would be N^2 messages. Also, in the first send to a process, MPICH
over TCP waits until the other process calls MPI, too. The other process may never call MPI.

So rank r sends messages only to its neighbours: the ranks r - 1, r - 2, r - 4, ... and r + 1, r + 2, r + 4, ... (modulo N).
Neighbours are connected when the group is made. All other ranks are at most log2 N steps away. A rank passes all news on to its
neighbours::

      message of this rank --> its 2 log2 N neighbours --> their neighbours --> ...      a rank sends again when it hears news
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from mpi4py import MPI
from typing_extensions import override

from ...health.agreement import rounds
from ...health.leaving import Leaving
from ...health.stalls import StatusPost
from ...health.statements import Statements, ranks_in_words, ranks_of, runs
from .library import Tag, while_mpi_runs
from .waiting import yield_cpu

# How long a rank listens after a time-out. The monitor interrupts the thread 10 s after the thread has noticed the time-out
# (half of `NOTICED_LOOKS`). Listening, and the time that MPI itself takes, must fit into these 10 s.
_LISTEN_S = 1.5
_TELL_EVERY_S = 0.1
_TELL_LEAVING_EVERY_S = 0.2
_LONGEST_BYTES = 4096


def neighbours(rank: int, size: int) -> list[int]:
    """Return the neighbours of a rank in ascending order: see Note [Neighbours]. Each rank is a neighbour of its neighbours."""
    return sorted({peer for partners in rounds(rank, size) for peer in partners})


def connect_neighbours(communicator: MPI.Intracomm) -> list[int]:
    """Connect this rank with its neighbours, and return the neighbours. Every rank of the communicator calls this function.

    Cost: each rank sends one empty message to each neighbour.
    """
    found = neighbours(communicator.Get_rank(), communicator.Get_size())
    nothing = [bytearray(), MPI.BYTE]
    requests = [communicator.Irecv(nothing, neighbour, Tag.GREETING) for neighbour in found]
    requests += [communicator.Isend(nothing, neighbour, Tag.GREETING) for neighbour in found]
    for request in requests:
        request.Wait()
    return found


class TimeoutReport:
    """Finds out, after a time-out, in which calls the ranks wait. All ranks call the constructor together.

    A rank sends its own call, and the calls of other ranks that it knows, to its neighbours (see Note [Neighbours]). A rank
    that sends nothing is probably the missing rank.

    Cost: with N ranks, a rank sends at most 2 log2 N messages, about log2 N times, 0.1 seconds apart.

    Only this object may use the tag `STATEMENTS` on the communicator.
    """

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator
        self._rank = communicator.Get_rank()
        self._size = communicator.Get_size()
        self._neighbours = connect_neighbours(communicator)
        # MPI may still read and write the buffers of requests that are not complete. So they live as long as this object.
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._coming: list[tuple[MPI.Request, bytearray]] = []

    def collect(self, signature: str) -> str:
        """Tell the other ranks in which call this rank waits. Return a text that says in which calls the other ranks wait.

        This method listens for 1.5 seconds, or until it knows the calls of all ranks.
        """
        said = Statements()
        said.add(signature.encode()[:_LONGEST_BYTES].decode(errors="replace"), [self._rank])
        self._exchange(said)
        return self._in_words(said)

    def _exchange(self, said: Statements) -> None:
        now = time.monotonic()
        end, next_telling, told = now + _LISTEN_S, now, 0
        while len(said.heard) < self._size and now < end:
            # Tell only news, so that the messages end when all ranks have heard the same.
            if now >= next_telling and len(said.heard) > told:
                self._tell(said)
                next_telling, told = now + _TELL_EVERY_S, len(said.heard)
            # If nothing has arrived, yield the core: the ranks for which this rank waits may need this core.
            if not self._receive(said):
                yield_cpu()
            now = time.monotonic()
        # This rank stops listening, but must still pass on the latest news.
        if len(said.heard) > told:
            self._tell(said)

    def _tell(self, said: Statements) -> None:
        message = said.packed().encode()
        for neighbour in self._neighbours:
            with suppress(MPI.Exception):  # this neighbour may be lost; go on with the others
                request = self._communicator.Isend([message, MPI.BYTE], neighbour, Tag.STATEMENTS)
                self._sent.append((request, message))

    def _receive(self, said: Statements) -> bool:
        """Receive all messages that have arrived, and add their contents to `said`. Return whether a message has arrived."""
        status = MPI.Status()
        # Improbe takes the message out of MPI's queue, so no other thread can receive it meanwhile.
        while (found := self._communicator.Improbe(MPI.ANY_SOURCE, Tag.STATEMENTS, status)) is not None:
            message = bytearray(status.Get_count(MPI.BYTE))
            self._coming.append((found.Irecv([message, MPI.BYTE]), message))
        # Do not wait for the rest of a long message: it may never come.
        here = [entry for entry in self._coming if entry[0].Test()]
        self._coming = [entry for entry in self._coming if entry not in here]
        for _, message in here:
            said.add_packed(message.decode())
        return bool(here)

    def _in_words(self, said: Statements) -> str:
        others = {text: sorted(set(ranks) - {self._rank}) for text, ranks in said.ranks.items()}
        words = [
            f"{ranks_in_words(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {text}"
            for text, ranks in sorted(others.items(), key=lambda entry: entry[1])
            if ranks
        ]
        if said.untold:
            words.append(f"{ranks_in_words(sorted(said.untold))} wait in other calls")
        silent = [rank for rank in range(self._size) if rank not in said.heard]
        if silent:
            words.append(f"{ranks_in_words(silent)} said nothing")
        return "; ".join(words) or "no other rank takes part"


class MPIStatusPost(StatusPost):
    """Sends a rank's status line (the call in which it waits) to rank 0, from neighbour to neighbour, by up to two routes.

    For example, rank 13 = 8 + 4 + 1 sends to rank 12 (13 without its lowest bit) and to rank 5 (13 without its highest bit). So
    a line reaches rank 0 even if one rank on a route is stopped. A line has at most 4 KB, so that no send blocks.

    Only this object may use the tag `STATUS` on the communicator.
    """

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator
        self._rank = communicator.Get_rank()
        self._towards = towards_zero(self._rank)
        self.hops = max(1, (communicator.Get_size() - 1).bit_length())
        self._count = 0
        self._known = [0] * communicator.Get_size()  # for each rank the number of its latest line that has arrived
        self._sent: list[tuple[MPI.Request, bytes]] = []

    @override
    def post(self, line: str) -> None:
        self._count += 1
        with while_mpi_runs() as runs:
            if runs:
                self._send(f"{self._rank} {self._count} {line}".encode()[:_LONGEST_BYTES])

    @override
    def posted(self) -> Mapping[int, str]:
        with while_mpi_runs() as runs:
            news = self._new() if runs else {}
        return {rank: packed.decode(errors="replace").split(" ", 2)[2] for rank, packed in news.items()}

    @override
    def pass_on(self) -> None:
        with while_mpi_runs() as runs:
            for packed in (self._new() if runs else {}).values():
                self._send(packed)

    def _send(self, packed: bytes) -> None:
        self._sent = [(request, sent) for request, sent in self._sent if not request.Test()]
        for rank in self._towards:
            self._sent.append((self._communicator.Isend([packed, MPI.BYTE], rank, Tag.STATUS), packed))

    def _new(self) -> dict[int, bytes]:
        found: dict[int, bytes] = {}
        status = MPI.Status()
        while self._communicator.Iprobe(MPI.ANY_SOURCE, Tag.STATUS, status):
            packed = bytearray(status.Get_count(MPI.BYTE))
            self._communicator.Recv([packed, MPI.BYTE], status.Get_source(), Tag.STATUS)
            rank, count = map(int, packed.split(b" ", 2)[:2])
            # An older line may arrive later, by the slower of the two routes.
            if count > self._known[rank]:
                self._known[rank] = count
                found[rank] = bytes(packed)
        return found


def towards_zero(rank: int) -> list[int]:
    """Return the neighbours (at most two) to which a rank sends status lines on the routes to rank 0: see `MPIStatusPost`."""
    return sorted({rank & (rank - 1), rank ^ (1 << (rank.bit_length() - 1))}) if rank else []


class LeaveNotices:
    """Tells the neighbours that this rank has left, and which other ranks have left. See Note [Neighbours].

    All ranks of the job call the constructor together. Any thread may call the methods. A rank that waits for other ranks must
    call `receive` often. A rank that computes must call `receive` now and then, because `receive` also passes notices on.

    Cost: with N ranks, a rank that has news sends at most 2 log2 N messages, at most every 0.2 seconds.

    Only this object may use the tag `LEAVING` on the communicator.
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
        """Tell the neighbours that this rank leaves.

        `started` maps the key of each group to the number of collectives that this rank has started.
        """
        with self._lock:
            self._note(Leaving(self._communicator.Get_rank(), started))
            self._tell()

    def receive(self) -> list[Leaving]:
        """Receive the notices that have arrived since the last call. Return the new notices, and pass them on."""
        with self._lock:
            found: list[Leaving] = []
            # Do not use the communicator: it is freed, or will be in a moment.
            if self._is_closed:
                return found
            while (message := self._communicator.improbe(tag=Tag.LEAVING)) is not None:
                # Notices come by several routes, so most notices arrive more than once.
                told = (Leaving(rank, started) for started, among in message.recv() for rank in ranks_of(among))
                found += [notice for notice in told if self._note(notice)]
            # News of several ranks travel together, so a job that ends sends few messages.
            if self._news and self._passes_on and self._clock() >= self._next_telling:
                self._tell()
            return found

    def stop(self) -> None:
        """Stop sending notices. Call this method when all ranks have left."""
        with self._lock:
            self._passes_on = False

    def close(self) -> None:
        """Stop receiving notices. Call this method before the communicator is freed."""
        with self._lock:
            self._is_closed = True

    def are_sent(self) -> bool:
        """Return whether MPI has finished all sends of this rank."""
        with self._lock:
            self._sent = [request for request in self._sent if not request.Test()]
            return not self._sent

    def _note(self, notice: Leaving) -> bool:
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
        self._next_telling = self._clock() + _TELL_LEAVING_EVERY_S
