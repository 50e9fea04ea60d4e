"""Reductions of sparse tensors: by gathering, for their elements lie elsewhere on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ..errors import InvalidArgumentError
from .layout import untracked
from .reduce_op import PremulSum, ReduceOp, Reduction
from .work import FutureWork, TensorsFuture, Work


class Gatherer(Protocol):
    """What is needed of a process group."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def place(self) -> str:
        """Where an error happened, in words."""

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, async_op: bool = False) -> Work:
        """See `ProcessGroup.all_gather`."""


def all_reduce(group: Gatherer, tensor: torch.Tensor, op: Reduction, async_op: bool) -> Work:
    """Add up the COO tensors of all ranks, in place; every rank ends with the same elements and bits, coalesced.

    Args:
        group: all its ranks call.
        tensor: sparse COO; shape, dtype and number of sparse dimensions the same on every rank, any number of elements.
        op: SUM, AVG or a `premul_sum`.
        async_op: return at once.

    Cost: an all-gather of the element counts, then one of indices and one of values, each padded to the longest: p times
    the longest rank's bytes on the wire, for p ranks. Not worth it where most elements are present.
    """
    if not (isinstance(op, PremulSum) or op in (ReduceOp.SUM, ReduceOp.AVG)):
        raise InvalidArgumentError(
            f"all_reduce on {group.place()}: a sparse tensor can be reduced by SUM, AVG and premul_sum, found {op.name}; "
            "pass tensor.to_dense()"
        )
    mine = tensor.detach().coalesce()
    count = torch.tensor([mine._nnz()], device=tensor.device)
    counts = [torch.empty_like(count) for _ in range(group.size)]

    def gather_elements(done: Any) -> list[torch.Tensor]:
        done.value()
        with untracked():
            tensor.copy_(_total(group, mine, [int(entry) for entry in counts], op))
        return [tensor]

    future: TensorsFuture = group.all_gather(counts, count, async_op=True).get_future().then(gather_elements)
    work = FutureWork(future, [tensor], lambda: f"all_reduce of a sparse tensor on {group.place()}")
    if not async_op:
        work.wait()
    return work


def _total(group: Gatherer, mine: torch.Tensor, counts: list[int], op: Reduction) -> torch.Tensor:
    """Issued from a callback, so it runs before whatever was issued after it: see Note [One total order] in `progress`."""
    values = mine.values()
    if isinstance(op, PremulSum):
        values = values * op.factor
    all_indices = _gather_rows(group, mine.indices().t(), counts)
    all_values = _gather_rows(group, values, counts)
    if op is ReduceOp.AVG:
        all_values = all_values / group.size
    return torch.sparse_coo_tensor(all_indices.t(), all_values, mine.shape, check_invariants=True).coalesce()


def _gather_rows(group: Gatherer, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: rows.shape[0]] = rows
    gathered = [torch.empty_like(padded) for _ in counts]
    group.all_gather(gathered, padded)
    return torch.cat([entry[:count] for entry, count in zip(gathered, counts, strict=True)])
