"""Reductions on any memory of ranks of one node, who read one another's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ....reduce_op import Reduction
from ....reduction import reduce_into
from .peer_memory import PeerMemory
from .slicing import chunks, slice_of
from .way import Barrier, Way

# What is read at a time: when it is reduced it is still in the core's cache.
CHUNK_BYTES = 256 << 10

#: Lets all ranks meet, and returns the addresses that they gave.
MeetWithAddress = Callable[[int], Sequence[int]]


class SingleCopy(Way):
    """What a rank needs of another one it copies from there, at once: not into shared memory first.

    The ranks meet and say where their tensors lie. As in a window (see Note [Slices]), each reduces a slice; but it fetches
    the terms, and when all have done so the others' results. A barrier at the end lets nobody change what another one reads.
    MPI libraries move large messages in the same way; broadcast and all_gather have nothing to gain.

    Args:
        peers: the memory of all ranks.
        mine: this rank.
        size: how many there are.
        meet: of all ranks, for this call.
        barrier: of all ranks.
    """

    def __init__(self, peers: PeerMemory, mine: int, size: int, meet: MeetWithAddress, barrier: Barrier) -> None:
        self._peers = peers
        self._mine = mine
        self._size = size
        self._others = [rank for rank in range(size) if rank != mine]
        self._meet = meet
        self._barrier = barrier

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        """Reduce this rank's slice, and fetch the others'."""
        addresses = self._meet(tensor.data_ptr())
        start, stop = slice_of(tensor.numel(), self._size, self._mine)
        self._reduce(tensor[start:stop], tensor[start:stop], op, addresses, start)
        self._barrier()
        for rank in self._others:
            start, stop = slice_of(tensor.numel(), self._size, rank)
            self._peers.read(rank, addresses[rank] + start * tensor.element_size(), tensor[start:stop])
        self._barrier()

    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction) -> None:
        """Reduce this rank's part."""
        addresses = self._meet(block.data_ptr())
        start = self._mine * tensor.numel()
        self._reduce(tensor, block[start : start + tensor.numel()], op, addresses, start)
        self._barrier()

    def _reduce(self, out: torch.Tensor, own: torch.Tensor, op: Reduction, addresses: Sequence[int], start: int) -> None:
        """Combine what all ranks have from element `start` on; this rank has it in `own`."""
        size_bytes = own.element_size()
        step = max(1, CHUNK_BYTES // size_bytes)
        fetched = own.new_empty((self._size, min(step, own.numel())))
        for begin, end in chunks(0, own.numel(), step):
            terms = list(fetched[:, : end - begin])
            terms[self._mine] = own[begin:end]
            for rank in self._others:
                self._peers.read(rank, addresses[rank] + (start + begin) * size_bytes, terms[rank])
            reduce_into(out[begin:end], op, terms)
