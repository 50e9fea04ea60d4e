"""All-reduce between several nodes: by the slice, of tensors in windows and of others that are staged in one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ....contract.collective import Collective
from ....contract.deadline import Deadline
from ....contract.reduce_op import ReduceOp, Reduction
from ....host.reduction import combine, core_op, divide
from .group_meeting import GroupMeeting
from .hierarchy import Hierarchy
from .in_window import InWindow
from .memory import NodeMemory
from .segment import Segment
from .slicing import slice_of
from .windows import Place

if TYPE_CHECKING:
    from ..transport import MPITransport

# What crosses at a time: large against the latency of a network, small enough to be memory that is soon used again.
CROSSING_BYTES = 4 << 20
# What is staged of a tensor that is in no window, for each rank.
STAGE_BYTES = 16 << 20


class Crossing:
    """Combines a slice inside the node, then with its counterparts on the other nodes, and hands it out on this node.

    Args:
        hierarchy: of the group.
        between: of the owners of this rank's slice; None if it owns none.
        memory: of the group.
        meeting: of the group.
        ranks: how many ranks the group has.
    """

    def __init__(
        self, hierarchy: Hierarchy, between: MPITransport | None, memory: NodeMemory, meeting: GroupMeeting, ranks: int
    ) -> None:
        self._hierarchy = hierarchy
        self._between = between
        self._memory = memory
        self._meeting = meeting
        self._ranks = ranks
        self._stage: Segment | None = None
        self._may_stage = hierarchy.owners > 1  # one rank alone would have to reduce what all of its node have

    def all_reduce(self, window: InWindow, tensor: torch.Tensor, op: Reduction, call: Collective, deadline: Deadline) -> None:
        """Of a tensor in a window; the ranks have met."""
        if self._between is not None:
            self._cross(self._between, window, tensor, op, call, deadline)
        self._meeting.barrier(call, deadline)

    def stage(self, call: Collective, deadline: Deadline) -> Segment | None:
        """Memory to stage other tensors in; None, on all ranks, if it cannot be had or nothing is gained."""
        if self._stage is None and self._may_stage:
            self._meeting.meet(call, deadline)
            self._stage = self._memory.share(STAGE_BYTES, call, deadline)
            self._may_stage = self._stage is not None
        return self._stage

    def all_reduce_staged(
        self, stage: Segment, tensor: torch.Tensor, op: Reduction, call: Collective, deadline: Deadline, *, has_met: bool
    ) -> None:
        """Of any tensor, piece by piece.

        A rank's part of the stage is touched by others only between a meeting or barrier and the barrier that follows.

        Args:
            stage: that of this group.
            tensor: flat and contiguous.
            op: the reduction.
            call: that one.
            deadline: of the call.
            has_met: whether all ranks have met, and compared their calls.
        """
        window = InWindow(Place(stage, 0, 0), lambda: self._meeting.barrier(call, deadline))
        for piece in torch.split(tensor, STAGE_BYTES // tensor.element_size()):
            shown = stage.view(stage.mine, 0, piece.numel(), piece.dtype).copy_(piece)
            if has_met:
                self._meeting.barrier(call, deadline)
            else:
                self._meeting.meet(call, deadline)
                has_met = True
            self.all_reduce(window, shown, op, call, deadline)
            piece.copy_(shown)

    def forget(self) -> None:
        """Give the stage back."""
        self._stage = None

    def _cross(
        self,
        between: MPITransport,
        window: InWindow,
        tensor: torch.Tensor,
        op: Reduction,
        call: Collective,
        deadline: Deadline,
    ) -> None:
        """Halves shall be rounded once: they cross as the float32 that they are summed in, and come back as halves."""
        owner = self._hierarchy.node.Get_rank()
        for terms in window.terms(tensor, *slice_of(tensor.numel(), self._hierarchy.owners, owner), CROSSING_BYTES):
            mine = terms[owner]
            total = combine(op, terms, mine)
            if total.dtype is not mine.dtype:
                divisor = self._ranks if op is ReduceOp.AVG else 1
                between.all_reduce_widened(total, core_op(op), divisor, mine, call, deadline)
            else:
                between.all_reduce(total, core_op(op), call, deadline)
                if op is ReduceOp.AVG:
                    divide(total, self._ranks)
                if total is not mine:
                    mine.copy_(total)
            window.hand_out(terms)
