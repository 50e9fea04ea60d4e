"""All-reduce between several nodes: by the slice, of tensors in windows and of others that are staged in one."""

from __future__ import annotations

import torch

from ....contract.deadline import Deadline
from ....contract.layout import flat, mark_written
from ....contract.reduce_op import ReduceOp, Reduction, divide
from ....contract.running_call import RunningCall
from ....host.reduction import combine, core_op
from ....host.shared_memory.segment import Segment
from ....host.transport import CallKind
from ..transport import MPITransport
from .algorithm import Algorithm, chunks, slice_of
from .group_sync import Describe, GroupSync
from .hierarchy import Hierarchy
from .plan import NodePlan, PlanRequest
from .window_collective import WindowCollective
from .windows import NodeMemory, Place

# What is sent between nodes at a time: large against the latency of a network, small enough to be memory that is soon used
# again.
CHUNK_BYTES = 4 << 20
# What is staged of a tensor that is in no window, for each rank.
STAGE_BYTES = 16 << 20


class NodeReduction:
    """Combines a slice inside the node, then with the other leaders of that slice, and copies it to all ranks of this node.

    Args:
        hierarchy: of the group.
        between: of the leaders of this rank's slice; None if it leads none.
        memory: of the group.
        sync: of the group.
        ranks: how many ranks the group has.
    """

    def __init__(
        self, hierarchy: Hierarchy, between: MPITransport | None, memory: NodeMemory, sync: GroupSync, ranks: int
    ) -> None:
        self._rank = hierarchy.node.Get_rank()
        self._leaders = hierarchy.leaders
        self._between = between
        self._memory = memory
        self._sync = sync
        self._ranks = ranks
        self._stage: Segment | None = None
        self._may_stage = True

    def stage(self, describe: Describe, tensor: torch.Tensor, deadline: Deadline) -> Segment | None:
        """Memory to stage tensors in; None, on all ranks, if it cannot be had."""
        if self._stage is None and self._may_stage:
            self._sync.verify(describe, tensor, deadline)
            self._stage = self._memory.allocate_segment(STAGE_BYTES, RunningCall(describe(tensor), deadline))
            self._may_stage = self._stage is not None
        return self._stage

    def run(self, place: Place, kind: CallKind, call: RunningCall) -> None:
        """Combine what lies at the same place on all ranks, which have synchronised; they must do so afterwards."""
        start, stop = slice_of(kind.numel, self._leaders, self._rank) if self._rank < self._leaders else (0, 0)
        if self._between is None or start == stop:
            return
        assert kind.op is not None
        itemsize = kind.dtype.itemsize
        rows = place.segment.rows(place.offset_bytes + start * itemsize, stop - start, kind.dtype)
        for begin, end in chunks(0, stop - start, CHUNK_BYTES // itemsize):
            self._reduce([row[begin:end] for row in rows], self._between, kind.op, call)

    def forget(self) -> None:
        """Give the stage back."""
        self._stage, self._may_stage = None, False

    def _reduce(self, terms: list[torch.Tensor], between: MPITransport, op: Reduction, call: RunningCall) -> None:
        """Halves shall be rounded once: they travel as the float32 that they are summed in, and come back as halves."""
        mine = terms[self._rank]
        total = combine(op, terms, mine)
        if total.dtype is not mine.dtype:
            divisor = self._ranks if op is ReduceOp.AVG else 1
            between.all_reduce_widened(total, core_op(op), divisor, mine, call)
        else:
            between.all_reduce(total, core_op(op), call)
            if op is ReduceOp.AVG:
                divide(total, self._ranks)
            if total is not mine:
                mine.copy_(total)
        for rank, term in enumerate(terms):
            if rank != self._rank:
                term.copy_(mine)


class HierarchicalWindow(WindowCollective):
    """Tensors in a window of each node.

    Args:
        request: as for `NodePlan`.
        memory: where the windows are.
        reduction: of the group.
        elsewhere: the plan for other tensors.
    """

    in_window = Algorithm.HIERARCHICAL

    def __init__(self, request: PlanRequest, memory: NodeMemory, reduction: NodeReduction, elsewhere: NodePlan) -> None:
        super().__init__(request, memory, elsewhere)
        self._reduction = reduction

    def _run_in_window(self, key: int, tensor: torch.Tensor, deadline: Deadline) -> None:
        self._reduction.run(self._windows.place(key), self._kind, RunningCall(self._call(tensor), deadline))
        self._wait(tensor, deadline)


class HierarchicalAllReduce(NodePlan):
    """Tensors in no window, staged piece by piece.

    A rank's part of the stage is touched by others only between a synchronisation and the one that follows.

    Args:
        request: as for `NodePlan`.
        reduction: of the group.
        otherwise: as for `NodePlan`.
    """

    chosen = Algorithm.HIERARCHICAL

    def __init__(self, request: PlanRequest, reduction: NodeReduction, otherwise: NodePlan | None) -> None:
        super().__init__(request, otherwise)
        self._reduction = reduction

    def run(self, tensor: torch.Tensor, whole: torch.Tensor, deadline: Deadline, *, is_verified: bool = False) -> None:
        """Stage a piece, verify the call, reduce; again for each piece."""
        stage = self._reduction.stage(self._call, tensor, deadline)
        if stage is None:
            self._run_otherwise(tensor, whole, deadline, is_verified=is_verified)
            return
        call, place = RunningCall(self._call(tensor), deadline), Place(stage, 0)
        for piece in torch.split(flat(tensor), STAGE_BYTES // tensor.element_size()):
            staged = stage.view(stage.mine, 0, piece.numel(), piece.dtype).copy_(piece)
            if is_verified:
                self._wait(tensor, deadline)
            else:
                self._verify(tensor, deadline)
                is_verified = True
            self._reduction.run(place, self._kind._replace(numel=piece.numel()), call)
            self._wait(tensor, deadline)
            piece.copy_(staged)
        mark_written(tensor)
