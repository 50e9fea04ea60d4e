"""After a time-out: which ranks wait as well, for what, and which are silent."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence

from mpi4py import MPI

from ...failures.divergence import ranks_in_words, runs
from . import library
from .library import Tag

_LISTEN_S = 1.5
"""Together with what MPI takes for it less than the watchdog leaves a call whose time is up."""
_TELL_EVERY_S = 0.3
_LONGEST_BYTES = 4096
_MOST_LINES = 8
_REPORTERS = 3


class TimeoutReport:
    """Lets the ranks that ran out of time tell one another where they stand.

    Ranks that wait for the same missing rank time out at about the same time, so the rank that stays silent is the one to look
    for.

    Note [Reporters]
    ~~~~~~~~~~~~~~~~
    If each rank told each other, N ranks would send N^2 lines, just when something is wrong. So the first three ranks are
    reporters::

        every rank       says what it waits for: to the reporters; a reporter to all
        a reporter       collects, and every `_TELL_EVERY_S` seconds tells those that are none what is new,
                         ranks that wait for the same together
        all              listen for `_LISTEN_S` seconds, or until all have been heard

    A reporter may be the one that is silent: any other serves. Lost with all three reporters is only what the others would have
    learnt of one another.

    Cost: at most three lines from each rank; from a reporter two for each rank, and one more for each time that it hears of
    others.

    Args:
        communicator: a private one, on which nothing else has the tags `STATEMENT` and `STATEMENTS`.
        reporters: how many.
    """

    def __init__(self, communicator: MPI.Intracomm, reporters: int = _REPORTERS) -> None:
        self._communicator = communicator
        self._rank = communicator.Get_rank()
        self._size = communicator.Get_size()
        self._reporters = range(min(reporters, self._size))
        self._sent: list[tuple[MPI.Request, bytes]] = []

    def collect(self, signature: str) -> str:
        """Tell the others what this rank waits for, and put what they say into words."""
        line = signature.encode()[:_LONGEST_BYTES].decode(errors="replace")
        self._send(line, Tag.STATEMENT, range(self._size) if self._rank in self._reporters else self._reporters)
        return self._in_words(self._exchange(_Statements(line, self._rank)))

    def _exchange(self, statements: _Statements) -> _Statements:
        """Add what the others say. A reporter passes on what it knows."""
        now = time.monotonic()
        end, next_telling, told = now + _LISTEN_S, now + _TELL_EVERY_S, 1
        while len(statements.heard) < self._size and now < end:
            if not self._receive(statements):
                library.yield_cpu()
            now = time.monotonic()
            if now > next_telling and len(statements.heard) > told:
                self._report(statements)
                next_telling, told = now + _TELL_EVERY_S, len(statements.heard)
        if len(statements.heard) > told:
            self._report(statements)
        return statements

    def _report(self, statements: _Statements) -> None:
        if self._rank in self._reporters:
            self._send(statements.packed(), Tag.STATEMENTS, range(len(self._reporters), self._size))

    def _receive(self, statements: _Statements) -> bool:
        """Add one message, if there is any."""
        status = MPI.Status()
        for tag in (Tag.STATEMENT, Tag.STATEMENTS):
            if self._communicator.Iprobe(MPI.ANY_SOURCE, tag, status):
                message = bytearray(status.Get_count(MPI.BYTE))
                self._communicator.Recv([message, MPI.BYTE], status.Get_source(), tag)
                text = message.decode(errors="replace")
                if tag is Tag.STATEMENT:
                    statements.add(text, [status.Get_source()])
                else:
                    statements.add_packed(text)
                return True
        return False

    def _send(self, text: str, tag: Tag, ranks: Sequence[int]) -> None:
        message = text.encode()
        others = [rank for rank in ranks if rank != self._rank]
        self._sent += [(self._communicator.Isend([message, MPI.BYTE], rank, tag), message) for rank in others]

    def _in_words(self, statements: _Statements) -> str:
        others = {line: sorted(set(ranks) - {self._rank}) for line, ranks in statements.ranks.items()}
        words = [
            f"{ranks_in_words(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {line}"
            for line, ranks in sorted(others.items(), key=lambda said: said[1])
            if ranks
        ]
        silent = [rank for rank in range(self._size) if rank not in statements.heard]
        if silent:
            words.append(f"{ranks_in_words(silent)} said nothing (dead, gone, or still computing)")
        return "; ".join(words) or "no other rank takes part"


class _Statements:
    """What ranks wait for, and which; the first that is heard of a rank counts.

    Attributes:
        ranks: by line.
        heard: all of them.
    """

    def __init__(self, line: str, rank: int) -> None:
        self.ranks = {line: [rank]}
        self.heard = {rank}

    def add(self, line: str, ranks: Iterable[int]) -> None:
        """These ranks wait for that."""
        new = [rank for rank in ranks if rank not in self.heard]
        self.heard.update(new)
        if new:
            self.ranks.setdefault(line, []).extend(new)

    def packed(self) -> str:
        """The lines of most ranks, with these as runs of neighbours; of all others that they wait, too."""
        lines = sorted(self.ranks, key=lambda line: -len(self.ranks[line]))
        packed = [(line, runs(sorted(self.ranks[line]))) for line in lines[:_MOST_LINES]]
        rest = sorted(rank for line in lines[_MOST_LINES:] for rank in self.ranks[line])
        return json.dumps([*packed, ("another call", runs(rest))])

    def add_packed(self, text: str) -> None:
        """Add what another one's `packed` says."""
        for line, told in json.loads(text):
            self.add(line, (rank for first, last in told for rank in range(first, last + 1)))
