"""Connect the survivors of an MPI group again. MPI itself finds out which ranks survive (ULFM)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from mpi4py import MPI
from typing_extensions import override

from ...engine.cancel_scope import DetachedCall
from ...engine.transport import Transport
from ...errors import CollectiveTimeout, TransportError
from ...health.leaving import GroupLeavers, Leavers
from ...membership.reconnector import MOST_ATTEMPTS, Generation, Reconnector
from .library import mapped, missing_for_shrink, mpi_errors, revoke, translated

logger = logging.getLogger("syncline.collectives")

Connect = Callable[[MPI.Intracomm, Sequence[int]], Transport]


class MPIReconnector(Reconnector):
    """Connects the survivors of an MPI group again. A member's number is its rank in the group's first communicator.

    Note [Shrinking by ULFM]
    ~~~~~~~~~~~~~~~~~~~~~~~~
    ::

        1. each survivor revokes the communicators of the old group; ranks that still wait on a communicator get an error
        2. MPI_Comm_shrink makes a new communicator of the survivors, in the same order
        3. each survivor connects over the new communicator, as at the start of the job; this may fail if another rank dies
        4. MPI_Comm_agree tells all survivors whether every survivor has connected. If not, the survivors repeat from step 1
           with the communicator of step 2. After `MOST_ATTEMPTS` times with the same members, all survivors give up.

    A separate thread does the steps. If a rank is alive but does not call `shrink`, step 2 does not end, and `shrink` raises
    `CollectiveTimeout`. The next call of `shrink` then waits for the same thread. After any other failure, the next call of
    `shrink` starts with the communicator that step 2 made last. A rank never shrinks a communicator twice.

    Args:
        communicator: a communicator of all ranks that the group has at the start. Only this object may use it.
        connect: makes the transport from a communicator and the ranks of its members in the job. All members call `connect`.
    """

    def __init__(self, communicator: MPI.Intracomm, connect: Connect, leavers: Leavers, name: str) -> None:
        self._job = communicator.Get_group()
        super().__init__(self._generation(0, communicator))
        self._communicator = communicator
        self._connect = connect
        self._leavers = leavers
        self._name = name
        self._transport = connect(communicator, self.generation.members)
        self._number = 0  # counts the communicators that `_meet` has shrunk
        self._meeting: DetachedCall[Generation] | None = None

    @property
    def transport(self) -> Transport:
        """The transport between the current members of the group."""
        return self._transport

    @override
    def missing(self) -> str | None:
        return missing_for_shrink()

    @override
    def close(self) -> None:
        self._job.Free()
        self._communicator.Free()

    @override
    def leavers(self) -> GroupLeavers:
        number = self.generation.number
        name = f"{self._name}/generation{number}" if number else self._name
        return self._leavers.group(name, self.generation.members)

    @override
    def shrink(self, silence_timeout_s: float) -> Transport:
        # After a time-out, the thread of the earlier call still runs. Wait for this thread, because MPI must not shrink twice.
        if self._meeting is None:
            self._meeting = DetachedCall(self._meet, "syncline-mpi-shrink")
        if not self._meeting.done.wait(silence_timeout_s):
            raise CollectiveTimeout(
                f"not all remaining ranks called shrink within {silence_timeout_s:g} s: over MPI, each rank that still runs "
                "must call it. End the ranks that do not, or call shrink again"
            )
        meeting, self._meeting = self._meeting, None
        self.generation = meeting.result()
        return self._transport

    def _meet(self) -> Generation:
        """Do the steps of Note [Shrinking by ULFM]. Runs on a separate thread."""
        attempts, members = 0, self.generation.members
        while True:
            self._transport.interrupt()
            revoke([self._communicator])
            with mpi_errors():
                self._communicator = MPI.Intracomm(self._communicator.Shrink())
            self._number += 1
            generation = self._generation(self._number, self._communicator)
            logger.debug("member %d: generation %d is %s", generation.me, self._number, generation.members)
            # If there are fewer members, another rank has died, and may have caused the failure. So count the attempts anew.
            attempts, members = (attempts + 1 if generation.members == members else 1), generation.members
            transport, error = self._connected(generation)
            if _all_agree(self._communicator, transport is not None):
                assert transport is not None
                self._transport = transport
                return generation
            # This rank connected, but another did not: nobody may use this transport.
            if transport is not None:
                transport.interrupt()
                transport.abort()
            if attempts == MOST_ATTEMPTS:
                why = error or "another rank says so; its own error says why"
                raise TransportError(f"the ranks {list(members)} of the job live, and could not connect: {why}") from error

    def _generation(self, number: int, communicator: MPI.Intracomm) -> Generation:
        members = translated(communicator.Get_group(), self._job)
        return Generation(number, tuple(members), self._job.Get_rank())

    def _connected(self, generation: Generation) -> tuple[Transport | None, Exception | None]:
        """Do step 3 of Note [Shrinking by ULFM]. If it fails, return the error, because this rank must still do step 4."""
        try:
            return self._connect(self._communicator, generation.members), None
        except Exception as error:  # noqa: BLE001 - see above
            logger.debug("generation %d did not connect: %s", generation.number, error)
            # Other ranks may wait in this communicator, and must come to step 4, too.
            revoke([self._communicator])
            return None, error


def _all_agree(communicator: MPI.Intracomm, is_connected: bool) -> bool:
    """Return whether all survivors have connected. All survivors call this function, and get the same answer."""
    try:
        return bool(communicator.Agree(int(is_connected)))
    except MPI.Exception as error:  # if some ranks did not know of a failure, MPI raises on all ranks
        logger.debug("the ranks did not agree: %s", mapped(error))
        return False
