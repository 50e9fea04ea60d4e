"""Compute the time of an all-reduce from latency and bandwidth (the alpha-beta model).

Source: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """A link between two ranks: the latency in seconds, and the bandwidth in bytes per second."""

    latency_s: float
    bandwidth: float


@dataclass(frozen=True)
class CostModel:
    """The cost model for nodes on one network. Each node has the same number of ranks.

    Attributes:
        between: the link between nodes.
        within: the link between the ranks of a node.
        per_node: the number of ranks on each node.
        ring_bytes: nodes reduce in a ring if the tensor has at least this many bytes for each node. Otherwise they use
            recursive halving and doubling. 0: always a ring.
    """

    between: Link
    within: Link
    per_node: int = 1
    ring_bytes: float = 0.0

    def all_reduce_s(self, ranks: int, nbytes: float) -> float:
        """Return the seconds of one all-reduce of `nbytes` bytes on each rank. The ranks fill one node after the other.

        Each node reduces to one rank, which takes part in an all-reduce between the nodes, and sends the result to its node.
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

    Halving and doubling needs 2, 4, 8, ... nodes. With 6 nodes, for example, 2 nodes first send their whole tensors to two of
    the other 4 nodes, and get the result back at the end.
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
