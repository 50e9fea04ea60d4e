"""Lines that ranks leave for rank 0, as messages beside their collectives."""

from __future__ import annotations

from collections.abc import Mapping

from mpi4py import MPI
from typing_extensions import override

from ...failures.stall_watch import StatusPost
from .library import Tag, while_mpi_runs

_LONGEST_BYTES = 4096


class MPIStatusPost(StatusPost):
    """Sends lines towards rank 0, from neighbour to neighbour (see Note [Neighbours] in `neighbours`), by up to two ways each.

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
