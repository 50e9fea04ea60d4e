"""CostModel computes the time of an all-reduce from latency and bandwidth (the alpha-beta model). All functions are pure.

Source: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A link between two ranks: the latency in seconds until the first byte arrives, and the bandwidth in bytes per second."""

    latency_s: float
    bandwidth: float


@dataclass(frozen=True)
class CostModel:
    """The cost model for nodes on one network. Each node has the same number of ranks.

    Attributes:
        between: the link between nodes.
        within: the link between the ranks of a node. If each node has one rank, this link is not used.
        per_node: the number of ranks on each node.
        ring_bytes: the smallest part for a ring. A part is the tensor's size divided by the number of nodes. If a part has at
            least `ring_bytes` bytes, the nodes reduce in a ring. Otherwise they use recursive halving and doubling. 0: always a
            ring.
    """

    between: Link
    within: Link
    per_node: int = 1
    ring_bytes: float = 0.0

    def all_reduce_s(self, ranks: int, nbytes: float) -> float:
        """Return the seconds of one all-reduce.

        Within a node, the tensors are reduced to one rank, which later sends the result to the other ranks of the node. Between
        nodes, the all-reduce is a ring, or recursive halving and doubling.

        Args:
            ranks: the group's size. The ranks fill one node after the other.
            nbytes: the tensor's bytes on each rank.
        """
        nodes = -(-ranks // self.per_node)
        within_s = _node_s(min(ranks, self.per_node), nbytes, self.within)
        return within_s + between_s(nodes, nbytes, self.between, self.ring_bytes)


def between_s(nodes: int, nbytes: float, link: Link, ring_bytes: float = 0.0) -> float:
    """Return the seconds of an all-reduce between nodes."""
    return messages(nodes, nbytes, ring_bytes) * link.latency_s + volume(nodes, nbytes, ring_bytes) / link.bandwidth


def messages(nodes: int, nbytes: float, ring_bytes: float = 0.0) -> int:
    """Return the number of successive messages in an all-reduce between nodes."""
    if nbytes / nodes >= ring_bytes:
        return 2 * (nodes - 1)
    return 2 * math.floor(math.log2(nodes)) + 2 * (not _is_power_of_two(nodes))


def volume(nodes: int, nbytes: float, ring_bytes: float = 0.0) -> float:
    """Return the number of bytes that a node sends in an all-reduce between nodes.

    Halving and doubling needs a number of nodes that is a power of two. For example, with 6 nodes only 4 nodes do the halving
    and doubling. The other 2 nodes first send their whole tensors to two of the 4 nodes, and get the result back at the end.
    """
    if nbytes / nodes >= ring_bytes or _is_power_of_two(nodes):
        parts: int = nodes
        return 2 * (parts - 1) / parts * nbytes
    parts = 2 ** math.floor(math.log2(nodes))
    return 2 * (parts - 1) / parts * nbytes + 2 * nbytes


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _node_s(size: int, nbytes: float, link: Link) -> float:
    return 0.0 if size == 1 else 2 * (link.latency_s + nbytes / link.bandwidth)
