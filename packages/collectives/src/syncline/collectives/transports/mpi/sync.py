"""`Sync` lets the ranks of a group wait for one another and compare a call. `MessageSync` does this by MPI collectives."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import TypeVar

from mpi4py import MPI

from ...engine.call import Call
from ...errors import DisagreementError
from ...health.statements import Statements, different_calls
from .library import mapped, mpi_errors, wait
from .neighbours import TimeoutReport
from .waiting import ARRIVAL_NAP_S

NOWHERE = -1
"""The place key of a tensor that is in no window."""

_T = TypeVar("_T")

#: A function whose argument is another function, which starts an MPI operation. `Run` calls the argument, and waits for the
#: operation.
Run = Callable[[Callable[[], MPI.Request]], object]


class Sync(ABC):
    """Lets the ranks of a group wait for one another. All ranks call the methods in the same order."""

    @abstractmethod
    def compare(self, call: Call, place_key: int = NOWHERE) -> bool:
        """Return when all ranks have come with the same call.

        Args:
            call: this rank's call. The ranks compare `Call.digest`.
            place_key: the key of the place of this rank's tensor in a window, from `Windows.key_of`, or `NOWHERE`.

        Returns:
            Whether all ranks passed the same place key, and the key is not `NOWHERE`.

        Raises:
            DisagreementError: the ranks make different calls. All ranks raise this error.
            TimeoutError: a rank did not come. The text says what this rank knows about the other ranks.
            TransportError: a rank has given up, the library failed, or `call.scope` was cancelled with a `TransportError`.
        """

    @abstractmethod
    def wait(self, call: Call) -> None:
        """Return when all ranks have come, without a comparison of calls.

        Raises:
            TimeoutError: a rank did not come.
            TransportError: a rank has given up, the library failed, or `call.scope` was cancelled with a `TransportError`.
        """


class MessageSync(Sync):
    """Lets the ranks wait for one another by MPI collectives. Only this object may start collectives on `communicator`."""

    def __init__(self, communicator: MPI.Intracomm, report: TimeoutReport) -> None:
        self._communicator = communicator
        self._report = report
        self._numbers = array("q", (0,) * 4)
        self._given_up: list[object] = []

    def compare(self, call: Call, place_key: int = NOWHERE) -> bool:
        """See `Sync.compare`. The ranks compare by one MPI reduction (MAX)."""
        # The reduction contains each number and its negative, so the result has the largest and the smallest number. If both
        # are equal, all numbers are equal.
        digest, numbers = call.digest(), self._numbers
        numbers[0], numbers[1], numbers[2], numbers[3] = digest, -digest, place_key, -place_key
        spec = (numbers, MPI.INT64_T)
        self.run(call, lambda: self._communicator.Iallreduce(MPI.IN_PLACE, spec, MPI.MAX), naps_at_once=True)
        # All ranks see the same two numbers, so all come to `disagreement`.
        if numbers[0] != -numbers[1]:
            raise self.disagreement(call)
        return numbers[2] == -numbers[3] != NOWHERE

    def wait(self, call: Call) -> None:
        """See `Sync.wait`."""
        self.run(call, self._communicator.Ibarrier)

    def disagreement(self, call: Call) -> DisagreementError:
        """Return the error that lists each rank's call. All ranks call this method when their calls differ.

        Raises:
            TimeoutError: a rank does not answer, because its wait for the call ended earlier.
        """
        signatures = all_gather_objects(self._communicator, call.words, lambda start: self.run(call, start))
        return different_calls(Statements.of(signatures))

    def run(
        self,
        call: Call,
        start: Callable[[], MPI.Request],
        *,
        longest_nap_s: float = ARRIVAL_NAP_S,
        naps_at_once: bool = False,
    ) -> None:
        """Start a non-blocking MPI operation, and wait for the operation by `library.wait`.

        Raises:
            TimeoutError: the time limit was reached. The text says in which calls the other ranks wait.
            TransportError: MPI failed, or `call.scope` was cancelled with a `TransportError`.
        """
        request = None
        try:
            request = start()
            wait(request, call.scope, longest_nap_s=longest_nap_s, naps_at_once=naps_at_once)
        except MPI.Exception as error:
            raise mapped(error) from error
        except TimeoutError:
            # The operation goes on inside MPI, which may still use its memory.
            self.keep(request, start)
            raise self.timeout(call) from None
        except BaseException:
            self.keep(request, start)
            raise

    def keep(self, *objects: object) -> None:
        """Keep requests and memory alive, because MPI may still use them after a wait has ended early."""
        self._given_up.append(objects)

    def timeout(self, call: Call) -> TimeoutError:
        """Return a `TimeoutError` that says in which calls the other ranks wait. This method takes one or two seconds."""
        with mpi_errors():
            return TimeoutError(self._report.collect(call.words))


def all_gather_objects(communicator: MPI.Intracomm, mine: _T, run: Run) -> list[_T]:
    """Gather an object from each rank of a communicator, without blocking inside MPI.

    mpi4py's own `allgather` has no time limit.
    """
    packed = MPI.pickle.dumps(mine)
    sizes = array("q", [0]) * communicator.Get_size()
    size = array("q", [len(packed)])
    run(lambda: communicator.Iallgather([size, MPI.INT64_T], [sizes, MPI.INT64_T]))
    block = bytearray(sum(sizes))
    starts = [0, *accumulate(sizes)]
    run(lambda: communicator.Iallgatherv([packed, MPI.BYTE], [block, (list(sizes), starts[:-1]), MPI.BYTE]))
    return [MPI.pickle.loads(block[start:stop]) for start, stop in pairwise(starts)]
