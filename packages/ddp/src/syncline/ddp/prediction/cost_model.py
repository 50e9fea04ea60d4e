"""CostModel: what an all-reduce takes, by latency and bandwidth (the alpha-beta model). Pure functions.

Source: Thakur, Rabenseifner, Gropp: Optimization of Collective Communication Operations in MPICH, 2005.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """Between two ranks: seconds until the first byte, and bytes in a second after that."""

    latency_s: float
    bandwidth: float


@dataclass(frozen=True)
class CostModel:
    """A ring of nodes, each with so many ranks.

    Attributes:
        between: the link between nodes.
        within: the link between the ranks of a node; not used with one rank on each.
        per_node: ranks of a node.
    """

    between: Link
    within: Link
    per_node: int = 1

    def all_reduce_s(self, ranks: int, nbytes: float) -> float:
        """Seconds of one all-reduce.

        Within a node: reduced to one rank, and sent back. Between nodes: a ring of 2 (nodes - 1) steps.

        Args:
            ranks: of the group; nodes are filled one after the other.
            nbytes: of the tensor, on each rank.
        """
        nodes = -(-ranks // self.per_node)
        return _node_s(min(ranks, self.per_node), nbytes, self.within) + ring_s(nodes, nbytes, self.between)


def ring_s(size: int, nbytes: float, link: Link) -> float:
    """Seconds of an all-reduce around a ring: a reduce-scatter and an all-gather, of size - 1 steps each."""
    return 2 * (size - 1) * (link.latency_s + nbytes / size / link.bandwidth)


def _node_s(size: int, nbytes: float, link: Link) -> float:
    return 0.0 if size == 1 else 2 * (link.latency_s + nbytes / link.bandwidth)
