"""Which way is prepared for an `all_reduce` like one that has succeeded."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ....contract.collective import Collective
from ....contract.reduce_op import Reduction
from ....host.transport import AllReduce
from .board import Board
from .group_meeting import GroupMeeting
from .memory import NodeMemory
from .prepared import DecidedEachTime, Prepared, PreparedExchange, PreparedSingleCopy, PreparedUnlessInWindow
from .ways import Native, Ways


class UsualWays(NamedTuple):
    """How a transport does an `all_reduce` unprepared, and how it prepares MPI.

    Attributes:
        anywhere: wherever the tensor is.
        elsewhere: of a tensor that is in no window, after the meeting that there is for its size.
        unreadable: of one that others cannot read either.
        by_mpi: prepares MPI for tensors like that, or returns None.
    """

    anywhere: AllReduce
    elsewhere: AllReduce
    unreadable: AllReduce
    by_mpi: Callable[[Board, GroupMeeting, torch.Tensor, Reduction, Collective], Prepared | None]


class Preparing:
    """Prepares what `Ways` would choose, on one node.

    Args:
        ways: of the group.
        memory: of the group.
        meeting: of the group.
        usual: the transport's own.
    """

    def __init__(self, ways: Ways, memory: NodeMemory, meeting: GroupMeeting, usual: UsualWays) -> None:
        self._ways = ways
        self._memory = memory
        self._meeting = meeting
        self._usual = usual

    def prepared(self, tensor: torch.Tensor, op: Reduction, native: Native, call: Collective) -> Prepared | None:
        """As `Transport.prepared_all_reduce`; keeps neither tensor nor call."""
        board = self._meeting.board_if_made
        if board is None or tensor.numel() == 0:
            return None

        def elsewhere(tensor: torch.Tensor, call: Collective) -> Prepared | None:
            return self._prepared_elsewhere(board, tensor, op, native, call)

        prepared = elsewhere(tensor, call)
        if not self._ways.fits_window(tensor.nbytes):
            return prepared
        if prepared is None:
            reads = self._ways.is_read(tensor.nbytes, native)
            own = self._usual
            prepared = DecidedEachTime(board, self._meeting, op, call, own.anywhere, own.elsewhere, reads=reads)
        return PreparedUnlessInWindow(board, self._meeting, self._memory, op, call, prepared, elsewhere)

    def _prepared_elsewhere(
        self, board: Board, tensor: torch.Tensor, op: Reduction, native: Native, call: Collective
    ) -> Prepared | None:
        """For tensors that are in no window; None if no such call has shown yet what there is, or if nothing is gained."""
        ways, meeting, nbytes = self._ways, self._meeting, tensor.nbytes
        if ways.is_small(nbytes, native):
            is_at_once = nbytes <= board.slot_bytes
            return PreparedExchange(board, meeting, tensor, op, call) if is_at_once else None
        is_read = ways.is_read(nbytes, native)
        if is_read and meeting.peers_if_made is not None:
            return PreparedSingleCopy(board, meeting, meeting.peers_if_made, tensor, op, call, self._usual.unreadable)
        if ways.is_staged(nbytes, native) or (is_read and meeting.may_have_peers):
            return None
        return self._usual.by_mpi(board, meeting, tensor, op, call)
