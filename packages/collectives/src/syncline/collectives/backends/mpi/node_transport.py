"""The collectives that gain from memory which the ranks of a node share."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from mpi4py import MPI

from ...collective import Collective
from ...crossovers import Crossovers
from ...deadline import Deadline
from ...reduce_op import Reduction
from ...transport import Transport
from .across import all_reduce_across
from .exchange import MOST_RANKS, Exchange
from .hierarchy import Hierarchy, SplitByNode, split_by_node
from .in_window import InWindow
from .library import mpi_errors
from .meeting import NOWHERE
from .node_meeting import NodeMeeting
from .segment import Segment
from .sharing import SharingError, share
from .single_copy import SingleCopy
from .staging import STAGING_BYTES, Slots, Staged
from .transport import MEETING_BYTES, MPITransport
from .way import FullWay, Way
from .windows import Windows

logger = logging.getLogger("syncline.collectives")


class NodeTransport(MPITransport):
    """`MPITransport`, but ranks of one node do what gains from it through memory that these share.

    Which way a collective takes is the same on every rank: sizes are, and whether all tensors lie at the same place of a window
    is agreed when the ranks meet. They do so on a board (see `NodeMeeting`).

    ============================ =========== =================================================================
    tensors                      ranks on    go
    ============================ =========== =================================================================
    small, of a few ranks        one node    by `Exchange`: reductions, `broadcast`, `all_gather`
    in a window                  one node    `InWindow`: reductions, `broadcast`, `all_gather`
    in a window                  several     `all_reduce` there and between counterparts, the others by MPI
    large, elsewhere             one node    reductions by `SingleCopy`; `Staged` where that is refused
    all others                   any         by MPI
    ============================ =========== =================================================================

    Reductions are here `all_reduce` and `reduce_scatter`; `reduce` is always MPI's.

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
        self._windows = Windows()
        self._has_windows = False
        self._slots: Slots | None = None
        self._may_stage = self._is_one_node
        self._node_meeting = NodeMeeting(self._hierarchy, self._private, self._meeting, self._inquest, self._share)
        is_small = self._is_one_node and self._size <= MOST_RANKS
        self._most_exchanged = self._crossovers.exchange_bytes // (self._size - 1) if is_small else 0
        self._has_warned = False

    # ---- memory ----

    def allocate(self, numel: int, dtype: torch.dtype, call: Collective, deadline: Deadline) -> torch.Tensor:
        """Memory in a window, filled with zeros, if it is large enough to gain from it and any ranks share a node."""
        nbytes = numel * dtype.itemsize
        is_used = self._is_one_node or (self._hierarchy.shares_memory and not self._reproducible)
        if is_used and nbytes >= self._crossovers.window_bytes:
            self._meet(call, deadline)
            segment = self._share(nbytes, call, deadline)
            if segment is not None:
                self._windows.add(segment)
                self._has_windows = True
                return segment.view(segment.mine, 0, numel, dtype).zero_()  # written, so that no first use pays for it
        return super().allocate(numel, dtype, call, deadline)

    # ---- collectives ----

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, call: Collective, deadline: Deadline) -> None:
        """In shared memory or by MPI; on several nodes in the window and then between them."""
        way = self._way(tensor, op, call, deadline)
        if way is None:
            super().all_reduce(tensor, op, call, deadline)
        elif not self._is_one_node and isinstance(way, InWindow):
            self._all_reduce_across(way, tensor, op, call, deadline)
        else:
            way.all_reduce(tensor, op)

    def reduce_scatter(
        self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction, call: Collective, deadline: Deadline
    ) -> None:
        """In shared memory or by MPI."""
        way = self._way(block, None, call, deadline)
        if way is None:
            super().reduce_scatter(tensor, block, op, call, deadline)
        else:
            way.reduce_scatter(tensor, block, op)

    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor, call: Collective, deadline: Deadline) -> None:
        """In shared memory or by MPI."""
        way = self._full_way(block, tensor.nbytes, call, deadline)
        if way is None:
            super().all_gather(block, tensor, call, deadline)
        else:
            way.all_gather(block, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int, call: Collective, deadline: Deadline) -> None:
        """In shared memory or by MPI."""
        way = self._full_way(tensor, tensor.nbytes, call, deadline)
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

    def _all_reduce_across(
        self, window: InWindow, tensor: torch.Tensor, op: Reduction, call: Collective, deadline: Deadline
    ) -> None:
        between = self._between
        if between is not None:
            all_reduce_across(
                window,
                tensor,
                op,
                self._hierarchy.node.Get_rank(),
                self._hierarchy.owners,
                self._size,
                lambda total, core: between.all_reduce(total, core, call, deadline),
            )
        self._node_barrier(call, deadline)

    # ---- which way ----

    def _way(self, tensor: torch.Tensor, op: Reduction | None, call: Collective, deadline: Deadline) -> Way | None:
        """The way of a reduction that all ranks take, None for MPI's.

        `tensor` is the larger one of the call; `op` the reduction of an `all_reduce`, None for a `reduce_scatter`.
        """
        nbytes = tensor.nbytes
        if not self._is_one_node:
            return self._window(tensor, call, deadline) if op is not None and not self._reproducible else None
        way: Way | None = self._window(tensor, call, deadline) or self._exchange(nbytes, call, deadline)
        if way is None and nbytes >= self._crossovers.single_copy_bytes:
            way = self._single_copy(call, deadline)
        is_native = op is not None and self._native(tensor, op) is not None
        least_bytes = self._crossovers.staged_bytes if is_native else self._crossovers.staged_bytes_not_native
        if way is None and nbytes >= least_bytes:
            way = self._staged(call, deadline)
        if way is not None:
            self._met_for = None
        return way

    def _full_way(self, tensor: torch.Tensor, shown_bytes: int, call: Collective, deadline: Deadline) -> FullWay | None:
        """The way of a move; `shown_bytes` is what a rank would show to the others."""
        if not self._is_one_node:
            return None
        # MPI is as fast. But below this size it does not compare what the ranks are about to do.
        window = self._window(tensor, call, deadline)
        if window is not None or shown_bytes >= MEETING_BYTES:
            return window
        self._met_for = None
        return self._exchange(shown_bytes, call, deadline)

    def _exchange(self, shown_bytes: int, call: Collective, deadline: Deadline) -> Exchange | None:
        if not 0 < shown_bytes <= self._most_exchanged:
            return None
        board = self._node_meeting.board(call, deadline)
        if board is None:
            self._most_exchanged = 0
            return None
        return Exchange(board, lambda: self._node_meeting.meet(call, deadline))

    def _single_copy(self, call: Collective, deadline: Deadline) -> SingleCopy | None:
        peers = self._node_meeting.peers(call, deadline)
        if peers is None:
            return None
        return SingleCopy(
            peers,
            self._rank,
            self._size,
            lambda address: self._node_meeting.addresses(call, deadline, address),
            lambda: self._node_barrier(call, deadline),
        )

    def _window(self, tensor: torch.Tensor, call: Collective, deadline: Deadline) -> InWindow | None:
        """Where all ranks have the tensor, if in a window. Unless that is plain from its size, the ranks meet to know."""
        if not self._has_windows or tensor.nbytes < self._crossovers.window_bytes:
            return None
        place = self._windows.find(tensor)
        is_common = self._meet(call, deadline, NOWHERE if place is None else place.key)
        if is_common and place is not None:
            return InWindow(place, self._hierarchy.node.Get_size(), lambda: self._node_barrier(call, deadline))
        self._met_for = call if tensor.nbytes >= MEETING_BYTES else None
        return None

    def _staged(self, call: Collective, deadline: Deadline) -> Staged | None:
        if not self._may_stage:
            return None
        self._meet_once(call, deadline)
        slots = self._staging(call, deadline)
        return None if slots is None else Staged(slots, lambda: self._node_barrier(call, deadline))

    # ---- meeting ----

    def _meet(self, call: Collective, deadline: Deadline, key: int = NOWHERE) -> bool:
        return self._node_meeting.meet(call, deadline, key)

    def _node_barrier(self, call: Collective, deadline: Deadline) -> None:
        self._node_meeting.barrier(call, deadline)

    # ---- shared memory ----

    def _staging(self, call: Collective, deadline: Deadline) -> Slots | None:
        """Made when it is first needed; the ranks have met."""
        if self._slots is None and self._may_stage:
            segment = self._share(STAGING_BYTES, call, deadline)
            if segment is None:
                self._may_stage = False
            else:
                self._slots = Slots(segment, self._size)
        return self._slots

    def _share(self, part_bytes: int, call: Collective, deadline: Deadline) -> Segment | None:
        try:
            with mpi_errors():
                return share(self._hierarchy, self._private, part_bytes, lambda start: self._meeting.run(call, start, deadline))
        except SharingError as error:
            self._warn(error)
            return None

    def _warn(self, error: SharingError) -> None:
        if self._rank == 0 and not self._has_warned:
            logger.warning(
                "in a group of %d ranks those of a node cannot share memory (%s). They use MPI instead, which is slower; the "
                "results are equal up to rounding. Leave the job more memory, or start the ranks of a node in one container; "
                "`syncline doctor` tries whether they can share any",
                self._size,
                error,
            )
        self._has_warned = True

    # ---- life ----

    def subset(self, members: Sequence[int], name: str, number: int, deadline: Deadline) -> Transport:
        """As `MPITransport`, with windows of its own."""
        return NodeTransport(
            self._communicator_of(members, number),
            reproducible=self._reproducible,
            crossovers=self._crossovers,
            split=self._split,
        )

    def close(self) -> None:
        """Free all communicators; memory lasts as long as tensors lie in it."""
        self._slots = None
        if self._between is not None:
            self._between.close()
        self._hierarchy.node.Free()
        super().close()
