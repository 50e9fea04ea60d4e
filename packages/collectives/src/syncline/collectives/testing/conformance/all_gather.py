"""Checks of all_gather: every dtype, every layout, outputs that share memory with the input."""

from __future__ import annotations

import torch

from ...group import ProcessGroup
from .values import LARGE_NUMEL, LAYOUTS, MOVABLE_DTYPES, SAME_SHAPE, Check, Laid, bits, expect, values


def every_dtype(group: ProcessGroup) -> None:
    """Check all_gather with every dtype: output r must hold rank r's values, and the input must not change."""
    for dtype in MOVABLE_DTYPES:
        tensor = bits((13,), group.rank, dtype)
        outputs = [torch.zeros(13, dtype=dtype) for _ in range(group.size)]
        group.all_gather(outputs, tensor)
        for rank, output in enumerate(outputs):
            expect(output, bits((13,), rank, dtype), f"all_gather of {dtype}, output {rank}")
        expect(tensor, bits((13,), group.rank, dtype), f"all_gather of {dtype}, input")


def every_layout(group: ProcessGroup) -> None:
    """Check all_gather with strided inputs and outputs. The memory between a tensor's elements must not change."""
    for layout in LAYOUTS:
        mine = Laid(layout, values(layout.shape, group.rank))
        outputs = [Laid(layout, values(layout.shape, group.size)) for _ in range(group.size)]
        group.all_gather([output.tensor for output in outputs], mine.tensor)
        for rank, output in enumerate(outputs):
            output.expect(values(layout.shape, rank))
        mine.expect(values(layout.shape, group.rank))


def layouts_differ(group: ProcessGroup) -> None:
    """Check all_gather with memory layouts that differ between ranks, and between input and outputs."""
    laid = [Laid(layout, values(layout.shape, group.rank)) for layout in SAME_SHAPE]
    mine = laid[group.rank % len(laid)]
    outputs = [Laid(SAME_SHAPE[(group.rank + r) % len(laid)], values((4, 5), group.size)) for r in range(group.size)]
    group.all_gather([output.tensor for output in outputs], mine.tensor)
    for rank, output in enumerate(outputs):
        output.expect(values((4, 5), rank))


def into_rows_and_columns(group: ProcessGroup) -> None:
    """Check all_gather with outputs that are rows or columns of one tensor."""
    rows = torch.zeros(group.size, 7)
    group.all_gather(list(rows), values((7,), group.rank))
    columns = torch.zeros(7, group.size)
    group.all_gather(list(columns.t()), values((7,), group.rank))
    for rank in range(group.size):
        expect(rows[rank], values((7,), rank), f"row {rank}")
        expect(columns[:, rank], values((7,), rank), f"column {rank}")


def input_is_one_of_the_outputs(group: ProcessGroup) -> None:
    """Check all_gather with an input that is also one of the outputs, for this rank or for another rank."""
    for shift in range(group.size):
        rows = torch.zeros(group.size, 7)
        mine = rows[(group.rank + shift) % group.size]
        mine.copy_(values((7,), group.rank))
        group.all_gather(list(rows), mine)
        for rank in range(group.size):
            expect(rows[rank], values((7,), rank), f"row {rank}, where the input lies {shift} rows from its place")


def large(group: ProcessGroup) -> None:
    """Check all_gather with tensors of `LARGE_NUMEL` elements, which are all different."""
    index = torch.arange(LARGE_NUMEL, dtype=torch.int64)
    outputs = [torch.empty_like(index) for _ in range(group.size)]
    group.all_gather(outputs, index * group.size + group.rank)
    for rank, output in enumerate(outputs):
        expect(output, index * group.size + rank, f"{LARGE_NUMEL} int64 of rank {rank}")


def lazily_conjugated(group: ProcessGroup) -> None:
    """Check all_gather with lazy conjugates (`is_conj`) as input and as outputs."""
    mine = torch.complex(values((5,), group.rank), values((5,), group.rank + 1))
    outputs = [torch.zeros(5, dtype=torch.complex64) for _ in range(group.size)]
    group.all_gather(outputs, mine.conj())
    marked = [torch.zeros(5, dtype=torch.complex64).conj() for _ in range(group.size)]
    group.all_gather(marked, mine)
    for rank in range(group.size):
        real, imaginary = values((5,), rank), values((5,), rank + 1)
        expect(outputs[rank], torch.complex(real, -imaginary), f"conj() of rank {rank}")
        expect(marked[rank].resolve_conj(), torch.complex(real, imaginary), f"rank {rank}'s, into a conj()")


CHECKS: dict[str, Check] = {
    "all_gather_every_dtype": every_dtype,
    "all_gather_every_layout": every_layout,
    "all_gather_layouts_differ": layouts_differ,
    "all_gather_into_rows_and_columns": into_rows_and_columns,
    "all_gather_input_is_one_of_the_outputs": input_is_one_of_the_outputs,
    "all_gather_large": large,
    "all_gather_lazily_conjugated": lazily_conjugated,
}
