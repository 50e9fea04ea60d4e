"""Checks of reduce, gather and scatter: every root, every dtype, every layout."""

from __future__ import annotations

import torch

from ...group import ProcessGroup
from ...reduce_op import DTYPES_OF, ReduceOp
from .values import (
    LARGE_NUMEL,
    LAYOUTS,
    MOVABLE_DTYPES,
    Check,
    Laid,
    bits,
    expect,
    expect_equal,
    expect_reduced,
    random_terms,
    reduction,
    sum_of_terms,
    terms,
    values,
)


def reduce_every_root_dtype_and_reduction(group: ProcessGroup) -> None:
    """Check reduce with every root, dtype and reduction: the root gets the result, and other ranks' tensors do not change."""
    reduced = set()
    for op in ReduceOp:
        for dtype in sorted(DTYPES_OF[op], key=str):
            inputs = [random_terms(op, (13,), rank, dtype) for rank in range(group.size)]
            for root in range(group.size):
                tensor = inputs[group.rank].clone()
                group.reduce(tensor, root, reduction(op))
                what = f"reduce {op.name} of {dtype} to rank {root}"
                if group.rank == root:
                    expect_reduced(tensor, op, inputs, what)
                else:
                    expect(tensor, inputs[group.rank], f"{what}, on rank {group.rank}")
                reduced.add((root, op, dtype))
    expect_equal(len(reduced), group.size * sum(map(len, DTYPES_OF.values())), "number of reductions")


def reduce_every_layout(group: ProcessGroup) -> None:
    """Check reduce with strided tensors. The memory between a tensor's elements must not change."""
    root = group.size - 1
    for layout in LAYOUTS:
        laid = Laid(layout, terms(layout.shape, group.rank))
        group.reduce(laid.tensor, root)
        laid.expect(sum_of_terms(layout.shape, group.size) if group.rank == root else terms(layout.shape, group.rank))


def gather_every_root_and_dtype(group: ProcessGroup) -> None:
    """Check gather with every root and dtype: the root's output r must hold rank r's values."""
    for root in range(group.size):
        for dtype in MOVABLE_DTYPES:
            outputs = [torch.zeros(13, dtype=dtype) for _ in range(group.size)] if group.rank == root else None
            group.gather(bits((13,), group.rank, dtype), outputs, root)
            for rank, output in enumerate(outputs or ()):
                expect(output, bits((13,), rank, dtype), f"gather of {dtype} to rank {root}, output {rank}")


def gather_every_layout(group: ProcessGroup) -> None:
    """Check gather with strided inputs and outputs."""
    for layout in LAYOUTS:
        mine = Laid(layout, values(layout.shape, group.rank))
        outputs = [Laid(layout, values(layout.shape, group.size)) for _ in range(group.size)] if group.rank == 0 else []
        group.gather(mine.tensor, [output.tensor for output in outputs] if group.rank == 0 else None, 0)
        for rank, output in enumerate(outputs):
            output.expect(values(layout.shape, rank))
        mine.expect(values(layout.shape, group.rank))


def scatter_every_root_and_dtype(group: ProcessGroup) -> None:
    """Check scatter with every root and dtype: rank r must get entry r of the root's list."""
    for root in range(group.size):
        for dtype in MOVABLE_DTYPES:
            entries = [bits((13,), 2 * root + rank, dtype) for rank in range(group.size)]
            tensor = torch.zeros(13, dtype=dtype)
            group.scatter(tensor, entries if group.rank == root else None, root)
            expect(tensor, bits((13,), 2 * root + group.rank, dtype), f"scatter of {dtype} from rank {root}")


def scatter_every_layout(group: ProcessGroup) -> None:
    """Check scatter with strided inputs and outputs."""
    root = group.size - 1
    for layout in LAYOUTS:
        entries = [Laid(layout, values(layout.shape, rank)) for rank in range(group.size)] if group.rank == root else []
        mine = Laid(layout, values(layout.shape, group.size))
        group.scatter(mine.tensor, [entry.tensor for entry in entries] if group.rank == root else None, root)
        mine.expect(values(layout.shape, group.rank))


def large(group: ProcessGroup) -> None:
    """Check tensors of `LARGE_NUMEL` elements."""
    root = group.size - 1
    is_root = group.rank == root
    tensor = terms((LARGE_NUMEL,), group.rank)
    group.reduce(tensor, root)
    if is_root:
        expect(tensor, sum_of_terms((LARGE_NUMEL,), group.size), f"reduce of {LARGE_NUMEL} elements")
    rows = [torch.zeros(LARGE_NUMEL) for _ in range(group.size)] if is_root else None
    group.gather(values((LARGE_NUMEL,), group.rank), rows, root)
    for rank, row in enumerate(rows or ()):
        expect(row, values((LARGE_NUMEL,), rank), f"gather of {LARGE_NUMEL} elements, output {rank}")
    group.scatter(tensor, rows, root)
    expect(tensor, values((LARGE_NUMEL,), group.rank), f"scatter of {LARGE_NUMEL} elements")


def scatter_in_place(group: ProcessGroup) -> None:
    """Check scatter if the root's output is also the root's own entry of the inputs."""
    for root in range(group.size):
        tensor = values((5,), root)
        inputs = [tensor if rank == root else values((5,), rank) for rank in range(group.size)]
        group.scatter(tensor, inputs if group.rank == root else None, root)
        expect(tensor, values((5,), group.rank), f"scatter in place from {root}")


def roots_of_other_types(group: ProcessGroup) -> None:
    """Check that ranks can pass the root as different types of integer: an int on even ranks, a tensor on odd ranks."""
    for root in range(group.size):
        given: int = root if group.rank % 2 == 0 else torch.tensor(root)  # type: ignore[assignment]
        tensor = values((13,), group.rank)
        group.broadcast(tensor, given)
        expect(tensor, values((13,), root), f"broadcast from rank {root}")
        tensor = terms((13,), group.rank)
        group.reduce(tensor, given)
        if group.rank == root:
            expect(tensor, sum_of_terms((13,), group.size), f"reduce to rank {root}")
        block = [torch.zeros(13) for _ in range(group.size)] if group.rank == root else None
        group.gather(values((13,), group.rank), block, given)
        tensor = torch.zeros(13)
        group.scatter(tensor, block, given)
        expect(tensor, values((13,), group.rank), f"scatter from rank {root} of what it has gathered")
    group.barrier()  # the ranks compare the calls here, if they have not compared them before


CHECKS: dict[str, Check] = {
    "roots_of_other_types": roots_of_other_types,
    "reduce_every_root_dtype_and_reduction": reduce_every_root_dtype_and_reduction,
    "reduce_every_layout": reduce_every_layout,
    "gather_every_root_and_dtype": gather_every_root_and_dtype,
    "gather_every_layout": gather_every_layout,
    "scatter_every_root_and_dtype": scatter_every_root_and_dtype,
    "scatter_every_layout": scatter_every_layout,
    "scatter_in_place": scatter_in_place,
    "reduce_gather_and_scatter_large": large,
}
