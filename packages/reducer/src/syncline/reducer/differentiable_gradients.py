"""Handle gradients that are part of a graph, after `backward(create_graph=True)`."""

from __future__ import annotations

import warnings
from typing import Any

import torch


class _Average(torch.autograd.Function):
    """The reduced gradient as a function of this rank's gradient. The other ranks' gradients count as constants."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, reduced: torch.Tensor, world_size: int) -> torch.Tensor:  # noqa: ARG004 - torch's
        ctx.world_size = world_size
        return reduced.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient / ctx.world_size, None, None


def averaged(local: torch.Tensor, reduced: torch.Tensor, world_size: int) -> torch.Tensor:
    """Return a copy of the reduced gradient that is part of this rank's autograd graph.

    Args:
        local: this rank's gradient, which requires a gradient.
        reduced: the mean over the ranks, in the shape of `local`.
        world_size: the number of ranks.
    """
    with torch.enable_grad():
        return _Average.apply(local, reduced.detach(), world_size)  # type: ignore[no-any-return, no-untyped-call]


def warn_of_graph() -> None:
    """Warn that second derivatives are not averaged. torch's DistributedDataParallel warns of this, too."""
    warnings.warn(
        "backward(create_graph=True): the gradients are averaged, but the reduction is not differentiated through. A "
        "second derivative has only the part of this rank's loss, already divided by the number of ranks: add up the parts of "
        "all ranks yourself",
        stacklevel=2,
    )
