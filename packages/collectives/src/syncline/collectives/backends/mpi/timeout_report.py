"""After a time-out: which ranks wait as well, for what, and which are silent."""

from __future__ import annotations

import time

from mpi4py import MPI

from . import library
from .library import Tag

_GRACE_S = 2.0
_LONGEST_BYTES = 4096


class TimeoutReport:
    """Lets the ranks that ran out of time tell one another where they stand.

    Every rank that times out sends the others one line and listens for theirs for two seconds more. Ranks that wait for the
    same missing rank time out at about the same time, so the rank that stays silent is the one to look for.

    Args:
        communicator: a private one, on which nothing else has the tag `STATEMENT`.
    """

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator
        self._sent: list[MPI.Request] = []

    def collect(self, signature: str) -> str:
        """Tell the others what this rank waits for, and put what they say into words."""
        rank, size = self._communicator.Get_rank(), self._communicator.Get_size()
        others = [other for other in range(size) if other != rank]
        line = signature.encode()[:_LONGEST_BYTES]
        self._sent += [self._communicator.Isend([line, MPI.BYTE], other, Tag.STATEMENT) for other in others]
        statements = self._listen(len(others))
        silent = [other for other in others if other not in statements]
        words = [f"rank {other} waits in {said}" for other, said in sorted(statements.items())]
        if silent:
            words.append(f"rank(s) {', '.join(map(str, silent))} said nothing (dead, gone, or still computing)")
        return "; ".join(words) or "no other rank takes part"

    def _listen(self, expected: int) -> dict[int, str]:
        heard: dict[int, str] = {}
        end = time.monotonic() + _GRACE_S
        status = MPI.Status()
        while len(heard) < expected and time.monotonic() < end:
            if self._communicator.Iprobe(MPI.ANY_SOURCE, Tag.STATEMENT, status):
                line = bytearray(status.Get_count(MPI.BYTE))
                self._communicator.Recv([line, MPI.BYTE], status.Get_source(), Tag.STATEMENT)
                heard[status.Get_source()] = line.decode(errors="replace")
            else:
                library.yield_cpu()
        return heard
