"""Lets all ranks exchange the outcomes of tests, over an MPI communicator that no other code uses."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..engine.cancel_scope import CancelScope

if TYPE_CHECKING:
    from mpi4py import MPI


# Output that mpiexec has not read from its ranks when the job is aborted is lost (MPICH 5.0).
_FORWARDING_S = 0.3


class Agreement:
    """Exchanges small objects between all ranks of the MPI job.

    It uses mpi4py directly. It does not use our collectives, because the tests check our collectives.
    """

    def __init__(self) -> None:
        from mpi4py import MPI

        self._communicator = MPI.COMM_WORLD.Dup()
        self.rank = self._communicator.Get_rank()
        self.size = self._communicator.Get_size()

    def exchange(self, value: Any, scope: CancelScope) -> list[Any]:
        """Return the values of all ranks, in the order of the ranks.

        Raises:
            TimeoutError: not all ranks called this in time. The exchange cannot be cancelled, so the caller must end the job.
        """
        payload = pickle.dumps(value)
        lengths = bytearray(8 * self.size)
        self._wait(lambda: self._communicator.Iallgather(len(payload).to_bytes(8, "little"), lengths), scope)
        counts = [int.from_bytes(lengths[8 * rank : 8 * rank + 8], "little") for rank in range(self.size)]
        starts = [sum(counts[:rank]) for rank in range(self.size)]
        payloads = bytearray(sum(counts))
        self._wait(lambda: self._communicator.Iallgatherv(payload, _gathered(payloads, counts, starts)), scope)
        return [pickle.loads(payloads[start : start + count]) for start, count in zip(starts, counts, strict=True)]

    def end_job(self) -> None:
        """End all ranks. First wait, so that mpiexec can read what this rank printed."""
        from mpi4py import MPI

        time.sleep(_FORWARDING_S)
        MPI.COMM_WORLD.Abort(1)

    @staticmethod
    def _wait(start: Callable[[], MPI.Request], scope: CancelScope) -> None:
        request = start()
        pause_s = 1e-5
        while not request.Test():
            if scope.is_over():
                raise TimeoutError
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.001)


def _gathered(payloads: bytearray, counts: list[int], starts: list[int]) -> Any:
    from mpi4py import MPI

    return payloads, (counts, starts), MPI.BYTE
