"""Waiting for the other ranks: with a deadline, and with a comparison of what each is about to do."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from mpi4py import MPI

from ...contract.collective import Collective, different_calls
from ...contract.deadline import Deadline
from ...errors import DisagreementError
from .inquest import Inquest
from .library import mapped, mpi_errors
from .node.board import NOWHERE
from .objects import all_gather
from .waiting import wait


class Meeting:
    """Runs non-blocking MPI operations to their end, and lets all ranks of a group meet.

    Args:
        communicator: on which nobody else starts collectives.
        inquest: asks the ranks after a time-out.
    """

    def __init__(self, communicator: MPI.Intracomm, inquest: Inquest) -> None:
        self._communicator = communicator
        self._inquest = inquest
        self._numbers = array("q", (0,) * 4)
        self._abandoned: list[object] = []

    def meet(self, call: Collective, deadline: Deadline, key: int = NOWHERE) -> bool:
        """Return when all ranks have come here for the same call; whether all gave the same key, and not `NOWHERE`.

        One reduction compares both: the largest number is also the smallest.

        Raises:
            DisagreementError: the calls differ.
        """
        digest = call.digest()
        numbers = self._numbers
        numbers[0], numbers[1], numbers[2], numbers[3] = digest, -digest, key, -key
        spec = (numbers, MPI.INT64_T)
        self.run(call, lambda: self._communicator.Iallreduce(MPI.IN_PLACE, spec, MPI.MAX), deadline)
        if numbers[0] != -numbers[1]:
            raise self.different_calls(call, deadline)
        return numbers[2] == -numbers[3] != NOWHERE

    def different_calls(self, call: Collective, deadline: Deadline) -> DisagreementError:
        """What each rank called, when all know that it is not the same.

        Raises:
            TimeoutError: a rank does not say it: it has given up before.
        """
        run = lambda start: self.run(call, start, deadline)  # noqa: E731
        return different_calls(all_gather(self._communicator, call.signature(), run))

    def run(self, call: Collective, start: Callable[[], MPI.Request], deadline: Deadline) -> None:
        """Start an operation and wait for it.

        Raises:
            TimeoutError: the deadline passed; it says where the other ranks stand.
            TransportError: MPI failed.
        """
        request = None
        try:
            request = start()
            wait(request, deadline)
        except MPI.Exception as error:
            raise mapped(error) from error
        except BaseException as error:
            # The request stays active, and MPI may still write: `HostGroup` lets the tensors live.
            self._abandoned.append((request, start))
            if not isinstance(error, TimeoutError) or deadline.was_cancelled:
                raise
            with mpi_errors():
                raise TimeoutError(self._inquest.hold(call.signature())) from None
