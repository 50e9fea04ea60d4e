"""Collectives of small tensors. Each rank writes its tensor to its slot in shared memory, and reads the slots of all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mpi4py import MPI

from ....engine.call import Call, Signature
from ....tensors.layout import flat
from ....tensors.reduction import reducer_of
from .choice import Operation, Size
from .memory import Node
from .plan import Algorithm
from .shared_sync import SharedSync, ShmBarrier

# Memory at an address, with a number of bytes. For few bytes, copying by slices takes a third of the time of ctypes' memmove.
_memory_at: Callable[[int, int], Any] = MPI.buffer.fromaddress

#: A function that finishes a call. The function reads the slots of all ranks. If the call is a reduction, it also reduces their
#: contents. It writes the result to one of its two arguments, `part` and `whole` of `Plan.run`.
_Finish = Callable[[torch.Tensor, torch.Tensor], None]


class Eager(Algorithm):
    """Runs collectives of small tensors. The ranks wait for one another only once: at a `ShmBarrier`, which compares calls.

    Every rank reduces all slots in rank order, so all ranks get the same bits. See Note [Arrivals in turn] in `shared_sync`.

    Cost for n bytes and p ranks: each rank reads p n bytes.
    """

    name = "eager"
    compares = False

    def __init__(self, node: Node, signature: Signature, operation: Operation, size: Size) -> None:
        self._node = node
        self._signature = signature
        self._operation = operation
        self._in_slot_bytes = size.in_slot
        self._slot_holds_part = operation is Operation.ALL_GATHER
        self._sync: SharedSync | None = None
        self._by_parity: list[tuple[memoryview | None, _Finish]] = []

    def prepare(self, call: Call) -> bool:
        """At the first call, make the group's barrier in shared memory. Return whether the group has this barrier."""
        if self._sync is None:
            self._sync = self._node.shared_sync(call)
            if self._sync is not None:
                self._by_parity = [self._laid_out(self._sync.barrier, parity) for parity in (0, 1)]
        return self._sync is not None

    def run(self, part: torch.Tensor, whole: torch.Tensor, call: Call) -> None:
        """Write this rank's slot, compare the call, then make the result from the slots of all ranks."""
        sync = self._sync
        assert sync is not None
        # Use the slot of the next arrival, which is in `compare` below.
        slot, finish = self._by_parity[sync.barrier.next_parity]
        # In a broadcast, only the root writes to its slot.
        if slot is not None:
            slot[:] = _memory_at((part if self._slot_holds_part else whole).data_ptr(), self._in_slot_bytes)
        sync.compare(call)  # even if `NodePlan` has compared the call already
        finish(part, whole)

    def _laid_out(self, barrier: ShmBarrier, parity: int) -> tuple[memoryview | None, _Finish]:
        """Return this rank's slot (None if no rank reads it), and a function that makes a call's result from the slots."""
        signature, mine = self._signature, barrier.mine
        slots = [
            memoryview(_memory_at(slot.data_ptr(), slot.nbytes))
            for slot in barrier.slots(parity, self._in_slot_bytes, torch.uint8)
        ]
        if self._operation is Operation.BROADCAST:
            root = signature.root_rank
            return (slots[mine], _nothing) if mine == root else (None, _copy(slots[root]))
        if self._operation is Operation.ALL_GATHER:
            return slots[mine], _gather(slots)
        # In a reduce-scatter, a rank reads only the part of each block that it reduces.
        offset_bytes = mine * signature.nbytes if self._operation is Operation.REDUCE_SCATTER else 0
        terms = barrier.slots(parity, signature.numel, signature.element_dtype, offset_bytes)
        return slots[mine], _reduce(reducer_of(terms, signature.reduction, signature.element_dtype))


def _reduce(reduce: Callable[..., object]) -> _Finish:
    def finish(part: torch.Tensor, whole: torch.Tensor) -> None:  # noqa: ARG001 - the content of `whole` is in a slot
        reduce(out=flat(part))

    return finish


def _nothing(part: torch.Tensor, whole: torch.Tensor) -> None:
    """Do nothing, because the root of a broadcast keeps its tensor."""


def _copy(slot: memoryview) -> _Finish:
    def finish(part: torch.Tensor, whole: torch.Tensor) -> None:  # noqa: ARG001 - in a broadcast, both are one tensor
        _memory_at(part.data_ptr(), slot.nbytes)[:] = slot

    return finish


def _gather(slots: list[memoryview]) -> _Finish:
    def finish(part: torch.Tensor, whole: torch.Tensor) -> None:  # noqa: ARG001 - the content of `part` is in a slot
        address = whole.data_ptr()
        for slot in slots:
            _memory_at(address, slot.nbytes)[:] = slot
            address += slot.nbytes

    return finish
