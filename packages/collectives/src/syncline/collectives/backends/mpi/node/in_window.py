"""Collectives on tensors that lie in shared memory, at the same place on every rank of a node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ....contract.reduce_op import Reduction
from ....host.reduction import reduce_into
from .slicing import chunks
from .way import Barrier, FullWay
from .window_reduction import WindowAllReduce
from .windows import Place

# What is reduced at a time.
CHUNK_BYTES = 256 << 10


class InWindow(FullWay):
    """What one rank of a node does with everybody's memory.

    Note [Slices]
    ~~~~~~~~~~~~~
    The ranks of a node cut a tensor into one slice for each. A rank touches its own slice only, but that in the memory of all:
    it reads the terms, combines them chunk by chunk, and writes each result into everybody's tensor while it is in the cache.
    So nobody waits in the middle. What remains is

    1. a meeting before: everybody's terms are there, and nobody uses a tensor that belongs to a collective;
    2. a barrier after: all slices have been written, and no rank touches another's tensor any more.

    What a rank wrote before is seen by those that come out: of a board because the processor keeps the order of writes (see
    `is_ordered`), of MPI because it hands its messages over in that way.

    Args:
        place: of this rank's tensor (of the block, where there is one), and so of everybody's.
        barrier: of the ranks on this node.
    """

    def __init__(self, place: Place, barrier: Barrier) -> None:
        self._place = place
        self._mine = place.segment.mine
        self._barrier = barrier

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        """Reduce this rank's slice for everybody."""
        WindowAllReduce(self._place, tensor.numel(), tensor.dtype, op).run()
        self._barrier()

    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction) -> None:
        """Reduce this rank's part of all blocks."""
        start = self._mine * tensor.numel()
        done = 0
        for terms in self.terms(block, start, start + tensor.numel(), CHUNK_BYTES):
            length = terms[0].numel()
            reduce_into(tensor[done : done + length], op, terms)
            done += length
        self._barrier()

    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy this rank's tensor into everybody's block."""
        start = self._mine * tensor.numel()
        for part in self._everybodys(block, start, start + tensor.numel()):
            if part.data_ptr() != tensor.data_ptr():
                part.copy_(tensor)
        self._barrier()

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's tensor into this rank's."""
        if self._mine != root:
            tensor.copy_(self._everybodys(tensor, 0, tensor.numel())[root])
        self._barrier()

    def terms(self, tensor: torch.Tensor, start: int, stop: int, chunk_bytes: int) -> Iterator[list[torch.Tensor]]:
        """What every rank of the node has between two indices, chunk by chunk."""
        rows = self._everybodys(tensor, start, stop)
        for begin, end in chunks(0, stop - start, max(1, chunk_bytes // tensor.element_size())):
            yield [row[begin:end] for row in rows]

    def hand_out(self, copies: Sequence[torch.Tensor]) -> None:
        """Let everybody's copy be what this rank's is."""
        for rank, copy in enumerate(copies):
            if rank != self._mine:
                copy.copy_(copies[self._mine])

    def _everybodys(self, tensor: torch.Tensor, start: int, stop: int) -> list[torch.Tensor]:
        if start == stop:
            return []
        offset_bytes = self._place.offset_bytes + start * tensor.element_size()
        return self._place.segment.rows(offset_bytes, stop - start, tensor.dtype)
