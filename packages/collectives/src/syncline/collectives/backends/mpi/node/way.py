"""A way for a collective to take inside a node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from ....contract.reduce_op import Reduction

Barrier = Callable[[], object]


class Way(ABC):
    """The reductions that gain from shared memory; made for one call. Arguments as in `Transport`."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        """Combine in place, in rank order."""

    @abstractmethod
    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction) -> None:
        """Combine the blocks, in rank order, and leave this rank's part in its tensor."""


class FullWay(Way):
    """Also the moves that gain from it."""

    @abstractmethod
    def all_gather(self, block: torch.Tensor, tensor: torch.Tensor) -> None:
        """Copy rank r's tensor into part r of the block."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        """Copy the root's tensor to all."""
