"""Reduce-scatter in which the ranks get results of different sizes: as many reductions as there are ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ..reduce_op import Reduction
from ..work import FinishedWork, FutureWork, Work, join_futures
from .layout import untracked


class Reducing(Protocol):
    """What is needed of a process group."""

    @property
    def rank(self) -> int:
        """This process's rank."""

    def place(self) -> str:
        """Where an error happened, in words."""

    def reduce(self, tensor: torch.Tensor, root: int = 0, op: Reduction = ..., *, async_op: bool = False) -> Work:
        """See `ProcessGroup.reduce`."""


def is_uneven(inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the inputs of a reduce-scatter differ in shape; the same on every rank, if the ranks do not disagree."""
    return any(entry.shape != inputs[0].shape for entry in inputs[1:])


def reduce_scatter(
    group: Reducing, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Reduction, async_op: bool
) -> Work:
    """Combine the r-th inputs of all ranks on rank r, for every r.

    Args:
        group: all its ranks call.
        output: like `inputs[rank]`; shares no memory with any input.
        inputs: one for each rank, of any shapes (also without elements); number r has the same shape on every rank.
        op: a reduction that the dtype has.
        async_op: return at once.

    Cost: one `reduce` for each rank.
    """
    with untracked():
        output.copy_(inputs[group.rank])
    terms = [output if rank == group.rank else entry for rank, entry in enumerate(inputs)]
    works = [group.reduce(term, root, op, async_op=async_op) for root, term in enumerate(terms)]
    if not async_op:
        return FinishedWork([output])

    future = join_futures([work.get_future() for work in works], [output])
    return FutureWork(future, [output], lambda: f"reduce_scatter of different sizes on {group.place()}")
