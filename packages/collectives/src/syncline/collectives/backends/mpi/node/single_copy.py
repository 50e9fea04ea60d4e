"""Collectives of ranks that share a node and may read one another's memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....contract.layout import mark_written
from ....contract.reduce_op import Reduction
from .peer_memory import PeerMemory
from .slice_reduction import SlicedAllReduce, SliceReduction
from .way import Barrier, Way


class SingleCopy(Way):
    """What a rank needs of another one it copies from there, at once: not into shared memory first.

    The ranks have met and said where their tensors lie. As in a window (see Note [Slices]), each reduces a slice; but it
    fetches the terms, and when all have done so the others' results. A barrier at the end lets nobody change what another
    one reads. MPI libraries move large messages in the same way; broadcast and all_gather have nothing to gain.

    Args:
        peers: the memory of all ranks.
        mine: this rank.
        addresses: where each rank has its tensor, or block.
        barrier: of all ranks.
    """

    def __init__(self, peers: PeerMemory, mine: int, addresses: Sequence[int], barrier: Barrier) -> None:
        self._peers = peers
        self._mine = mine
        self._addresses = addresses
        self._barrier = barrier

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        """Reduce this rank's slice, and fetch the others'."""
        reduction = SlicedAllReduce(self._peers, self._mine, tensor.numel(), tensor.dtype, op)
        reduction.run(tensor, self._addresses, self._barrier)

    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction) -> None:
        """Reduce this rank's part."""
        start = self._mine * tensor.numel()
        stop = start + tensor.numel()
        reduction = SliceReduction(self._peers, self._mine, start, stop, tensor.dtype, op)
        reduction.run(reduction.plan(block[start:stop], tensor), self._addresses)
        self._barrier()
        mark_written(tensor)
