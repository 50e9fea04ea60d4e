"""What a rank tells its neighbours beside the collectives: after a time-out, and when a call takes long.

Note [Neighbours]
~~~~~~~~~~~~~~~~~
If each of N ranks told each other one, N^2 messages would be sent just when something is wrong. And a rank may never come back
from a send to one that it is not connected with: MPICH over TCP connects two processes when one first sends to the other, and
waits inside the send until that one calls MPI, too. The rank that all wait for does not.

So a rank talks to its neighbours: those that are 1, 2, 4, ... ranks before and after it. They are connected when the group is
made, and all other ranks are at most log2 N of them away. What a rank hears from one neighbour it tells the others::

      what this rank says --> its 2 log2 N neighbours --> theirs --> ...      each tells again when it has heard something new

It does not matter which ranks keep silent, as long as those that talk are neighbours of one another. Where they are not, as
ranks 0 and 3 of 8 with all others silent, they do not hear of one another.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

from mpi4py import MPI
from typing_extensions import override

from ...health.agreement import rounds
from ...health.stalls import StatusPost
from ...health.statements import Statements, ranks_in_words
from .library import Tag, while_mpi_runs
from .waiting import yield_cpu

# How long a rank listens after a time-out. Together with what MPI takes for it, less than the monitor leaves such a call.
_LISTEN_S = 1.5
_TELL_EVERY_S = 0.1
_LONGEST_BYTES = 4096


def neighbours(rank: int, size: int) -> list[int]:
    """The neighbours of a rank, ascending: its partners in `rounds`. A pure function; they have that rank as a neighbour."""
    return sorted({peer for partners in rounds(rank, size) for peer in partners})


def connect_neighbours(communicator: MPI.Intracomm) -> list[int]:
    """The neighbours of this rank, connected with it. A collective of all ranks of the communicator.

    Cost: an empty message to each.
    """
    found = neighbours(communicator.Get_rank(), communicator.Get_size())
    nothing = [bytearray(), MPI.BYTE]
    requests = [communicator.Irecv(nothing, neighbour, Tag.GREETING) for neighbour in found]
    requests += [communicator.Isend(nothing, neighbour, Tag.GREETING) for neighbour in found]
    for request in requests:
        request.Wait()
    return found


class TimeoutReport:
    """Lets the ranks that ran out of time tell one another where they stand. Making it is a collective.

    Ranks that wait for the same missing rank time out at about the same time, so the rank that stays silent is the one to look
    for. Each tells its neighbours (see Note [Neighbours]) what it waits for, and what it has heard of others,
    and listens for `_LISTEN_S` seconds, or until all have been heard.

    Cost: for N ranks at most 2 log2 N messages from each, and as many again every `_TELL_EVERY_S` seconds while it hears of
    more ranks: about log2 N times. Ranks that wait for the same are told together.

    Args:
        communicator: a private one, on which nothing else has the tag `STATEMENTS`.
    """

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator
        self._rank = communicator.Get_rank()
        self._size = communicator.Get_size()
        self._neighbours = connect_neighbours(communicator)
        # MPI may read and write what is not complete as long as this lives.
        self._sent: list[tuple[MPI.Request, bytes]] = []
        self._coming: list[tuple[MPI.Request, bytearray]] = []

    def collect(self, signature: str) -> str:
        """Tell the others what this rank waits for, and put what they say into words."""
        said = Statements()
        said.add(signature.encode()[:_LONGEST_BYTES].decode(errors="replace"), [self._rank])
        self._exchange(said)
        return self._in_words(said)

    def _exchange(self, said: Statements) -> None:
        """Add what the others say, and pass it on."""
        now = time.monotonic()
        end, next_telling, told = now + _LISTEN_S, now, 0
        while len(said.heard) < self._size and now < end:
            if now >= next_telling and len(said.heard) > told:
                self._tell(said)
                next_telling, told = now + _TELL_EVERY_S, len(said.heard)
            if not self._receive(said):
                yield_cpu()
            now = time.monotonic()
        if len(said.heard) > told:
            self._tell(said)

    def _tell(self, said: Statements) -> None:
        message = said.packed().encode()
        for neighbour in self._neighbours:
            with suppress(MPI.Exception):  # it may be lost; the others are told all the same
                request = self._communicator.Isend([message, MPI.BYTE], neighbour, Tag.STATEMENTS)
                self._sent.append((request, message))

    def _receive(self, said: Statements) -> bool:
        """Add what has come; whether anything has. The end of a long message may never come: its sender has listened enough."""
        status = MPI.Status()
        while (found := self._communicator.Improbe(MPI.ANY_SOURCE, Tag.STATEMENTS, status)) is not None:
            message = bytearray(status.Get_count(MPI.BYTE))
            self._coming.append((found.Irecv([message, MPI.BYTE]), message))
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
    """Sends lines towards rank 0, from neighbour to neighbour (see Note [Neighbours]), by up to two ways each.

    Rank 13 = 8 + 4 + 1 sends to ranks 12 and 5: its number without the lowest bit, and without the highest. So a line comes to
    rank 0 as well if one rank between stands still. Nothing waits: a line has a few KB at most, which MPI takes at once.

    Args:
        communicator: on which nothing else has the tag `STATUS`, and neighbours are connected.
    """

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator
        self._rank = communicator.Get_rank()
        self._towards = towards_zero(self._rank)
        self.hops = max(1, (communicator.Get_size() - 1).bit_length())
        self._count = 0
        self._known = [0] * communicator.Get_size()  # of each rank how many lines it had posted, at the latest that came
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
        """The latest line of each rank of which one has come that is not known: most come by two ways."""
        found: dict[int, bytes] = {}
        status = MPI.Status()
        while self._communicator.Iprobe(MPI.ANY_SOURCE, Tag.STATUS, status):
            packed = bytearray(status.Get_count(MPI.BYTE))
            self._communicator.Recv([packed, MPI.BYTE], status.Get_source(), Tag.STATUS)
            rank, count = map(int, packed.split(b" ", 2)[:2])
            if count > self._known[rank]:
                self._known[rank] = count
                found[rank] = bytes(packed)
        return found


def towards_zero(rank: int) -> list[int]:
    """The neighbours to which a rank sends what is for rank 0. A pure function."""
    return sorted({rank & (rank - 1), rank ^ (1 << (rank.bit_length() - 1))}) if rank else []
