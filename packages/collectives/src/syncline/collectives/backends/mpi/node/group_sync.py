"""How the ranks of a group synchronise: by a barrier in shared memory if they share a node, else by messages."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn, TypeAlias

import torch
from mpi4py import MPI

from ....contract.collective import Collective
from ....contract.deadline import Deadline
from ....contract.running_call import RunningCall
from ....errors import DisagreementError, TransportError
from ..call_verifier import NO_KEY, CallVerifier
from ..library import Tag, mapped
from .hierarchy import Hierarchy
from .shm_barrier import LEAST_SLOT_BYTES, GaveUpError, ShmBarrier, barrier_bytes
from .windows import NodeMemory

Describe: TypeAlias = Callable[[torch.Tensor | None], Collective]
"""Says which call it is, of a tensor if it has one; asked only if somebody must know."""


class GroupSync:
    """Synchronises all ranks of a group, or those of a node, by the fastest means that there is.

    The shared-memory barrier is made when the ranks synchronise for the first time: a group that never communicates has none.

    Args:
        hierarchy: who is on which node.
        communicator: of the whole group, private.
        verifier: by messages, of the whole group.
        memory: of the group.
        slot_bytes: the size of an eager slot; a multiple of 64, or 0.
        ranks_on_node: how many ranks of the job there are on this node.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        communicator: MPI.Intracomm,
        verifier: CallVerifier,
        memory: NodeMemory,
        slot_bytes: int,
        ranks_on_node: int,
    ) -> None:
        self._slot_bytes = max(slot_bytes, LEAST_SLOT_BYTES)
        self._node = hierarchy.node
        self._has_own_core = ranks_on_node <= len(os.sched_getaffinity(0))
        self._communicator = communicator
        self._verifier = verifier
        self._memory = memory
        self._is_one_node = hierarchy.nodes == 1
        self._barrier: ShmBarrier | None = None
        self._may_have_barrier = hierarchy.shares_memory and hierarchy.is_ordered

    def barrier(self, describe: Describe, tensor: torch.Tensor | None, deadline: Deadline) -> ShmBarrier | None:
        """That of this node; None, on all ranks, if there can be none. All ranks call it at the same point of their order."""
        if self._barrier is None and self._may_have_barrier:
            self._verifier.verify(RunningCall(describe(tensor), deadline))
            segment = self._memory.allocate_segment(barrier_bytes(self._slot_bytes), RunningCall(describe(tensor), deadline))
            if segment is None:
                self._may_have_barrier = False
            else:
                probe, rank = self._communicator.Iprobe, self._communicator.Get_rank()
                self._barrier = ShmBarrier(
                    segment, self._slot_bytes, lambda: probe(rank, Tag.NOTHING), has_own_core=self._has_own_core
                )
        return self._barrier

    def verify(
        self,
        describe: Describe,
        tensor: torch.Tensor | None,
        deadline: Deadline,
        digest: int | None = None,
        key: int = NO_KEY,
    ) -> bool:
        """As `CallVerifier.verify`, of all ranks of the group.

        Args:
            describe: says which call it is.
            tensor: of the call.
            deadline: of the call.
            digest: of the call, if it is known.
            key: compared.
        """
        barrier = self._barrier or self.barrier(describe, tensor, deadline)
        if barrier is None or not self._is_one_node:
            return self._verifier.verify(RunningCall(describe(tensor), deadline), key)
        try:
            is_same, is_common = barrier.arrive_and_wait(deadline, describe(tensor).digest() if digest is None else digest, key)
        except Exception as error:  # noqa: BLE001 - raised again
            self.explain(error, RunningCall(describe(tensor), deadline))
        if not is_same:
            raise self.different_calls(RunningCall(describe(tensor), deadline))
        return is_common

    def wait(self, describe: Describe, tensor: torch.Tensor | None, deadline: Deadline) -> None:
        """Return when the ranks of this node have come."""
        if self._barrier is None:
            self._verifier.run(RunningCall(describe(tensor), deadline), self._node.Ibarrier)
            return
        try:
            self._barrier.arrive_and_wait(deadline)
        except Exception as error:  # noqa: BLE001 - raised again
            self.explain(error, RunningCall(describe(tensor), deadline))

    def different_calls(self, call: RunningCall) -> DisagreementError:
        """As `CallVerifier.different_calls`."""
        return self._verifier.different_calls(call)

    def give_up(self) -> None:
        """Tell the others that this rank will not come any more."""
        if self._barrier is not None:
            self._barrier.give_up()

    def forget(self) -> None:
        """Give the barrier back."""
        self._barrier = None
        self._may_have_barrier = False

    def explain(self, error: Exception, call: RunningCall) -> NoReturn:
        """Raise what the shared-memory barrier raised in a call, in the words of a group."""
        if isinstance(error, GaveUpError):
            raise TransportError(
                f"rank {error.rank} of this node gave up on a collective of this group; its own error says why"
            ) from None
        if isinstance(error, MPI.Exception):
            raise mapped(error) from error
        if isinstance(error, TimeoutError):
            self._verifier.raise_timeout(error, call)
        raise error
