"""A way for a reduction to take inside a node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from ...reduce_op import Reduction

Barrier = Callable[[], None]


class Way(ABC):
    """The reductions that gain from shared memory; made for one call, when all ranks have met. Arguments as in `Transport`."""

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        """Combine in place, in rank order."""

    @abstractmethod
    def reduce_scatter(self, tensor: torch.Tensor, block: torch.Tensor, op: Reduction) -> None:
        """Combine the blocks, in rank order, and leave this rank's part in its tensor."""
