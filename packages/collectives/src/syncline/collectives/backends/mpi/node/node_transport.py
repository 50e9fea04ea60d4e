"""The collectives that gain from memory which the ranks of a node share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from mpi4py import MPI

from ....contract.collective import Collective
from ....contract.deadline import Deadline
from ....contract.layout import bytes_of
from ....contract.reduce_op import REDUCIBLE, PremulSum, Reduction
from ....host.transport import PreparedAllReduce, Transport
from ....startup.crossovers import Crossovers
from .. import transport as by_mpi
from ..transport import MEETING_BYTES, REDUCES_FAST, MPITransport
from .across import Crossing
from .board import NOWHERE, Board
from .exchange import SLOT_BYTES
from .group_meeting import GroupMeeting
from .hierarchy import Hierarchy, SplitByNode, split_by_node
from .memory import NodeMemory
from .prepared_mpi import PreparedMPI
from .preparing import Preparing, UsualWays
from .way import Way
from .ways import Native, Ways, most_exchanged


class NodeTransport(MPITransport):
    """`MPITransport`, but ranks of one node do what gains from it through memory that these share.

    ============= =======================================================================================
    ranks on      `all_reduce`, `reduce_scatter`, `broadcast`, `all_gather`, `barrier`
    ============= =======================================================================================
    one node      take one of the `Ways`, or MPI's
    several       `all_reduce` of tensors in a window there, and between counterparts; so, staged in one, of those that MPI
                  does not reduce itself; all others MPI's
    ============= =======================================================================================

    Args:
        communicator: as for `MPITransport`.
        reproducible: as for `MPITransport`. All goes by MPI then where there are several nodes: the order of what is done in a
            node and between nodes depends on who is where.
        crossovers: the same on all ranks.
        split: says who shares memory with whom.
    """

    def __init__(
        self,
        communicator: MPI.Intracomm,
        *,
        reproducible: bool = False,
        crossovers: Crossovers | None = None,
        split: SplitByNode = split_by_node,
    ) -> None:
        super().__init__(communicator, reproducible=reproducible)
        self._crossovers = crossovers or Crossovers()
        self._split = split
        self._hierarchy = Hierarchy(self._private, split)
        self._is_one_node = self._hierarchy.nodes == 1 and self._hierarchy.shares_memory
        across = self._hierarchy.counterparts
        self._between = None if across is None else MPITransport(across, inquest=self._inquest)
        self._memory = NodeMemory(self._hierarchy, self._private, self._meeting)
        slot_bytes = SLOT_BYTES if most_exchanged(self._hierarchy, self._crossovers) else 0
        self._group_meeting = GroupMeeting(
            self._hierarchy, self._private, self._meeting, self._inquest, self._memory.share, slot_bytes
        )
        self._has_met = False  # for the collective that MPI does next
        self._crossing = Crossing(self._hierarchy, self._between, self._memory, self._group_meeting, self._size)
        self._ways = Ways(self._hierarchy, self._memory, self._group_meeting, self._crossovers)
        usual = UsualWays(self.all_reduce, self._all_reduce_elsewhere, self._all_reduce_unreadable, self._prepared_mpi)
        self._preparing = Preparing(self._ways, self._memory, self._group_meeting, usual)

    def allocate(self, numel: int, dtype: torch.dtype, call: Collective, deadline: Deadline) -> torch.Tensor:
        """Memory in a window, filled with zeros, if it is large enough to gain from it and any ranks share a node."""
        is_used = self._is_one_node or (self._hierarchy.shares_memory and not self._reproducible)
        if is_used and numel * dtype.itemsize >= self._crossovers.window_bytes:
            self._meet(call, deadline)
            made = self._memory.allocate(numel, dtype, call, deadline)
            if made is not None:
                return made
        return super().allocate(numel, dtype, call, deadline)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, call: Collective, deadline: Deadline) -> None:
        """In shared memory or by MPI; on several nodes in the window, or a stage, and then between them."""
        if self._is_one_node:
            way = self._ways.of_reduction(tensor, self._how_native(tensor, op), call, deadline)
            self._all_reduce_by(way, tensor, op, call, deadline)
            return
        if not self._reproducible:
            window = self._ways.window(tensor, call, deadline)
            if window is not None:
                self._crossing.all_reduce(window, tensor, op, call, deadline)
                return
            # What MPI does not reduce itself would cross between all ranks.
            is_staged = self._native(tensor, op) is None and self._ways.is_staged(tensor.nbytes, Native.NOT)
            stage = self._crossing.stage(call, deadline) if is_staged else None
            if stage is not None:
                has_met = self._ways.may_be_in_window(tensor.nbytes)  # which was asked
                self._crossing.all_reduce_staged(stage, tensor, op, call, deadline, has_met=has_met)
                return
        super().all_reduce(tensor, op, call, deadline)

    def prepared_all_reduce(self, tensor: torch.Tensor, op: Reduction, call: Collective) -> PreparedAllReduce | None:
        """On one node."""
        return self._preparing.prepared(tensor, op, self._how_native(tensor, op), call) if self._is_one_node else None

    def reduce_scatter(
        self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction, call: Collective, deadline: Deadline
    ) -> None:
        """In shared memory or by MPI."""
        way = self._ways.of_reduction(block, Native.NOT, call, deadline) if self._is_one_node else None
        if way is None:
            with self._having_met(block):
                super().reduce_scatter(tensor, block, op, call, deadline)
        else:
            way.reduce_scatter(tensor, block, op)

    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor, call: Collective, deadline: Deadline) -> None:
        """In shared memory or by MPI."""
        block, tensor = _movable(block), _movable(tensor)
        way = self._ways.of_move(block, tensor.nbytes, call, deadline) if self._is_one_node else None
        if way is None:
            super().all_gather(block, tensor, call, deadline)
        else:
            way.all_gather(block, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int, call: Collective, deadline: Deadline) -> None:
        """In shared memory or by MPI."""
        tensor = _movable(tensor)
        way = self._ways.of_move(tensor, tensor.nbytes, call, deadline) if self._is_one_node else None
        if way is None:
            super().broadcast(tensor, root, call, deadline)
        else:
            way.broadcast(tensor, root)

    def barrier(self, call: Collective, deadline: Deadline) -> None:
        """On the board, or MPI's."""
        if self._is_one_node:
            self._meet(call, deadline)
        else:
            super().barrier(call, deadline)

    def _how_native(self, tensor: torch.Tensor, op: Reduction) -> Native:
        if self._native(tensor, op) is None:
            return Native.NOT
        return Native.FAST if REDUCES_FAST else Native.USUAL

    def _prepared_mpi(
        self, board: Board, meeting: GroupMeeting, tensor: torch.Tensor, op: Reduction, call: Collective
    ) -> PreparedMPI | None:
        native = self._native(tensor, op)
        # Smaller ones do not meet.
        if native is None or isinstance(op, PremulSum) or not MEETING_BYTES <= tensor.nbytes <= by_mpi.PIECE_BYTES:
            return None
        return PreparedMPI(board, meeting, self._communicator, tensor, op, native, call)

    def _all_reduce_elsewhere(self, tensor: torch.Tensor, op: Reduction, call: Collective, deadline: Deadline) -> None:
        way = self._ways.of_elsewhere(tensor, self._how_native(tensor, op), call, deadline)
        self._all_reduce_by(way, tensor, op, call, deadline)

    def _all_reduce_unreadable(self, tensor: torch.Tensor, op: Reduction, call: Collective, deadline: Deadline) -> None:
        way = self._ways.of_unreadable(tensor, self._how_native(tensor, op), call, deadline)
        self._all_reduce_by(way, tensor, op, call, deadline)

    def _all_reduce_by(
        self, way: Way | None, tensor: torch.Tensor, op: Reduction, call: Collective, deadline: Deadline
    ) -> None:
        if way is None:
            with self._having_met(tensor):
                super().all_reduce(tensor, op, call, deadline)
        else:
            way.all_reduce(tensor, op)

    @contextmanager
    def _having_met(self, tensor: torch.Tensor) -> Iterator[None]:
        """For a reduction that MPI does: its first meeting has been, if `Ways` wanted one."""
        self._has_met = self._is_one_node and tensor.nbytes >= MEETING_BYTES
        try:
            yield
        finally:
            self._has_met = False

    def _meet(self, call: Collective, deadline: Deadline, key: int = NOWHERE) -> bool:
        if self._has_met:
            self._has_met = False
            return False
        return self._group_meeting.meet(call, deadline, key)

    def subset(self, members: Sequence[int], name: str, number: int, deadline: Deadline) -> Transport:
        """As `MPITransport`, with windows of its own."""
        return NodeTransport(
            self._communicator_of(members, number),
            reproducible=self._reproducible,
            crossovers=self._crossovers,
            split=self._split,
        )

    def give_up(self) -> None:
        """Ranks of the node that wait for this one hear of it."""
        self._group_meeting.give_up()

    def abort(self) -> None:
        """The same; MPI has no way to wake the ranks of other nodes short of ending the job."""
        self._group_meeting.give_up()

    def close(self) -> None:
        """Free all communicators; memory lasts as long as tensors lie in it."""
        self._ways.forget()
        self._crossing.forget()
        self._group_meeting.forget()
        if self._between is not None:
            self._between.close()
        self._hierarchy.node.Free()
        super().close()


def _movable(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its bytes: torch does not copy all dtypes."""
    return tensor if tensor.dtype in REDUCIBLE else bytes_of(tensor)
