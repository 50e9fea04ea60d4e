"""Checks of gathering objects and bytes, and of `ProcessGroup.allocate`."""

from __future__ import annotations

import torch

from ...api.object_exchange import all_gather_bytes, exchange_objects
from ...group import ProcessGroup
from .values import MOVABLE_DTYPES, Check, expect_equal, sum_of_terms, terms
from .values import expect as expect_tensor


def gathered(group: ProcessGroup) -> None:
    """Check that each rank gets the objects of all ranks, of different types and lengths, in the order of the ranks."""
    kinds = [{"rank": group.rank, "text": "ä" * 100 * group.rank}, None, list(range(1000 * group.rank))]
    for shift in range(len(kinds)):
        everyone = exchange_objects((group.rank, kinds[(group.rank + shift) % 3]), group=group)
        for rank, (their_rank, theirs) in enumerate(everyone):
            expected = [{"rank": rank, "text": "ä" * 100 * rank}, None, list(range(1000 * rank))][(rank + shift) % 3]
            expect_equal((their_rank, theirs), (rank, expected), f"object of rank {rank}")


def gathered_bytes(group: ProcessGroup) -> None:
    """Check that gathered bytes keep their length, even if the bytes end with zeros or are empty."""
    for longest in (0, 1, 300):
        everyone = all_gather_bytes(bytes(longest * group.rank), group=group)
        expect_equal(everyone, [bytes(longest * rank) for rank in range(group.size)], "bytes of all ranks")


def allocated_memory(group: ProcessGroup) -> None:
    """Check that `allocate` returns a flat tensor of the requested size and dtype, and that collectives accept the tensor.

    One size is an 8-bit integer, chosen so that the tensor's number of bytes does not fit into 8 bits.
    """
    narrow: int = torch.tensor(100, dtype=torch.int8)  # type: ignore[assignment]
    expect_equal(group.allocate(narrow, torch.float32).shape, torch.Size([100]), "shape of memory")
    for numel in (0, 1, 1000):
        for dtype in MOVABLE_DTYPES:
            memory = group.allocate(numel, dtype)
            expect_equal((memory.shape, memory.dtype), (torch.Size([numel]), dtype), "shape and dtype of memory")
        memory = group.allocate(numel, torch.float32)
        memory.copy_(terms((numel,), group.rank))
        group.all_reduce(memory)
        expect_tensor(memory, sum_of_terms((numel,), group.size), f"all_reduce in {numel} allocated elements")


CHECKS: dict[str, Check] = {
    "objects_gathered": gathered,
    "objects_gathered_bytes": gathered_bytes,
    "objects_allocated_memory": allocated_memory,
}
