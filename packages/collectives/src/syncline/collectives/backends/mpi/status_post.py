"""Lines that ranks leave for rank 0, as messages beside their collectives."""

from __future__ import annotations

from collections.abc import Mapping

from mpi4py import MPI
from typing_extensions import override

from ...failures.stall_watch import StatusPost
from .library import Tag

_LONGEST_BYTES = 4096


class MPIStatusPost(StatusPost):
    """Sends and probes on a private communicator, which never wait.

    Args:
        communicator: on which nothing else has the tag `STATUS`.
    """

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self._communicator = communicator
        self._sent: list[tuple[MPI.Request, bytes]] = []

    @override
    def post(self, line: str) -> None:
        self._sent = [(request, sent) for request, sent in self._sent if not request.Test()]
        packed = line.encode()[:_LONGEST_BYTES]
        self._sent.append((self._communicator.Isend([packed, MPI.BYTE], 0, Tag.STATUS), packed))

    @override
    def posted(self) -> Mapping[int, str]:
        lines: dict[int, str] = {}
        status = MPI.Status()
        while self._communicator.Iprobe(MPI.ANY_SOURCE, Tag.STATUS, status):
            packed = bytearray(status.Get_count(MPI.BYTE))
            self._communicator.Recv([packed, MPI.BYTE], status.Get_source(), Tag.STATUS)
            lines[status.Get_source()] = packed.decode(errors="replace")
        return lines
