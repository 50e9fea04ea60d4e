"""The first meeting of the ranks of a communicator. It ends with an error if a rank does not come in time.

Note [The first meeting]
~~~~~~~~~~~~~~~~~~~~~~~~
The communicator is the user's: MPI_COMM_WORLD, or the communicator that `init_process_group` got. The user's own messages may
be in flight on it, and the user's receive from any rank with any tag would match a message of ours. So we use only collectives
on this communicator, because no receive matches a collective. They are non-blocking, because a rank may never come::

    1. each rank sends one byte to the listeners of its block of 64 ranks (Igatherv): bytes that have arrived show who is here
    2. all ranks tell each other their version of Syncline (Iallgather)
    3. each rank tests its requests until all are complete, or the time limit is reached
    4. all ranks compare the versions; messages that another version might not understand are sent only after this

If the time limit is reached in step 3, the listeners look which bytes have arrived, although the gather will never be complete.
No other code reads the memory of these bytes. The requests stay in MPI, because MPI cannot cancel a collective. If a rank calls
`meet` again, it goes on with its earlier requests. So the collectives of ranks that come late still match.

Ranks form blocks, so that no rank needs a connection to all other ranks (over TCP, each connection is an open file). Each block
has three listeners, because one of them may be the rank that does not come.

Never change this protocol, because ranks with different versions use it to find out that their versions differ.
"""

from __future__ import annotations

import time

from mpi4py import MPI

from ...errors import CollectiveTimeout, DisagreementError
from ...health.connecting import Connecting, speakers
from ...health.statements import Statements, ranks_in_words
from ...version import __version__

_HELLO_BYTES = 64
_LONGEST_PAUSE_S = 0.01
# Other ranks raise their error this much later than the listeners. The first error may end the job, so it should name the
# missing ranks.
_LISTENERS_FIRST_S = 2.0
_BLOCK_RANKS = 64


def meet(communicator: MPI.Intracomm, connecting: Connecting, version: str = __version__) -> None:
    """Return when all ranks of the communicator have come and run the same version of Syncline. A collective.

    Raises:
        CollectiveTimeout: some ranks did not come. The message names these ranks, or the ranks that know them (the listeners).
        DisagreementError: the ranks run different versions. All ranks raise it.
    """
    meeting = next((one for one in _unfinished if one.communicator == communicator), None)
    # Only the first call makes a meeting. After a time-out, a second call goes on with the requests of the first call.
    if meeting is None:
        meeting = _Meeting(communicator, version)
        _unfinished.append(meeting)
    with connecting.step("the first meeting of all ranks: not all have called init_process_group"):
        meeting.wait(connecting)
    _unfinished.remove(meeting)
    said = meeting.versions()
    # Each rank has all versions, so all ranks raise the same error.
    if len(set(said)) > 1:
        raise DisagreementError(
            f"the ranks run different versions of Syncline: {Statements.of(said).in_words()}. Install the same on every node"
        )


def blocks(size: int) -> list[range]:
    """Divide the ranks into blocks. Each block has its own listeners; see `speakers`. A pure function."""
    return [range(start, min(start + _BLOCK_RANKS, size)) for start in range(0, size, _BLOCK_RANKS)]


class _Meeting:
    """One meeting of all ranks of a communicator; see Note [The first meeting]."""

    def __init__(self, communicator: MPI.Intracomm, version: str) -> None:
        self.communicator = communicator
        self._rank, size = communicator.Get_rank(), communicator.Get_size()
        # MPI reads and writes these buffers as long as the requests exist, so they live in this object.
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
        """Start the gather that shows one listener which ranks are here. All ranks of the communicator take part.

        Ranks outside the listener's block send no bytes.
        """
        landing = None
        if listener == self._rank:
            counts = [int(rank in block) for rank in range(size)]
            landing = [self._here, (counts, [max(0, rank - block[0]) * count for rank, count in enumerate(counts)]), MPI.BYTE]
        mine = self._mine if self._rank in block else self._nothing
        return self.communicator.Igatherv([mine, MPI.BYTE], landing, listener)

    def wait(self, connecting: Connecting) -> None:
        scope, pause_s, over_s = connecting.scope, 1e-5, None
        while not MPI.Request.Testall(self._requests):
            absent = self._absent()
            connecting.say_who_is_missing(self._in_words(absent), speaks=self._is_first_of(absent))
            try:
                scope.check()
            except TimeoutError:
                over_s = over_s or time.monotonic()
                # A listener that knows who is missing raises at once; all others give it time to speak first.
                if absent or time.monotonic() - over_s > _LISTENERS_FIRST_S:
                    raise CollectiveTimeout(self._timed_out(scope.timeout_s)) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def versions(self) -> list[str]:
        whole = bytes(self._hellos)
        pieces = (whole[start : start + _HELLO_BYTES] for start in range(0, len(whole), _HELLO_BYTES))
        return [piece.rstrip(b"\0").decode(errors="replace") for piece in pieces]

    def _absent(self) -> list[int]:
        """Return the ranks of the block that have not come. If this rank is no listener, the list is empty."""
        # Only listeners have memory in which the bytes of the others arrive.
        if self._rank not in self._listeners:
            return []
        # This rank's own byte may not have arrived, but the rank is certainly here.
        return [rank for rank in self._block if not self._here[rank - self._block[0]] and rank != self._rank]

    def _is_first_of(self, absent: list[int]) -> bool:
        """Whether this rank is the first of the listeners that have come. Only this listener logs."""
        return bool(absent) and self._rank == min(rank for rank in self._listeners if rank not in absent)

    def _in_words(self, absent: list[int]) -> str:
        if absent:
            return f"{ranks_in_words(absent)} did not"
        if self._rank not in self._listeners:
            return f"{ranks_in_words(self._listeners)} say which, if they have come"
        # If the block is the whole job, all ranks have come. Then only another version's protocol can keep the requests open.
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
