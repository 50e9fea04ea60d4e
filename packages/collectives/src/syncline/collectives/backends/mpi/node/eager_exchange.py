"""Collectives of small tensors: each rank writes its tensor to its eager slot, and reads the slots of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from ....contract.deadline import Deadline
from ....contract.layout import mark_written
from ....contract.running_call import RunningCall
from ....host.reduction import always_of
from .algorithm import Algorithm, Operation
from .plan import NodePlan, PlanRequest
from .shm_barrier import ShmBarrier

# Memory at an address, given a number of bytes: to copy by slices takes a third of the time of ctypes' memmove if they are few.
_memory_at: Callable[[int, int], Any] = MPI.buffer.fromaddress

#: Reads the slots of one turn: given this rank's tensor and the whole.
_Read = Callable[[torch.Tensor, torch.Tensor], None]


class EagerExchange(NodePlan):
    """One arrival (see Note [Arrivals in turn]) verifies the call and hands over the data; each rank reads p n bytes.

    That is the fastest where a tensor is so small that arrivals are what counts. Every rank reduces everything, in rank
    order, so all get the same bits.

    Args:
        request: as for `NodePlan`; what a rank shows fits in a slot.
        otherwise: as for `NodePlan`.
    """

    chosen = Algorithm.EAGER

    def __init__(self, request: PlanRequest, otherwise: NodePlan | None) -> None:
        super().__init__(request, otherwise)
        self._barrier: ShmBarrier | None = None
        self._turns: list[tuple[memoryview | None, _Read]] = []
        self._shown_bytes = request.size.shown
        self._shows_part = request.operation is Operation.ALL_GATHER

    def run(self, tensor: torch.Tensor, whole: torch.Tensor, deadline: Deadline, *, is_verified: bool = False) -> None:
        """Write to the slot, verify the call (once more), read the slots."""
        barrier = self._barrier or self._bind(tensor, deadline)
        if barrier is None:
            self._run_otherwise(tensor, whole, deadline, is_verified=is_verified)
            return
        slot, read = self._turns[(barrier.arrivals + 1) & 1]
        if slot is not None:
            slot[:] = _memory_at((tensor if self._shows_part else whole).data_ptr(), self._shown_bytes)
        try:
            is_same, _ = barrier.arrive_and_wait(deadline, self._digest)
        except Exception as error:  # noqa: BLE001 - raised again
            self._sync.explain(error, RunningCall(self._call(tensor), deadline))
        if not is_same:
            raise self._sync.different_calls(RunningCall(self._call(tensor), deadline))
        read(tensor, whole)

    def _bind(self, tensor: torch.Tensor, deadline: Deadline) -> ShmBarrier | None:
        """The barrier, with the slots of both turns laid out for calls of this kind."""
        barrier = self._sync.barrier(self._call, tensor, deadline)
        if barrier is not None:
            self._barrier = barrier
            self._turns = [self._laid_out(barrier, turn) for turn in (0, 1)]
        return barrier

    def _laid_out(self, barrier: ShmBarrier, turn: int) -> tuple[memoryview | None, _Read]:
        """This rank's slot, None if it shows nothing; and how to read the slots."""
        kind, mine = self._kind, barrier.mine
        slots = [
            memoryview(_memory_at(slot.data_ptr(), slot.nbytes)) for slot in barrier.slots(turn, self._shown_bytes, torch.uint8)
        ]
        if self._operation is Operation.BROADCAST:
            return (slots[mine], _nothing) if mine == kind.root else (None, _copy(slots[kind.root or 0]))
        if self._operation is Operation.ALL_GATHER:
            return slots[mine], _gather(slots)
        offset_bytes = mine * kind.numel * kind.dtype.itemsize if self._operation is Operation.REDUCE_SCATTER else 0
        terms = barrier.slots(turn, kind.numel, kind.dtype, offset_bytes)
        assert kind.op is not None
        return slots[mine], _reduce(always_of(terms, kind.op, kind.dtype))


def _reduce(reduce: Callable[..., object]) -> _Read:
    def read(tensor: torch.Tensor, whole: torch.Tensor) -> None:  # noqa: ARG001 - it is in a slot as well
        reduce(out=tensor if tensor.dim() == 1 else tensor.view(-1))

    return read


def _nothing(tensor: torch.Tensor, whole: torch.Tensor) -> None:
    """Nobody overwrites a root's tensor."""


def _copy(slot: memoryview) -> _Read:
    def read(tensor: torch.Tensor, whole: torch.Tensor) -> None:  # noqa: ARG001 - one is the other
        _memory_at(tensor.data_ptr(), slot.nbytes)[:] = slot
        mark_written(tensor)

    return read


def _gather(slots: list[memoryview]) -> _Read:
    def read(tensor: torch.Tensor, whole: torch.Tensor) -> None:  # noqa: ARG001 - it is in a slot as well
        address = whole.data_ptr()
        for slot in slots:
            _memory_at(address, slot.nbytes)[:] = slot
            address += slot.nbytes
        mark_written(whole)

    return read
