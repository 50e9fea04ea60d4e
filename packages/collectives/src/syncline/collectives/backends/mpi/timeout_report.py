"""After a time-out: which ranks wait as well, for what, and which are silent."""

from __future__ import annotations

import time
from contextlib import suppress

from mpi4py import MPI

from ...contract.statements import Statements, ranks_in_words
from .library import Tag
from .neighbours import connect_neighbours
from .waiting import yield_cpu

_LISTEN_S = 1.5
"""Together with what MPI takes for it less than the watchdog leaves a call whose time is up."""
_TELL_EVERY_S = 0.1
_LONGEST_BYTES = 4096


class TimeoutReport:
    """Lets the ranks that ran out of time tell one another where they stand. Making it is a collective.

    Ranks that wait for the same missing rank time out at about the same time, so the rank that stays silent is the one to look
    for. Each tells its neighbours (see Note [Neighbours] in `neighbours`) what it waits for, and what it has heard of others,
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
            words.append(f"{ranks_in_words(silent)} said nothing (dead, gone, or still computing)")
        return "; ".join(words) or "no other rank takes part"
