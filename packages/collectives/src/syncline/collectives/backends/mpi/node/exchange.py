"""Collectives of ranks that share a node and look at everything: each shows its tensor to all."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....contract.reduce_op import Reduction
from ....host.reduction import reduce_into
from .board import Board
from .way import Barrier, FullWay

# More ranks than these would read more than MPI's trees move.
MOST_RANKS = 8

# Two slots stay in a core's cache. As much as two ranks exchange by default, so in one piece.
SLOT_BYTES = 512 << 10


class Exchange(FullWay):
    """Each rank copies its tensor to the board, piece by piece, and does with everybody's what it needs.

    A piece costs one arrival (see Note [Arrivals in turn]), and each rank reads p n bytes. That is the fastest where a tensor
    is so small that arrivals are what counts. Every rank reduces everything, in rank order, so all get the same bits.

    Args:
        board: of all ranks of the group.
        arrive: lets them arrive there, for this call.
    """

    def __init__(self, board: Board, arrive: Barrier) -> None:
        self._board = board
        self._mine = board.mine
        self._arrive = arrive

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        """Reduce everything."""
        for piece in self._pieces(tensor):
            reduce_into(piece, op, self._shown(piece))

    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction) -> None:
        """Reduce this rank's part."""
        rows = block.view(self._board.size, tensor.numel())
        step = self._board.slot_bytes // (self._board.size * tensor.element_size())
        for start in range(0, tensor.numel(), step):
            columns = rows[:, start : start + step]
            terms = [row.view(columns.shape)[self._mine] for row in self._shown(columns.reshape(-1))]
            reduce_into(tensor[start : start + step], op, terms)

    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy everybody's tensor."""
        rows = block.view(self._board.size, tensor.numel())
        start = 0
        for piece in self._pieces(tensor):
            shown = self._shown(piece)
            stop = start + piece.numel()
            for row, part in zip(rows, shown, strict=True):
                row[start:stop].copy_(part)
            start = stop

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's tensor."""
        for piece in self._pieces(tensor):
            if self._mine == root:
                self._shown(piece)
            else:
                shown = self._board.slots(piece.numel(), piece.dtype)[root]
                self._arrive()
                piece.copy_(shown)

    def _shown(self, piece: torch.Tensor) -> list[torch.Tensor]:
        """What everybody shows, when this rank shows a piece: valid until it arrives again."""
        slots = self._board.slots(piece.numel(), piece.dtype)
        slots[self._mine].copy_(piece)
        self._arrive()
        return slots

    def _pieces(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        if tensor.nbytes <= self._board.slot_bytes:
            return (tensor,)
        return torch.split(tensor, self._board.slot_bytes // tensor.element_size())
