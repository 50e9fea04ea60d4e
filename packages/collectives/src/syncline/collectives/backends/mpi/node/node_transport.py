"""The collectives that gain from memory which the ranks of a node share."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from mpi4py import MPI
from typing_extensions import override

from ....contract.collective import Collective
from ....contract.deadline import Deadline
from ....contract.reduce_op import Reduction
from ....contract.running_call import RunningCall
from ....host.transport import CallKind, Transport
from ....startup.algorithm_thresholds import AlgorithmThresholds
from ..fault_tolerance import revoke, revoked_on_failure
from ..ring_all_reduce import largest_piece_bytes
from ..transport import MPITransport
from .algorithm import Algorithm, Capabilities, Operation, choose, may_be_in_window, size_of, slot_bytes
from .copy_in_copy_out import CopyInCopyOut, StagingArea
from .eager_exchange import EagerExchange
from .group_sync import GroupSync
from .hierarchical_all_reduce import HierarchicalAllReduce, HierarchicalWindow, NodeReduction
from .hierarchy import Hierarchy, SplitByNode, split_by_node
from .plan import ByMpi, MpiPlan, NodePlan, PlanRequest
from .window_collective import WindowCollective
from .windows import NodeMemory

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
    """`MPITransport`, but ranks of one node use memory that they share where they gain from it; see `algorithm.choose`.

    Args:
        communicator: as for `MPITransport`.
        reproducible: as for `MPITransport`. All goes by MPI then where there are several nodes: the order of what is done in a
            node and between nodes depends on who is where.
        thresholds: the same on all ranks.
        piece_bytes: the largest piece of a ring of nodes, the same on all ranks; None: what this rank would send.
        split: says who shares memory with whom.
        ranks_on_node: how many ranks of the job there are on this node; None: those of this group.
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
            self._size, hierarchy.nodes, hierarchy.leaders, shares_memory, shares_memory and hierarchy.is_ordered, reproducible
        )
        inter_node = hierarchy.inter_node
        ring_bytes = self._thresholds.ring_bytes
        self._piece_bytes = piece_bytes or largest_piece_bytes()
        self._between = None
        if inter_node is not None:
            with revoked_on_failure(self._private, inter_node):
                self._between = MPITransport(inter_node, report=self._report)
                self._between.use_ring(ring_bytes, self._piece_bytes)
        if hierarchy.nodes > 1 and not shares_memory:
            self.use_ring(ring_bytes, self._piece_bytes)
        self._memory = NodeMemory(hierarchy, self._private, self._verifier)
        slot = slot_bytes(self._capabilities, self._thresholds)
        self._sync = GroupSync(hierarchy, self._private, self._verifier, self._memory, slot, self._ranks_on_node)
        self._staging = StagingArea(self._memory, self._sync)
        self._node_reduction = NodeReduction(hierarchy, self._between, self._memory, self._sync, self._size)

    @property
    def verifies_every_call(self) -> bool:
        """On one node: in shared memory that costs next to nothing."""
        return self._capabilities.nodes == 1 and self._capabilities.has_barrier

    def allocate(self, numel: int, dtype: torch.dtype, call: RunningCall) -> torch.Tensor:
        """Memory in a window, filled with zeros, if it is large enough to gain from it and any ranks share a node."""
        capabilities = self._capabilities
        is_used = capabilities.shares_memory and (capabilities.nodes == 1 or not capabilities.reproducible)
        if is_used and numel * dtype.itemsize >= self._thresholds.window_bytes:
            self._sync.verify(lambda _: call.collective, None, call.deadline)
            made = self._memory.allocate(numel, dtype, call)
            if made is not None:
                return made
        return super().allocate(numel, dtype, call)

    # ---- plans ----

    def plan(self, kind: CallKind, call: Collective | None = None) -> NodePlan:
        """As `Transport.plan`.

        Args:
            kind: of the calls to come.
            call: stands for every call in messages; None: each stands for itself.
        """
        operation, part_bytes = _OPERATIONS[kind.name], kind.numel * kind.dtype.itemsize
        size = size_of(operation, part_bytes, self._size)
        is_native = operation is Operation.ALL_REDUCE and kind.op is not None and self._native(kind.dtype, kind.op) is not None
        chosen = choose(operation, size, self._capabilities, self._thresholds, is_native=is_native)
        request = PlanRequest(kind, operation, size, call, self._sync)
        plan: NodePlan = MpiPlan(request, self._by_mpi(operation, kind), verifies_all=self.verifies_every_call)
        if is_native and self._takes_ring(size.whole, kind.dtype):
            plan.chosen = Algorithm.RING
        if chosen is Algorithm.EAGER:
            plan = EagerExchange(request, plan)
        elif chosen is Algorithm.COPY_IN_COPY_OUT:
            plan = CopyInCopyOut(request, self._staging, plan)
        elif chosen is Algorithm.HIERARCHICAL:
            plan = HierarchicalAllReduce(request, self._node_reduction, plan)
        in_window = may_be_in_window(operation, size, self._capabilities, self._thresholds)
        if in_window and self._capabilities.nodes > 1:
            plan = HierarchicalWindow(request, self._memory, self._node_reduction, plan)
        elif in_window:
            plan = WindowCollective(request, self._memory, plan)
        where = ", unless in a window" if in_window else ""
        logger.debug("rank %d plans %s of %d bytes: %s%s", self._rank, kind.name, size.whole, chosen.value, where)
        return plan

    def _by_mpi(self, operation: Operation, kind: CallKind) -> ByMpi:
        op, root = kind.op, kind.root or 0
        if operation is Operation.ALL_GATHER:
            return lambda tensor, whole, call: self.all_gather_synced(whole, tensor, call)
        if operation is Operation.BROADCAST:
            return lambda tensor, _, call: self.broadcast_synced(tensor, root, call)
        assert op is not None
        if operation is Operation.ALL_REDUCE:
            return lambda tensor, _, call: self.all_reduce_synced(tensor, op, call)
        return lambda tensor, whole, call: self.reduce_scatter_synced(tensor, whole, op, call)

    # ---- single calls: a plan that is dropped ----

    @override
    def all_reduce(self, tensor: torch.Tensor, op: Reduction, call: RunningCall) -> None:
        self._run_once("all_reduce", op, None, tensor, tensor, call)

    @override
    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction, call: RunningCall) -> None:
        self._run_once("reduce_scatter", op, None, tensor, block, call)

    @override
    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor, call: RunningCall) -> None:
        self._run_once("all_gather", None, None, tensor, block, call)

    @override
    def broadcast(self, tensor: torch.Tensor, root: int, call: RunningCall) -> None:
        self._run_once("broadcast", None, root, tensor, tensor, call)

    def barrier(self, call: RunningCall) -> None:
        """In shared memory, or MPI's."""
        if self._capabilities.nodes == 1 and self._capabilities.shares_memory:
            self._sync.verify(lambda _: call.collective, None, call.deadline)
        else:
            super().barrier(call)

    def _verify(self, call: RunningCall) -> None:
        self._sync.verify(lambda _: call.collective, None, call.deadline)

    def _run_once(
        self, name: str, op: Reduction | None, root: int | None, tensor: torch.Tensor, whole: torch.Tensor, call: RunningCall
    ) -> None:
        kind = CallKind(name, op, root, tensor.dtype, tensor.numel())
        self.plan(kind, call.collective).run(tensor, whole, call.deadline)

    # ---- life ----

    def subset(self, members: Sequence[int], name: str, number: int, deadline: Deadline) -> Transport:
        """As `MPITransport`, with windows of its own."""
        return NodeTransport(
            self._communicator_of(members, number),
            reproducible=self._reproducible,
            thresholds=self._thresholds,
            piece_bytes=self._piece_bytes,
            split=self._split,
            ranks_on_node=self._ranks_on_node,
        )

    def give_up(self) -> None:
        """Ranks of the node that wait for this one hear of it."""
        self._sync.give_up()

    def interrupt(self) -> None:
        """As `MPITransport`, and those of the node and between nodes."""
        super().interrupt()
        revoke((self._hierarchy.node, self._hierarchy.inter_node))

    def abort(self) -> None:
        """The same; MPI has no way to wake the ranks of other nodes short of ending the job."""
        self._sync.give_up()

    def close(self) -> None:
        """Free all communicators; memory lasts as long as tensors lie in it."""
        self._staging.forget()
        self._node_reduction.forget()
        self._sync.forget()
        if self._between is not None:
            self._between.close()
        self._hierarchy.node.Free()
        super().close()
