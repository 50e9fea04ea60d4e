"""Collective: one call, as error messages and the comparison of calls between ranks see it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Collective:
    """One call of a collective.

    Attributes:
        name: the method's name, such as "all_reduce".
        tensor: the tensor whose shape and dtype must be the same on every rank, if there is one.
        detail: what else all ranks must agree on, such as "op=SUM" or "root=0"; empty if nothing.
    """

    name: str
    tensor: torch.Tensor | None = None
    detail: str = ""

    def signature(self) -> str:
        """What must be the same on every rank, in words: "all_reduce(float32[10, 3], op=SUM)"."""
        words = [] if self.tensor is None else [in_words(self.tensor)]
        if self.detail:
            words.append(self.detail)
        return f"{self.name}({', '.join(words)})"


def in_words(tensor: torch.Tensor) -> str:
    """A tensor's dtype and shape: "float32[10, 3]"."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
