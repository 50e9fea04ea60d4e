"""Reductions on any memory, through a small window of the group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ....contract.reduce_op import Reduction
from ....host.reduction import reduce_into
from .segment import Segment
from .slicing import chunks
from .way import Barrier, Way

# Each chunk costs a barrier, which is little where every rank has a core, and much where it has not: so chunks are large.
SLOT_BYTES = 4 << 20
SLOTS = 3
STAGING_BYTES = SLOTS * SLOT_BYTES
_MOST_SHOWN = 64

Slices = Sequence[torch.Tensor]


class Slots:
    """The window: three slots for each rank, used in turn.

    Note [Slots in turn]
    ~~~~~~~~~~~~~~~~~~~~
    Chunks use the slots in turn, whatever collectives they belong to, and every rank passes the same barriers, at least one for
    each chunk. What is written for chunk k is read after a barrier. The last reads of chunk k are over when their rank comes to
    the barrier of chunk k + 1. The first writes of chunk k + 3, to the same slot, come after the barrier of chunk
    k + 1 (`all_reduce` writes one chunk ahead). So nothing is overwritten that somebody still reads, without further barriers.

    Args:
        segment: with a part of `STAGING_BYTES` for each rank.
    """

    def __init__(self, segment: Segment) -> None:
        self.mine = segment.mine
        self.size = segment.parts
        self.others = [rank for rank in range(segment.parts) if rank != segment.mine]
        self._segment = segment
        self._next = 0
        self._shown: dict[tuple[int, int, torch.dtype], list[Slices]] = {}

    def take(self, numel: int, dtype: torch.dtype) -> list[Slices]:
        """The slot whose turn it is: for every rank the beginning of it, cut into a slice for each rank."""
        number = self._next
        self._next = (number + 1) % SLOTS
        shown = self._shown.get((number, numel, dtype))
        if shown is None:
            if len(self._shown) >= _MOST_SHOWN:
                self._shown.clear()
            with torch.inference_mode(False):  # they serve calls outside that mode, too
                rows = self._segment.rows(number * SLOT_BYTES, numel, dtype)
                shown = [row.tensor_split(self.size) for row in rows]
            self._shown[number, numel, dtype] = shown
        return shown


class _Chunk(NamedTuple):
    """Some elements of a tensor, cut into a slice for each rank: where they are, and how every rank shows them."""

    here: Slices
    shown: list[Slices]


class Staged(Way):
    """What is to be shared is copied in, and what others shared is copied out, chunk by chunk."""

    def __init__(self, slots: Slots, barrier: Barrier) -> None:
        self._slots = slots
        self._mine = slots.mine
        self._size = slots.size
        self._others = slots.others
        self._barrier = barrier

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        """Every rank shows the others' slices, reduces its own, and shows the result: 2 n (p-1)/p + n/p are copied.

        It shows the slices of the next chunk before the barrier that says that the results of this one are there: one barrier
        serves for both.
        """
        chunk: _Chunk | None = None
        for piece in torch.split(tensor, SLOT_BYTES // tensor.element_size()):
            following = self._show(piece)
            if chunk is not None:
                self._reduce(chunk, op)
            self._barrier()
            if chunk is not None:
                self._collect(chunk)
            chunk = following
        if chunk is not None:
            self._reduce(chunk, op)
            self._barrier()
            self._collect(chunk)

    def _show(self, piece: torch.Tensor) -> _Chunk:
        chunk = _Chunk(piece.tensor_split(self._size), self._slots.take(piece.numel(), piece.dtype))
        for rank in self._others:
            chunk.shown[self._mine][rank].copy_(chunk.here[rank])
        return chunk

    def _reduce(self, chunk: _Chunk, op: Reduction) -> None:
        own = chunk.here[self._mine]
        terms = [row[self._mine] for row in chunk.shown]
        result, terms[self._mine] = terms[self._mine], own
        reduce_into(own, op, terms)
        result.copy_(own)

    def _collect(self, chunk: _Chunk) -> None:
        for rank in self._others:
            chunk.here[rank].copy_(chunk.shown[rank][rank])

    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction) -> None:
        """Every rank shows the others' parts, and reduces its own: n (p-1)/p is copied."""
        parts = block.view(self._size, tensor.numel())
        for start, stop in chunks(0, tensor.numel(), max(1, SLOT_BYTES // (self._size * tensor.element_size()))):
            shown = self._slots.take(self._size * (stop - start), tensor.dtype)
            for rank in self._others:
                shown[self._mine][rank].copy_(parts[rank, start:stop])
            self._barrier()
            terms = [row[self._mine] for row in shown]
            terms[self._mine] = parts[self._mine, start:stop]
            reduce_into(tensor[start:stop], op, terms)
