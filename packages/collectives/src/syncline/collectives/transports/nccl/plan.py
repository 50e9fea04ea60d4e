"""`NcclPlan` runs the calls of one signature over NCCL."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch

from ...engine.call import Call, Signature
from ...engine.transport import Plan
from ...tensors.layout import flat, in_plain_order, pack, unpack
from ...tensors.reduction import reduce_in_rank_order
from .communicator import Communicator, NativeReduction, as_reduced, native_reduction


class NcclPlan(Plan):
    """Runs the calls of one signature. Call `run` while the communicator's stream is current. `run` does not wait for the GPU.

    If NCCL can do a reduction, the plan makes one call of NCCL. For any other reduction, the ranks exchange their terms and
    reduce these terms in rank order, in several calls of NCCL (`in_steps`).

    Args:
        comm: the communicator of all ranks of the group. For a send or receive: the communicator of the two ranks.

    Attributes:
        in_steps: whether the plan calls NCCL several times, one after the other. If so, its calls cannot be part of a batch.
    """

    def __init__(self, comm: Communicator, signature: Signature, device: torch.device, *, reproducible: bool = False) -> None:
        self._comm = comm
        self._signature = signature
        self._device = device
        self._native: NativeReduction | None = None
        if signature.op is not None:
            self._native = native_reduction(signature.op, signature.element_dtype, reproducible=reproducible)
        self.in_steps = signature.op is not None and self._native is None

    @property
    def algorithm(self) -> str:
        """The name "NCCL", or "exchange over NCCL" if the ranks themselves reduce the terms."""
        return "exchange over NCCL" if self.in_steps else "NCCL"

    def pack(self, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a call's tensors as the contiguous `part` and `whole` of `run`; see `tensors.layout.pack`."""
        match self._signature.name:
            case "barrier":
                return torch.zeros(1, dtype=torch.uint8, device=self._device), None
            case "send":
                return in_plain_order(reads[0]), None
            case "recv":
                return in_plain_order(writes[0]), None
            case name:
                return pack(name, reads, writes, self._comm.size)

    def unpack(self, part: torch.Tensor, whole: torch.Tensor | None, writes: Sequence[torch.Tensor]) -> None:
        """Copy the results to the tensors that the call writes."""
        unpack(self._signature.name, part, whole, writes, is_root=self._signature.root == self._comm.rank)

    def run(self, part: torch.Tensor, whole: torch.Tensor | None, call: Call) -> None:
        """See `Plan.run`. When this method returns, the call is on the stream, but the GPU may not have started the call."""
        comm, signature, native = self._comm, self._signature, self._native
        part, block = flat(part), None if whole is None else flat(whole)
        match signature.name:
            case "all_reduce":
                self._all_reduce(part, native)
            case "reduce":
                self._reduce(part, signature.root_rank, native)
            case "broadcast":
                comm.broadcast(part, signature.root_rank)
            case "gather":
                self._gather(part, block, signature.root_rank)
            case "scatter":
                self._scatter(part, block, signature.root_rank)
            case "barrier":
                comm.all_reduce(part, 0)  # NCCL has no barrier; this reduces one byte
            case "send":
                comm.send(part, 1)
            case "recv":
                comm.recv(part, 0)
            case name:  # in all other collectives, every rank has a block
                assert block is not None
                self._run_on_block(name, part, block)

    def _run_on_block(self, name: str, part: torch.Tensor, block: torch.Tensor) -> None:
        match name:
            case "all_gather" | "all_gather_into_tensor":
                self._comm.all_gather(block, part)
            case "reduce_scatter" | "reduce_scatter_tensor":
                self._reduce_scatter(part, block, self._native)
            case "all_to_all" | "all_to_all_single":
                assert self._signature.splits is not None
                received, sent = self._signature.splits
                self._exchange(torch.split(part, list(received)), torch.split(block, list(sent)))
            case _:
                raise AssertionError(f"no collective {name}")

    # ---- reductions ----

    def _all_reduce(self, part: torch.Tensor, native: NativeReduction | None) -> None:
        if native is not None:
            self._comm.all_reduce(as_reduced(_scaled(part, native)), native.op)
        else:
            part.copy_(self._reduced_by_all(part))

    def _reduce(self, part: torch.Tensor, root: int, native: NativeReduction | None) -> None:
        is_root = self._comm.rank == root
        if native is not None:
            # The factor is applied in place, but a rank that is not the root must keep its tensor.
            wire = part if native.factor is None or is_root else part.clone()
            self._comm.reduce(as_reduced(_scaled(wire, native)), root, native.op)
        else:
            result = self._reduced_by_all(part)
            if is_root:
                part.copy_(result)

    def _reduce_scatter(self, part: torch.Tensor, block: torch.Tensor, native: NativeReduction | None) -> None:
        if native is not None:
            # `block` may be the caller's own tensor, which this call must not change.
            source = block if native.factor is None else block * native.factor
            self._comm.reduce_scatter(as_reduced(part), as_reduced(source), native.op)
        else:
            part.copy_(self._reduced_slice(block))

    def _reduced_by_all(self, part: torch.Tensor) -> torch.Tensor:
        """Reduce the tensors of all ranks in rank order, on all ranks.

        Cost for n bytes and p ranks: each rank sends 2 n (p-1)/p bytes.
        """
        size = self._comm.size
        # Each rank reduces one slice, so all slices must have the same size.
        padded = part.new_zeros(-(-part.numel() // size) * size)
        padded[: part.numel()] = part
        result = torch.empty_like(padded)
        self._comm.all_gather(result, self._reduced_slice(padded))
        return result[: part.numel()]

    def _reduced_slice(self, block: torch.Tensor) -> torch.Tensor:
        terms = torch.empty_like(block)
        self._exchange(self._parts(terms), self._parts(block))
        return reduce_in_rank_order(self._signature.reduction, self._parts(terms))

    # ---- moves ----

    def _gather(self, part: torch.Tensor, block: torch.Tensor | None, root: int) -> None:
        # Only the root has a block.
        if block is None:
            self._comm.send(part, root)
            return
        parts = self._parts(block)
        parts[root].copy_(part)
        with self._comm.group():
            for peer in self._others():
                self._comm.recv(parts[peer], peer)

    def _scatter(self, part: torch.Tensor, block: torch.Tensor | None, root: int) -> None:
        # Only the root has a block.
        if block is None:
            self._comm.recv(part, root)
            return
        parts = self._parts(block)
        with self._comm.group():
            for peer in self._others():
                self._comm.send(parts[peer], peer)
        part.copy_(parts[root])

    def _exchange(self, received: Sequence[torch.Tensor], sent: Sequence[torch.Tensor]) -> None:
        received[self._comm.rank].copy_(sent[self._comm.rank])
        with self._comm.group():
            for peer in self._others():
                self._comm.send(sent[peer], peer)
                self._comm.recv(received[peer], peer)

    def _parts(self, block: torch.Tensor) -> list[torch.Tensor]:
        return list(block.view(self._comm.size, block.numel() // self._comm.size))

    def _others(self) -> list[int]:
        # Start with the next rank, so that not all ranks send to rank 0 first.
        return [(self._comm.rank + step) % self._comm.size for step in range(1, self._comm.size)]


def _scaled(wire: torch.Tensor, native: NativeReduction) -> torch.Tensor:
    return wire if native.factor is None else wire.mul_(native.factor)


class PlannedCall(NamedTuple):
    """A call with its plan and its tensors. This object keeps the tensors even after the call has dropped them."""

    plan: NcclPlan
    call: Call
    reads: Sequence[torch.Tensor]
    writes: Sequence[torch.Tensor]

    @classmethod
    def of(cls, plan: NcclPlan, call: Call) -> PlannedCall:
        """Make a `PlannedCall` with the tensors that the call has now."""
        return cls(plan, call, call.reads, call.writes)


def run_planned(comm: Communicator, calls: Sequence[PlannedCall]) -> None:
    """Put calls on the current stream: pack the tensors, run the plans, unpack. NCCL starts all calls together, as a group."""
    packed = [call.plan.pack(call.reads, call.writes) for call in calls]
    # Pack all tensors before the group, and unpack them after the group. Copies start at once, but NCCL starts the calls of a
    # group only when the group is closed.
    with comm.group() if len(calls) > 1 else nullcontext():
        for planned, (part, whole) in zip(calls, packed, strict=True):
            planned.plan.run(part, whole, planned.call)
    for planned, (part, whole) in zip(calls, packed, strict=True):
        planned.plan.unpack(part, whole, planned.writes)
