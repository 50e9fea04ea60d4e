"""Reductions on any memory of ranks of one node, who read one another's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....reduce_op import Reduction
from ....reduction import reduce_into
from .peer_memory import PeerMemory
from .slicing import chunks, slice_of
from .way import Barrier, Way

# What is read at a time, of all together: when it is reduced it is still in the core's cache.
CHUNK_BYTES = 1 << 20


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
        self._size = len(addresses)
        self._others = [rank for rank in range(len(addresses)) if rank != mine]
        self._addresses = addresses
        self._barrier = barrier

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        """Reduce this rank's slice, and fetch the others'."""
        start, stop = slice_of(tensor.numel(), self._size, self._mine)
        own = tensor[start:stop]
        self._reduce(own, own, op, start)
        self._barrier()
        for rank in self._others:
            start, stop = slice_of(tensor.numel(), self._size, rank)
            self._peers.read(rank, self._addresses[rank] + start * tensor.element_size(), tensor[start:stop])
        self._barrier()

    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction) -> None:
        """Reduce this rank's part."""
        start = self._mine * tensor.numel()
        self._reduce(tensor, block[start : start + tensor.numel()], op, start)
        self._barrier()

    def _reduce(self, out: torch.Tensor, own: torch.Tensor, op: Reduction, start: int) -> None:
        """Combine what all ranks have from element `start` on; this rank has it in `own`."""
        size_bytes = own.element_size()
        step = max(1, CHUNK_BYTES // (self._size * size_bytes))
        for begin, end in chunks(0, own.numel(), step):
            terms = self._peers.landing(end - begin, own.dtype)
            terms[self._mine] = own[begin:end]
            for rank in self._others:
                self._peers.read(rank, self._addresses[rank] + (start + begin) * size_bytes, terms[rank])
            reduce_into(out[begin:end], op, terms)
