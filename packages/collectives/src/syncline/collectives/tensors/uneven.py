"""Reduce-scatter with results of different sizes, made of one `reduce` to each rank."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from ..reduce_op import Reduction
from ..work import FinishedWork, FutureWork, Work, join_futures
from .layout import in_plain_order, untracked


class Reducing(Protocol):
    """The methods of a process group that this module calls."""

    @property
    def rank(self) -> int:
        """This process's rank."""

    def place(self) -> str:
        """This rank and the group in words, for errors."""

    def marked(self, mark: str) -> AbstractContextManager[None]:
        """See `ProcessGroup.marked`."""

    def reduce(self, tensor: torch.Tensor, root: int = 0, op: Reduction = ..., *, async_op: bool = False) -> Work:
        """See `ProcessGroup.reduce`."""


def is_uneven(inputs: Sequence[torch.Tensor]) -> bool:
    """Whether the inputs of a reduce-scatter differ in shape."""
    return any(entry.shape != inputs[0].shape for entry in inputs[1:])


def reduce_scatter(
    group: Reducing, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: Reduction, async_op: bool
) -> Work:
    """Combine `inputs[r]` of all ranks into `output` on rank r, for every r. All ranks of the group call this function.

    Args:
        group: the process group.
        output: the shape and dtype of `inputs[rank]`. Shares no memory with any input.
        inputs: one tensor for each rank, of any shape. `inputs[r]` has the same shape on every rank.
        op: a reduction that is defined for the dtype.
        async_op: if true, do not wait for the result.

    Cost: one `reduce` for each rank.
    """
    # `reduce` overwrites the root's tensor, but inputs must not change. So in the `reduce` to this rank, pass the output.
    with untracked():
        output.copy_(inputs[group.rank])
    # `reduce` takes only tensors that it may write. So copy inputs that are not contiguous, such as expanded inputs.
    terms = [output if rank == group.rank else in_plain_order(entry) for rank, entry in enumerate(inputs)]
    works = []
    for root, term in enumerate(terms):
        with group.marked("in reduce_scatter"):  # the program called reduce_scatter, so errors must name it, too
            works.append(group.reduce(term, root, op, async_op=async_op))
    if not async_op:
        return FinishedWork([output])

    future = join_futures([work.get_future() for work in works], [output])
    return FutureWork(future, [output], lambda: f"reduce_scatter of different sizes on {group.place()}")
