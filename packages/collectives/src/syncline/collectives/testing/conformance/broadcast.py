"""Checks of broadcast: every root, every dtype, every layout."""

from __future__ import annotations

import torch

from ...group import ProcessGroup
from .values import LARGE_NUMEL, LAYOUTS, MOVABLE_DTYPES, SAME_SHAPE, Check, Laid, bits, expect, expect_equal, values


def every_root_and_dtype(group: ProcessGroup) -> None:
    """Check broadcast with every root and dtype: the root's bits must reach all ranks."""
    moved = set()
    for root in range(group.size):
        for dtype in MOVABLE_DTYPES:
            tensor = bits((13,), group.rank, dtype)
            group.broadcast(tensor, root)
            expect(tensor, bits((13,), root, dtype), f"broadcast of {dtype} from rank {root}")
            moved.add((root, dtype))
    expect_equal(len(moved), group.size * len(set(MOVABLE_DTYPES)), "number of broadcasts")


def every_layout(group: ProcessGroup) -> None:
    """Check broadcast of strided tensors, on all ranks. The memory between a tensor's elements must not change."""
    for root in range(group.size):
        for layout in LAYOUTS:
            laid = Laid(layout, values(layout.shape, group.rank))
            group.broadcast(laid.tensor, root)
            laid.expect(values(layout.shape, root))


def layouts_differ_between_ranks(group: ProcessGroup) -> None:
    """Check broadcast with memory layouts that differ between ranks."""
    for root in range(group.size):
        for shift in range(len(SAME_SHAPE)):
            layout = SAME_SHAPE[(group.rank + shift) % len(SAME_SHAPE)]
            laid = Laid(layout, values(layout.shape, group.rank))
            group.broadcast(laid.tensor, root)
            laid.expect(values(layout.shape, root))


def large(group: ProcessGroup) -> None:
    """Check broadcast of tensors of `LARGE_NUMEL` elements, which are all different."""
    root = group.size - 1
    index = torch.arange(LARGE_NUMEL, dtype=torch.int64)
    tensor = index * group.size + group.rank
    group.broadcast(tensor, root)
    expect(tensor, index * group.size + root, f"broadcast of {LARGE_NUMEL} int64")


def lazily_conjugated(group: ProcessGroup) -> None:
    """Check broadcast of a lazy conjugate: the other ranks must get the conjugated values."""
    mine = torch.complex(values((5,), group.rank), values((5,), group.rank + 1))
    for root in range(group.size):
        tensor = mine.clone().conj() if group.rank == root else mine.clone()
        group.broadcast(tensor, root)
        expected = torch.complex(values((5,), root), -values((5,), root + 1))
        expect(tensor.resolve_conj(), expected, f"broadcast of conj() from rank {root}")


CHECKS: dict[str, Check] = {
    "broadcast_every_root_and_dtype": every_root_and_dtype,
    "broadcast_every_layout": every_layout,
    "broadcast_layouts_differ_between_ranks": layouts_differ_between_ranks,
    "broadcast_large": large,
    "broadcast_lazily_conjugated": lazily_conjugated,
}
