"""Runs MPI operations with a deadline, and compares what the ranks are about to do."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import TypeVar

from mpi4py import MPI

from ...contract.collective import different_calls
from ...contract.running_call import RunningCall
from ...errors import DisagreementError
from .library import mapped, mpi_errors, wait
from .timeout_report import TimeoutReport
from .waiting import ARRIVAL_NAP_S

NO_KEY = -1  # this rank has no key

_T = TypeVar("_T")

#: Starts an MPI operation with the function given, and runs it to its end; `CallVerifier.run` for one call is one.
Run = Callable[[Callable[[], MPI.Request]], object]


class CallVerifier:
    """Runs non-blocking MPI operations to their end, and verifies that all ranks of a group make the same call.

    Args:
        communicator: on which nobody else starts collectives.
        report: asks the ranks after a time-out.
    """

    def __init__(self, communicator: MPI.Intracomm, report: TimeoutReport) -> None:
        self._communicator = communicator
        self._report = report
        self._numbers = array("q", (0,) * 4)
        self._abandoned: list[object] = []

    def verify(self, call: RunningCall, key: int = NO_KEY) -> bool:
        """Return when all ranks have come here for the same call; whether all gave the same key, and not `NO_KEY`.

        One reduction compares both: the largest number is also the smallest.

        Raises:
            DisagreementError: the calls differ.
        """
        digest = call.collective.digest()
        numbers = self._numbers
        numbers[0], numbers[1], numbers[2], numbers[3] = digest, -digest, key, -key
        spec = (numbers, MPI.INT64_T)
        self.run(call, lambda: self._communicator.Iallreduce(MPI.IN_PLACE, spec, MPI.MAX), naps_at_once=True)
        if numbers[0] != -numbers[1]:
            raise self.different_calls(call)
        return numbers[2] == -numbers[3] != NO_KEY

    def different_calls(self, call: RunningCall) -> DisagreementError:
        """The error that names what each rank called. All ranks call this, when they know that the calls differ.

        Raises:
            TimeoutError: a rank does not answer: it has given up before.
        """
        run = lambda start: self.run(call, start)  # noqa: E731
        return different_calls(all_gather_objects(self._communicator, call.collective.signature(), run))

    def run(
        self,
        call: RunningCall,
        start: Callable[[], MPI.Request],
        *,
        longest_nap_s: float = ARRIVAL_NAP_S,
        naps_at_once: bool = False,
    ) -> None:
        """Start an operation and wait for it, as `wait` does.

        Raises:
            TimeoutError: the deadline passed; it says where the other ranks stand.
            TransportError: MPI failed.
        """
        request = None
        try:
            request = start()
            wait(request, call.deadline, longest_nap_s=longest_nap_s, naps_at_once=naps_at_once)
        except MPI.Exception as error:
            raise mapped(error) from error
        except BaseException as error:
            # The request stays active, and MPI may still write: `HostGroup` lets the tensors live.
            self._abandoned.append((request, start))
            if isinstance(error, TimeoutError):
                self.raise_timeout(error, call)
            raise

    def abandon(self, *objects: object) -> None:
        """Let requests live, and what MPI may still write to."""
        self._abandoned.append(objects)

    def raise_timeout(self, error: TimeoutError, call: RunningCall) -> None:
        """Raise a time-out again with a report of where the other ranks stand; return if the call was cancelled here."""
        if not call.deadline.was_cancelled:
            with mpi_errors():
                raise TimeoutError(self._report.collect(call.collective.signature())) from None


def all_gather_objects(communicator: MPI.Intracomm, mine: _T, run: Run) -> list[_T]:
    """What each rank of a communicator gives, without any of them blocking inside MPI.

    mpi4py's own form blocks. That has no deadline, and with some MPI libraries it stops the other threads of the process, in
    which other groups may be doing the same: on two ranks in different order, and both wait for ever.
    """
    packed = MPI.pickle.dumps(mine)
    sizes = array("q", [0]) * communicator.Get_size()
    size = array("q", [len(packed)])
    run(lambda: communicator.Iallgather([size, MPI.INT64_T], [sizes, MPI.INT64_T]))
    block = bytearray(sum(sizes))
    starts = [0, *accumulate(sizes)]
    run(lambda: communicator.Iallgatherv([packed, MPI.BYTE], [block, (list(sizes), starts[:-1]), MPI.BYTE]))
    return [MPI.pickle.loads(block[start:stop]) for start, stop in pairwise(starts)]
