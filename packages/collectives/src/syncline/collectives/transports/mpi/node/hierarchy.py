"""Find out which ranks share a node, and choose the ranks that communicate between nodes."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from mpi4py import MPI

from ...shared_memory.os_memory import find_fence

SplitByNode = Callable[[MPI.Intracomm], MPI.Comm]


def split_by_node(communicator: MPI.Intracomm) -> MPI.Comm:
    """Make a communicator of the ranks that can share memory with this rank. The ranks keep their order."""
    return communicator.Split_type(MPI.COMM_TYPE_SHARED, key=communicator.Get_rank())


class Hierarchy:
    """The ranks of a group in two levels: inside each node, and across the nodes. All ranks call the constructor together.

    An all-reduce divides the tensor into slices. On each node, one rank leads each slice. The leader reduces the slice inside
    the node, and then with the leaders of this slice on the other nodes::

        node 0      node 1      node 2
        rank 0 ---- rank 3 ---- rank 5     leaders of slice 0
        rank 1 ---- rank 4 ---- rank 6     leaders of slice 1
        rank 2                             leads none: the smallest node has only two ranks

    Attributes:
        node: the communicator of this rank's node.
        shares_memory: whether any node has more than one rank of the group.
        fence: this processor's memory fence. If one rank has no fence, all ranks have None.
        leaders: the number of leaders on each node. The leaders are the first ranks of the node.
        inter_node: a communicator of the leaders of this rank's slice. None if this rank leads no slice, if there is only one
            node, or if each node has only one rank.
    """

    def __init__(self, communicator: MPI.Intracomm, split: SplitByNode = split_by_node) -> None:
        self.node = MPI.Intracomm(split(communicator))
        size, fence = self.node.Get_size(), find_fence()
        largest, negative_smallest, lacks_fence = _reduced(communicator, MPI.MAX, size, -size, fence is None)
        (self.nodes,) = _reduced(communicator, MPI.SUM, self.node.Get_rank() == 0)
        self.fence = None if lacks_fence else fence
        self.shares_memory = largest > 1
        self.leaders = -negative_smallest
        # With one node, or with one rank on each node, there is only one level.
        self.inter_node = self._split_across(communicator) if self.nodes > 1 and self.shares_memory else None

    def _split_across(self, communicator: MPI.Intracomm) -> MPI.Intracomm | None:
        rank = self.node.Get_rank()
        made = communicator.Split(rank if rank < self.leaders else MPI.UNDEFINED, communicator.Get_rank())
        return None if made == MPI.COMM_NULL else MPI.Intracomm(made)


def _reduced(communicator: MPI.Intracomm, op: MPI.Op, *mine: int) -> array[int]:
    numbers = array("q", mine)
    communicator.Allreduce(MPI.IN_PLACE, [numbers, MPI.INT64_T], op)
    return numbers
