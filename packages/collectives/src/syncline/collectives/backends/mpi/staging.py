"""Collectives on any memory, through a small window of the group."""

from __future__ import annotations

import torch

from ...reduce_op import Reduction
from ...reduction import reduce_into
from .segment import Segment
from .slicing import chunks, slice_of
from .way import Barrier, Way

HALF_BYTES = 1 << 20
STAGING_BYTES = 2 * HALF_BYTES


class Halves:
    """The window: two halves for each rank, used in turn.

    Note [Halves in turn]
    ~~~~~~~~~~~~~~~~~~~~~
    Chunks use the halves in turn, whatever collectives they belong to, and in each chunk every rank passes a barrier between
    its writing and its reading. So when a rank writes to a half again, in the next chunk but one, everybody has come to the
    barrier of the chunk between, and has therefore done with the half.

    Args:
        segment: with a part of `STAGING_BYTES` for each rank.
        size: the number of ranks.
    """

    def __init__(self, segment: Segment, size: int) -> None:
        self.mine = segment.mine
        self.size = size
        self.others = [rank for rank in range(size) if rank != segment.mine]
        self._segment = segment
        self._turn = 0

    def take(self, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """The beginning of every rank's half whose turn it is."""
        offset_bytes = self._turn * HALF_BYTES
        self._turn = 1 - self._turn
        return [self._segment.view(rank, offset_bytes, numel, dtype) for rank in range(self.size)]


class Staged(Way):
    """What is to be shared is copied in, and what others shared is copied out, chunk by chunk."""

    def __init__(self, halves: Halves, barrier: Barrier) -> None:
        self._halves = halves
        self._mine = halves.mine
        self._size = halves.size
        self._others = halves.others
        self._barrier = barrier

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        """Every rank shows the others' slices, reduces its own, and shows the result: 2 n (p-1)/p + n/p are copied."""
        for start, stop in chunks(0, tensor.numel(), HALF_BYTES // tensor.element_size()):
            shown = self._halves.take(stop - start, tensor.dtype)
            slices = [slice(*slice_of(stop - start, self._size, rank)) for rank in range(self._size)]
            here = [tensor[start:stop][part] for part in slices]
            for rank in self._others:
                shown[self._mine][slices[rank]].copy_(here[rank])
            self._barrier()
            self._reduce_own(here, [row[slices[self._mine]] for row in shown], op)
            self._barrier()
            for rank in self._others:
                here[rank].copy_(shown[rank][slices[rank]])

    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction) -> None:
        """Every rank shows the others' parts, and reduces its own: n (p-1)/p is copied."""
        parts = block.view(self._size, tensor.numel())
        for start, stop in chunks(0, tensor.numel(), max(1, HALF_BYTES // (self._size * tensor.element_size()))):
            shown = [row.view(self._size, -1) for row in self._halves.take(self._size * (stop - start), tensor.dtype)]
            for rank in self._others:
                shown[self._mine][rank].copy_(parts[rank, start:stop])
            self._barrier()
            terms = [row[self._mine] for row in shown]
            terms[self._mine] = parts[self._mine, start:stop]
            reduce_into(tensor[start:stop], op, terms)

    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor) -> None:
        """Every rank shows its tensor: n (p+1)/p is copied."""
        parts = block.view(self._size, tensor.numel())
        if parts[self._mine].data_ptr() != tensor.data_ptr():
            parts[self._mine].copy_(tensor)
        for start, stop in chunks(0, tensor.numel(), HALF_BYTES // tensor.element_size()):
            shown = self._halves.take(stop - start, tensor.dtype)
            shown[self._mine].copy_(tensor[start:stop])
            self._barrier()
            for rank in self._others:
                parts[rank, start:stop].copy_(shown[rank])

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """The root shows its tensor: while the others copy a chunk, it shows the next."""
        for start, stop in chunks(0, tensor.numel(), HALF_BYTES // tensor.element_size()):
            shown = self._halves.take(stop - start, tensor.dtype)
            if self._mine == root:
                shown[root].copy_(tensor[start:stop])
            self._barrier()
            if self._mine != root:
                tensor[start:stop].copy_(shown[root])

    def _reduce_own(self, here: list[torch.Tensor], terms: list[torch.Tensor], op: Reduction) -> None:
        result, own = terms[self._mine], here[self._mine]
        terms[self._mine] = own
        reduce_into(own, op, terms)
        result.copy_(own)
