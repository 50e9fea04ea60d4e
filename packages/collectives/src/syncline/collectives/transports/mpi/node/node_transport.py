"""`NodeTransport` runs a collective in the shared memory of a node, or by MPI, whichever is faster."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from mpi4py import MPI
from typing_extensions import override

from ....engine.call import Call, Signature
from ....engine.cancel_scope import CancelScope
from ....engine.transport import Plan, Transport
from ....startup.settings import AlgorithmThresholds
from ..library import revoke, revoked_on_failure
from ..ring_all_reduce import largest_piece_bytes
from ..sync import MessageSync, Sync
from ..transport import PRESYNC_MIN_BYTES, MPITransport
from .choice import Capabilities, Choice, Operation, Size, choose, may_be_in_window, size_of, slot_bytes
from .copy_in_copy_out import CopyInCopyOut, StagingArea
from .eager import Eager
from .hierarchical import Hierarchical, HierarchicalInWindow, NodeReduction
from .hierarchy import Hierarchy, SplitByNode, split_by_node
from .memory import Node
from .plan import Algorithm, ByMPI, NodePlan, WindowAlgorithm
from .window import SlicesInWindow

logger = logging.getLogger("syncline.collectives")

_OPERATIONS = {
    "all_reduce": Operation.ALL_REDUCE,
    "reduce_scatter": Operation.REDUCE_SCATTER,
    "reduce_scatter_tensor": Operation.REDUCE_SCATTER,
    "all_gather": Operation.ALL_GATHER,
    "all_gather_into_tensor": Operation.ALL_GATHER,
    "broadcast": Operation.BROADCAST,
}


class NodeTransport(MPITransport):
    """An `MPITransport` that also uses the shared memory of a node. `choice.choose` selects the algorithm of each call.

    Args:
        reproducible: as in `MPITransport`. If True and there are several nodes, all reductions use MPI.
        thresholds: the smallest size for each algorithm; equal on all ranks.
        piece_bytes: the size of the largest piece in a ring between nodes; equal on all ranks. None: the result of
            `largest_piece_bytes`.
        ranks_on_node: how many ranks of the job are on this node. None: the number of the group's ranks on this node.
    """

    def __init__(
        self,
        communicator: MPI.Intracomm,
        *,
        reproducible: bool = False,
        thresholds: AlgorithmThresholds | None = None,
        piece_bytes: int | None = None,
        split: SplitByNode = split_by_node,
        ranks_on_node: int | None = None,
    ) -> None:
        super().__init__(communicator, reproducible=reproducible)
        self._thresholds = thresholds or AlgorithmThresholds()
        self._split = split
        with revoked_on_failure(self._private):
            hierarchy = self._hierarchy = Hierarchy(self._private, split)
        self._ranks_on_node = ranks_on_node or hierarchy.node.Get_size()
        shares_memory = hierarchy.shares_memory
        self._capabilities = Capabilities(
            self._size,
            hierarchy.nodes,
            hierarchy.leaders,
            shares_memory,
            shares_memory and hierarchy.fence is not None,
            reproducible,
        )
        inter_node = hierarchy.inter_node
        ring_bytes = self._thresholds.ring_bytes
        self._piece_bytes = piece_bytes or largest_piece_bytes()
        self._between = None
        if inter_node is not None:
            with revoked_on_failure(self._private, inter_node):
                self._between = MPITransport(inter_node, report=self._report)
                self._between.use_ring(ring_bytes, self._piece_bytes)
        # If each rank is alone on its node, the ring goes over all ranks.
        if hierarchy.nodes > 1 and not shares_memory:
            self.use_ring(ring_bytes, self._piece_bytes)
        self._node = Node(
            hierarchy,
            self._private,
            self._messages,
            MessageSync(hierarchy.node, self._report),
            slot_bytes(self._capabilities, self._thresholds),
            self._ranks_on_node,
        )
        self._staging = StagingArea(self._node)
        self._node_reduction = NodeReduction(self._node, self._between, self._size)

    @property
    def compares_every_call(self) -> bool:
        """Whether the ranks compare every call at a barrier in shared memory. False if the ranks are on several nodes."""
        return self._capabilities.nodes == 1 and self._capabilities.has_barrier

    def allocate(self, numel: int, dtype: torch.dtype, call: Call) -> torch.Tensor:
        """Allocate a tensor in a window, filled with zeros, or in plain memory, uninitialised.

        The tensor is in a window only if it is large, and if ranks share a node.
        """
        capabilities = self._capabilities
        # With several nodes, reproducible reductions never use windows.
        is_used = capabilities.shares_memory and (capabilities.nodes == 1 or not capabilities.reproducible)
        if is_used and numel * dtype.itemsize >= self._thresholds.window_bytes:
            made = self._node.allocate(numel, dtype, call)
            if made is not None:
                return made
        return super().allocate(numel, dtype, call)

    @override
    def sync(self, call: Call) -> Sync:
        return self._node.sync(call)

    def barrier(self, call: Call) -> None:
        """Wait for all ranks: in shared memory if all ranks are on one node, otherwise by MPI's barrier."""
        # In shared memory, a comparison of the call is fast, and it is also a barrier.
        if self._capabilities.nodes == 1 and self._capabilities.shares_memory:
            self.sync(call).compare(call)
        else:
            super().barrier(call)

    @override
    def plan(self, signature: Signature) -> Plan:
        operation = _OPERATIONS.get(signature.name)
        if operation is None:  # shared memory does not make the other collectives faster
            return super().plan(signature)
        size = size_of(operation, signature.nbytes, self._size)
        is_native = operation is Operation.ALL_REDUCE and self._native(signature.element_dtype, signature.reduction) is not None
        choice = choose(operation, size, self._capabilities, self._thresholds, is_native=is_native)
        by_mpi = ByMPI(
            self,
            signature,
            "ring" if self.takes_ring(signature) else "MPI",
            compares=self.compares_every_call or size.whole >= PRESYNC_MIN_BYTES,
        )
        in_window: WindowAlgorithm | None = None
        # If these calls never use a window, the ranks need not compare the places of their tensors.
        if may_be_in_window(operation, size, self._capabilities, self._thresholds):
            in_window = (
                SlicesInWindow(self._node, signature, operation)
                if self._capabilities.nodes == 1
                else HierarchicalInWindow(self._node, signature, self._node_reduction)
            )
        where = "" if in_window is None else ", unless in a window"
        logger.debug("rank %d plans %s of %d bytes: %s%s", self._rank, signature.name, size.whole, choice.value, where)
        return NodePlan(self._node, self._algorithm(choice, signature, operation, size) or by_mpi, by_mpi, in_window)

    def _algorithm(self, choice: Choice, signature: Signature, operation: Operation, size: Size) -> Algorithm | None:
        match choice:
            case Choice.EAGER:
                return Eager(self._node, signature, operation, size)
            case Choice.COPY_IN_COPY_OUT:
                return CopyInCopyOut(self._node, signature, operation, self._staging)
            case Choice.HIERARCHICAL:
                return Hierarchical(self._node, self._node_reduction)
            case Choice.MPI:
                return None

    # ---- life ----

    def subset(self, members: Sequence[int], name: str, number: int, scope: CancelScope) -> Transport:
        """See `MPITransport.subset`. The subset has its own windows."""
        return NodeTransport(
            self._communicator_of(members, number),
            reproducible=self._reproducible,
            thresholds=self._thresholds,
            piece_bytes=self._piece_bytes,
            split=self._split,
            ranks_on_node=self._ranks_on_node,
        )

    def give_up(self) -> None:
        """Tell the ranks of this node that this rank makes no more calls."""
        self._node.give_up()

    def interrupt(self) -> None:
        """See `MPITransport.interrupt`. Also revoke the communicators inside and between nodes."""
        super().interrupt()
        revoke((self._hierarchy.node, self._hierarchy.inter_node))

    def abort(self) -> None:
        """Call `give_up`, which wakes only ranks of this node. MPI can wake ranks of other nodes only by ending the job."""
        self.give_up()

    def close(self) -> None:
        """Free all communicators. A window stays as long as the program has tensors in the window."""
        self._staging.forget()
        self._node_reduction.forget()
        self._node.forget()
        if self._between is not None:
            self._between.close()
        self._hierarchy.node.Free()
        super().close()
