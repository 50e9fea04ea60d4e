"""NodePlan: how ranks that may share a node carry out one signature; and Node, what all plans of a group share."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod

import torch
from mpi4py import MPI

from ....engine.call import Call, Signature
from ....engine.transport import LibraryPlan, LibraryTransport, Plan
from ...shared_memory.segment import Segment
from ..library import Tag
from ..sync import NOWHERE, MessageSync, Sync
from .hierarchy import Hierarchy
from .shared_sync import LEAST_SLOT_BYTES, SharedSync, ShmBarrier, barrier_bytes
from .windows import NodeMemory

logger = logging.getLogger("syncline.collectives")


class Node:
    """What a group has on this node: the memory that its ranks share, and how they come together.

    The barrier in shared memory is made when the ranks first come together. A group that never communicates has none.

    Args:
        hierarchy: who is on which node.
        communicator: of the whole group, private.
        messages: of the whole group.
        local_messages: of the ranks of this node.
        slot_bytes: the size of an eager slot; a multiple of 64, or 0.
        ranks_on_node: how many ranks of the job there are on this node.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        communicator: MPI.Intracomm,
        messages: MessageSync,
        local_messages: MessageSync,
        slot_bytes: int,
        ranks_on_node: int,
    ) -> None:
        self.hierarchy = hierarchy
        self.memory = NodeMemory(hierarchy, communicator, messages)
        self._communicator = communicator
        self._messages = messages
        self._local_messages = local_messages
        self._slot_bytes = max(slot_bytes, LEAST_SLOT_BYTES)
        self._has_own_core = ranks_on_node <= len(os.sched_getaffinity(0))
        self._may_have_barrier = hierarchy.shares_memory and hierarchy.is_ordered
        self._shared: SharedSync | None = None

    def sync(self, call: Call) -> Sync:
        """How all ranks of the group come together. All ranks call it at the same point of their order."""
        return self._messages if self.hierarchy.nodes > 1 else self.shared_sync(call) or self._messages

    def local_sync(self, call: Call) -> Sync:
        """How the ranks of each node come together. All ranks of the group call it at the same point of their order."""
        return self.shared_sync(call) or self._local_messages

    def shared_sync(self, call: Call) -> SharedSync | None:
        """That in shared memory; None, on all ranks, if there can be none."""
        if self._shared is None and self._may_have_barrier:
            self._messages.same(call)
            segment = self.memory.allocate_segment(barrier_bytes(self._slot_bytes), call)
            if segment is None:
                self._may_have_barrier = False
            else:
                probe, rank = self._communicator.Iprobe, self._communicator.Get_rank()
                barrier = ShmBarrier(
                    segment, self._slot_bytes, lambda: probe(rank, Tag.NOTHING), has_own_core=self._has_own_core
                )
                self._shared = SharedSync(barrier, self._messages)
        return self._shared

    def barrier(self, call: Call) -> ShmBarrier | None:
        """The barrier in shared memory, whose slots carry small tensors; as `shared_sync`."""
        shared = self.shared_sync(call)
        return None if shared is None else shared.barrier

    def segment(self, part_bytes: int, call: Call) -> Segment | None:
        """New memory with a part for each rank of a node; None, on all ranks, if it cannot be had."""
        self.sync(call).same(call)
        return self.memory.allocate_segment(part_bytes, call)

    def give_up(self) -> None:
        """Tell the ranks of this node that this rank will not come any more."""
        if self._shared is not None:
            self._shared.give_up()

    def forget(self) -> None:
        """Give the barrier back."""
        self._shared, self._may_have_barrier = None, False


class Algorithm(ABC):
    """Moves the data of calls of one signature, for tensors that lie anywhere.

    Attributes:
        name: in a word or two, for logs.
        compares: whether the ranks must have compared the call before `run`. An algorithm that compares it on its own says no.
    """

    name: str
    compares = True

    def is_ready(self, call: Call) -> bool:
        """Whether it has what it needs; the first call asks for it. A collective; the same on all ranks."""
        return True

    @abstractmethod
    def run(self, part: torch.Tensor, whole: torch.Tensor, call: Call) -> None:
        """As `Plan.run`."""


class ByMPI(Algorithm):
    """MPI's own collective.

    Args:
        transport: has the collective.
        signature: of the calls.
        name: what MPI, or the transport, takes.
        compares: as for `Algorithm`.
    """

    def __init__(self, transport: LibraryTransport, signature: Signature, name: str, *, compares: bool) -> None:
        self.name = name
        self.compares = compares
        self._plan = LibraryPlan(transport, signature)

    def run(self, part: torch.Tensor, whole: torch.Tensor, call: Call) -> None:
        """As `Plan.run`."""
        self._plan.run(part, whole, call)


class InWindow(ABC):
    """Moves the data of calls of one signature, for tensors that lie at one place of a window on all ranks.

    Attributes:
        name: in a word or two, for logs.
    """

    name: str

    @abstractmethod
    def run(self, place: int, part: torch.Tensor, call: Call) -> None:
        """As `Plan.run`; `place` is the key of the place."""


class NodePlan(Plan):
    """One signature, for ranks that may share memory.

    [1] The ranks compare the call, and where their tensors lie.
    [2] If all have the tensor at the same place of a window, it is reduced, or copied, where it lies.
    [3] Else another algorithm moves it. If the memory that the algorithm needs cannot be had, MPI does, from then on.

    Args:
        node: of the group.
        algorithm: for tensors in no window.
        by_mpi: needs nothing.
        in_window: for tensors in a window; None if these calls gain nothing from one.
    """

    def __init__(self, node: Node, algorithm: Algorithm, by_mpi: Algorithm, in_window: InWindow | None = None) -> None:
        self._node = node
        self._algorithm = algorithm
        self._by_mpi = by_mpi
        self._in_window = in_window
        self._latest = algorithm.name

    @property
    def algorithm(self) -> str:
        """The algorithm that the latest run took."""
        return self._latest

    def run(self, part: torch.Tensor, whole: torch.Tensor | None, call: Call) -> None:
        """As `Plan.run`."""
        assert whole is not None
        node, algorithm = self._node, self._algorithm
        looks = self._in_window is not None and node.memory.has_windows
        is_compared = looks or algorithm.compares
        if is_compared:
            place = node.memory.windows.key_of(whole) if looks else NOWHERE
            if node.sync(call).same(call, place):  # [1]
                assert self._in_window is not None
                self._latest = self._in_window.name
                self._in_window.run(place, part, call)  # [2]
                return
        # Only now: where all tensors lie in windows, the memory that others need is never made.
        if not algorithm.is_ready(call):
            logger.debug("no shared memory for %s (%s): %s from now on", call.signature.name, algorithm.name, self._by_mpi.name)
            algorithm = self._algorithm = self._by_mpi
            if algorithm.compares and not is_compared:
                node.sync(call).same(call)
        self._latest = algorithm.name
        algorithm.run(part, whole, call)  # [3]
