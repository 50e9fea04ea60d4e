"""How the survivors of an MPI group meet again: MPI itself agrees on who is left (ULFM)."""

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
from .fault_tolerance import missing_for_shrink, revoke
from .library import mapped, mpi_errors, translated

logger = logging.getLogger("syncline.collectives")

Connect = Callable[[MPI.Intracomm, Sequence[int]], Transport]


class MPIReconnector(Reconnector):
    """Members are the ranks of the communicator of the first generation, which is all of the job that the group knows.

    Note [Shrinking by ULFM]
    ~~~~~~~~~~~~~~~~~~~~~~~~
    ::

        1. each survivor revokes the communicators of the old group: who still waits in one leaves it with an error
        2. MPI_Comm_shrink: one communicator of those that live, in their order, the same on all
        3. over it each connects as at the start of the job; that may fail on some, if another rank dies meanwhile
        4. MPI_Comm_agree: have all connected? All survivors get the same answer. If not, again from 1, with what 2 gave;
           after `MOST_ATTEMPTS` times with the same members all of them give up

    All four run on one thread of their own (`DetachedCall`), because a call of MPI cannot be ended: 1 comes before 2 on every
    rank, 4 after 3, and whoever called `shrink` waits for that thread, at most for `silence_timeout_s`. If `shrink` is called
    again, it goes on waiting for the same thread, or, if that ended with an error, goes on with the communicator that the last
    step 2 gave: a rank never shrinks a communicator twice.

    MPI counts a rank that is only silent among those that live. So nobody is given up: `shrink` fails, and may be repeated.

    Args:
        communicator: of all members of the first generation; used by nobody else.
        connect: makes the transport over a communicator of members with these ranks in the job. All of them call it.
        leavers: of the job.
        name: of the group.
    """

    def __init__(self, communicator: MPI.Intracomm, connect: Connect, leavers: Leavers, name: str) -> None:
        self._job = communicator.Get_group()
        super().__init__(self._generation(0, communicator))
        self._communicator = communicator
        self._connect = connect
        self._leavers = leavers
        self._name = name
        self._transport = connect(communicator, self.generation.members)
        self._number = 0  # of the latest shrink
        self._meeting: DetachedCall[Generation] | None = None

    @property
    def transport(self) -> Transport:
        """Of the present generation."""
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
        if self._meeting is None:
            self._meeting = DetachedCall(self._meet, "syncline-mpi-shrink")
        if not self._meeting.done.wait(silence_timeout_s):
            raise CollectiveTimeout(
                f"MPI did not bring the ranks that are left together within {silence_timeout_s:g} s: a rank lives that does "
                "not call shrink. MPI gives up no rank that lives; end it, or call shrink again"
            )
        meeting, self._meeting = self._meeting, None
        self.generation = meeting.result()
        return self._transport

    def _meet(self) -> Generation:
        """See Note [Shrinking by ULFM]; on a thread of its own."""
        attempts, members = 0, self.generation.members
        while True:
            self._transport.interrupt()
            revoke([self._communicator])
            with mpi_errors():
                self._communicator = MPI.Intracomm(self._communicator.Shrink())
            self._number += 1
            generation = self._generation(self._number, self._communicator)
            logger.debug("member %d: generation %d is %s", generation.me, self._number, generation.members)
            attempts, members = (attempts + 1 if generation.members == members else 1), generation.members
            transport, error = self._connected(generation)
            if _all_agree(self._communicator, transport is not None):
                assert transport is not None
                self._transport = transport
                return generation
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
        """The transport, or why there is none: whatever that is, the others are told in step 4."""
        try:
            return self._connect(self._communicator, generation.members), None
        except Exception as error:  # noqa: BLE001 - see above
            logger.debug("generation %d did not connect: %s", generation.number, error)
            revoke([self._communicator])
            return None, error


def _all_agree(communicator: MPI.Intracomm, is_connected: bool) -> bool:
    """Whether all are connected, and live: the same answer on all that do."""
    try:
        return bool(communicator.Agree(int(is_connected)))
    except MPI.Exception as error:  # MPI reports a failure that not all knew of, on all
        logger.debug("the ranks did not agree: %s", mapped(error))
        return False
