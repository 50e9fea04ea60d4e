"""How the ranks of a communicator meet for the first time, without waiting for ever for one that does not come.

Note [The first meeting]
~~~~~~~~~~~~~~~~~~~~~~~~
The communicator is the user's: MPI_COMM_WORLD, or the one that `init_process_group` was given. Other messages of the user's may
be under way on it, and a receive from any rank with any tag would take a message of ours. So nothing is sent there but
collectives, which no receive sees; and all of them are non-blocking, for a rank may never come::

    1. each rank sends one byte to the listeners of its block of 64 ranks (Igatherv): what has come there says who is here
    2. all ranks tell one another the version of Syncline that they run (Iallgather)
    3. each tests its requests until all are complete, or the time is over
    4. all compare the versions; only then does any rank send what another version might not understand

If the time is over in 3, the listeners look which bytes have come, before MPI says that the gather is complete. It never will
be, and nobody reads anything else there. The requests stay with MPI, which has no way to take a collective back. If a rank
calls again, it goes on with the same ones: the ranks that come late find them.

There are blocks, so that no rank needs a connection with all others (over TCP each is a file), and three listeners in each, for
one of them may be the rank that does not come.

This must stay as it is in all versions, for it is how they find out that they differ.
"""

from __future__ import annotations

import time

from mpi4py import MPI

from ...contract.statements import Statements, ranks_in_words
from ...errors import CollectiveTimeout, DisagreementError
from ...failures.connecting import Connecting, speakers
from ...version import __version__

_HELLO_BYTES = 64
_LONGEST_PAUSE_S = 0.01
# The ranks that know who is missing come to their end first, for the first error may end the job.
_LISTENERS_FIRST_S = 2.0
_BLOCK_RANKS = 64


def meet(communicator: MPI.Intracomm, connecting: Connecting, version: str = __version__) -> None:
    """Return when all ranks of the communicator have come, and run this version of Syncline. A collective.

    Raises:
        CollectiveTimeout: not all came; it says which did not, or which ranks know.
        DisagreementError: they run different versions; on all ranks.
    """
    meeting = next((one for one in _unfinished if one.communicator == communicator), None)
    if meeting is None:
        meeting = _Meeting(communicator, version)
        _unfinished.append(meeting)
    with connecting.step("the first meeting of all ranks: not all have called init_process_group"):
        meeting.wait(connecting)
    _unfinished.remove(meeting)
    said = meeting.versions()
    if len(set(said)) > 1:
        raise DisagreementError(
            f"the ranks run different versions of Syncline: {Statements.of(said).in_words()}. Install the same on every node"
        )


def blocks(size: int) -> list[range]:
    """The ranks in blocks, each of which has listeners of its own; see `speakers`. A pure function."""
    return [range(start, min(start + _BLOCK_RANKS, size)) for start in range(0, size, _BLOCK_RANKS)]


class _Meeting:
    """See Note [The first meeting]."""

    def __init__(self, communicator: MPI.Intracomm, version: str) -> None:
        self.communicator = communicator
        self._rank, size = communicator.Get_rank(), communicator.Get_size()
        # MPI writes to and reads from these as long as it has the requests.
        self._mine, self._nothing = b"\1", b""
        self._here = bytearray(_BLOCK_RANKS)
        self._hello = version.encode()[:_HELLO_BYTES].ljust(_HELLO_BYTES, b"\0")
        self._hellos = bytearray(size * _HELLO_BYTES)
        self._requests: list[MPI.Request] = []
        for block in blocks(size):
            if self._rank in block:
                self._block, self._listeners = block, [block[place] for place in speakers(len(block))]
            for place in speakers(len(block)):
                self._requests.append(self._say_here(block, block[place], size))
        self._requests.append(communicator.Iallgather([self._hello, MPI.BYTE], [self._hellos, MPI.BYTE]))

    def _say_here(self, block: range, listener: int, size: int) -> MPI.Request:
        """All ranks take part, as in any collective; those outside the block with nothing."""
        landing = None
        if listener == self._rank:
            counts = [int(rank in block) for rank in range(size)]
            landing = [self._here, (counts, [max(0, rank - block[0]) * count for rank, count in enumerate(counts)]), MPI.BYTE]
        mine = self._mine if self._rank in block else self._nothing
        return self.communicator.Igatherv([mine, MPI.BYTE], landing, listener)

    def wait(self, connecting: Connecting) -> None:
        deadline, pause_s, over_s = connecting.deadline, 1e-5, None
        while not MPI.Request.Testall(self._requests):
            absent = self._absent()
            connecting.say_who_is_missing(self._in_words(absent), speaks=self._is_first_of(absent))
            if deadline.expired():
                over_s = over_s or time.monotonic()
                if absent or time.monotonic() - over_s > _LISTENERS_FIRST_S:
                    raise CollectiveTimeout(self._timed_out(deadline.timeout_s))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def versions(self) -> list[str]:
        whole = bytes(self._hellos)
        pieces = (whole[start : start + _HELLO_BYTES] for start in range(0, len(whole), _HELLO_BYTES))
        return [piece.rstrip(b"\0").decode(errors="replace") for piece in pieces]

    def _absent(self) -> list[int]:
        """Which ranks of the block have not come, as far as this rank listens."""
        if self._rank not in self._listeners:
            return []
        return [rank for rank in self._block if not self._here[rank - self._block[0]] and rank != self._rank]

    def _is_first_of(self, absent: list[int]) -> bool:
        """Whether this rank, of the listeners that are here, is the one to speak."""
        return bool(absent) and self._rank == min(rank for rank in self._listeners if rank not in absent)

    def _in_words(self, absent: list[int]) -> str:
        if absent:
            return f"{ranks_in_words(absent)} did not"
        if self._rank not in self._listeners:
            return f"{ranks_in_words(self._listeners)} say which, if they have come"
        if len(self._block) == self.communicator.Get_size():
            return "all have come, but one runs another version of Syncline"
        return f"of {ranks_in_words(self._block)} all have come; others say which have not"

    def _timed_out(self, timeout_s: float) -> str:
        return (
            f"not all ranks called init_process_group within {timeout_s:g} s (timeout): {self._in_words(self._absent())}\n"
            "- Every rank of the MPI job has to call it. Where only some of the ranks shall train, pass the others by: "
            "init_process_group(communicator=...) takes an mpi4py communicator of those that do.\n"
            "- A rank that is still loading data or compiling comes later: pass a longer timeout.\n"
            "- A rank that has ended, hangs, or runs an older version of Syncline counts as one that did not come"
        )


_unfinished: list[_Meeting] = []
