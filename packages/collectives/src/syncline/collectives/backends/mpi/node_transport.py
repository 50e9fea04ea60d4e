"""The collectives that gain from memory which the ranks of a node share."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import torch
from mpi4py import MPI

from ...collective import Collective
from ...crossovers import Crossovers
from ...deadline import Deadline
from ...reduce_op import Reduction
from ...transport import Transport
from .across import all_reduce_across
from .hierarchy import Hierarchy, SplitByNode, split_by_node
from .in_window import InWindow
from .library import mpi_errors
from .meeting import NOWHERE
from .segment import Segment
from .sharing import SharingError, share
from .staging import STAGING_BYTES, Slots, Staged
from .transport import MEETING_BYTES, MPITransport
from .way import Way
from .windows import Windows

logger = logging.getLogger("syncline.collectives")


class NodeTransport(MPITransport):
    """`MPITransport`, but large tensors of ranks on one node travel through memory that these share.

    Which way a collective takes is the same on every rank: sizes are, and whether all tensors lie at the same place of a window
    is agreed in the meeting that precedes large collectives anyway (see Note [Meeting first]).

    ============================ ============ ==============================================================
    where the tensors lie        ranks on     `all_reduce`, `broadcast`, `all_gather`, `reduce_scatter`
    ============================ ============ ==============================================================
    in a window                  one node     there
    in a window                  several      `all_reduce` there and between counterparts, the others by MPI
    elsewhere, and are large     one node     `all_reduce` and `reduce_scatter` staged, the others by MPI
    elsewhere                    any          by MPI
    ============================ ============ ==============================================================

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
        self._least_bytes = self._crossovers.least_bytes if self._hierarchy.shares_memory else sys.maxsize
        across = self._hierarchy.counterparts
        self._between = None if across is None else MPITransport(across, inquest=self._inquest)
        self._windows = Windows()
        self._slots: Slots | None = None
        self._may_stage = self._hierarchy.nodes == 1 and self._hierarchy.shares_memory
        self._has_warned = False

    # ---- memory ----

    def allocate(self, numel: int, dtype: torch.dtype, call: Collective, deadline: Deadline) -> torch.Tensor:
        """Memory in a window, filled with zeros, if it is large enough to gain from it and any ranks share a node."""
        nbytes = numel * dtype.itemsize
        if self._hierarchy.shares_memory and nbytes >= self._crossovers.window_bytes:
            self._meeting.meet(call, deadline)
            segment = self._share(nbytes)
            if segment is not None:
                self._windows.add(segment)
                return segment.view(segment.mine, 0, numel, dtype).zero_()  # written, so that no first use pays for it
        return super().allocate(numel, dtype, call, deadline)

    # ---- collectives ----

    def all_reduce(self, tensor: torch.Tensor, op: Reduction, call: Collective, deadline: Deadline) -> None:
        """In the window, staged, or by MPI; on several nodes also in the window and then between them."""
        way = self._way(tensor, op, call, deadline, also_across=not self._reproducible)
        if way is None:
            super().all_reduce(tensor, op, call, deadline)
        elif isinstance(way, InWindow) and self._hierarchy.nodes > 1:
            self._all_reduce_across(way, tensor, op, call, deadline)
        else:
            way.all_reduce(tensor, op)

    def reduce_scatter(
        self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction, call: Collective, deadline: Deadline
    ) -> None:
        """In the window, staged, or by MPI."""
        way = self._way(block, None, call, deadline)
        if way is None:
            super().reduce_scatter(tensor, block, op, call, deadline)
        else:
            way.reduce_scatter(tensor, block, op)

    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor, call: Collective, deadline: Deadline) -> None:
        """In the window, or by MPI: it moves as many bytes as staging would."""
        window = self._window(block, call, deadline)
        if window is None:
            super().all_gather(block, tensor, call, deadline)
        else:
            window.all_gather(block, tensor)

    def broadcast(self, tensor: torch.Tensor, root: int, call: Collective, deadline: Deadline) -> None:
        """In the window, or by MPI: it moves as many bytes as staging would."""
        window = self._window(tensor, call, deadline)
        if window is None:
            super().broadcast(tensor, root, call, deadline)
        else:
            window.broadcast(tensor, root)

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

    def _way(
        self, tensor: torch.Tensor, op: Reduction | None, call: Collective, deadline: Deadline, *, also_across: bool = False
    ) -> Way | None:
        """The way of a reduction that all ranks take, None for MPI's.

        `tensor` is the larger one of the call; `op` the reduction, if MPI may know how to do it itself.
        """
        if tensor.nbytes < self._least_bytes:
            return None
        window = self._window(tensor, call, deadline, also_across=also_across)
        if window is not None:
            return window
        is_native = op is not None and self._native(tensor, op) is not None
        least_bytes = self._crossovers.staged_bytes if is_native else self._crossovers.staged_bytes_not_native
        slots = self._staging() if tensor.nbytes >= least_bytes else None
        if slots is None:
            return None
        self._met_for = None
        return Staged(slots, lambda: self._node_barrier(call, deadline))

    def _window(
        self, tensor: torch.Tensor, call: Collective, deadline: Deadline, *, also_across: bool = False
    ) -> InWindow | None:
        """Where all ranks have the tensor, if in a window. Unless that is plain from its size, the ranks meet to know."""
        if tensor.nbytes < self._least_bytes or not (self._hierarchy.nodes == 1 or also_across):
            return None
        place = self._windows.find(tensor)
        is_common = self._meeting.meet(call, deadline, NOWHERE if place is None else place.key)
        if is_common and place is not None:
            return InWindow(place, self._hierarchy.node.Get_size(), lambda: self._node_barrier(call, deadline))
        self._met_for = call if tensor.nbytes >= MEETING_BYTES else None
        return None

    def _node_barrier(self, call: Collective, deadline: Deadline) -> None:
        self._meeting.run(call, self._hierarchy.node.Ibarrier, deadline)

    # ---- shared memory ----

    def _staging(self) -> Slots | None:
        """Made when it is first needed; the ranks have met."""
        if self._slots is None and self._may_stage:
            segment = self._share(STAGING_BYTES)
            if segment is None:
                self._may_stage = False
            else:
                self._slots = Slots(segment, self._size)
        return self._slots

    def _share(self, part_bytes: int) -> Segment | None:
        try:
            with mpi_errors():
                return share(self._hierarchy, self._private, part_bytes)
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
        if self._between is not None:
            self._between.close()
        self._hierarchy.node.Free()
        super().close()
