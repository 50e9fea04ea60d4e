"""Checks of all_gather_into_tensor, reduce_scatter and reduce_scatter_tensor."""

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


def into_tensor(group: ProcessGroup) -> None:
    """Check all_gather_into_tensor: part r of the output must be rank r's tensor."""
    for dtype in MOVABLE_DTYPES:
        output = torch.zeros(group.size * 3, 5, dtype=dtype)
        group.all_gather_into_tensor(output, bits((3, 5), group.rank, dtype))
        for rank, part in enumerate(output.view(group.size, 3, 5)):
            expect(part, bits((3, 5), rank, dtype), f"all_gather_into_tensor of {dtype}, part {rank}")
    strided = torch.zeros(5, group.size).t()
    group.all_gather_into_tensor(strided, values((5,), group.rank))
    for rank in range(group.size):
        expect(strided[rank], values((5,), rank), f"row {rank} of a transposed output")


def into_tensor_in_place(group: ProcessGroup) -> None:
    """Check all_gather_into_tensor with an input that is this rank's part of the output, as in FSDP."""
    output = torch.zeros(group.size, 7)
    output[group.rank] = values((7,), group.rank)
    group.all_gather_into_tensor(output, output[group.rank])
    for rank in range(group.size):
        expect(output[rank], values((7,), rank), f"part {rank}, gathered in place")


def reduce_scatter_every_dtype_and_reduction(group: ProcessGroup) -> None:
    """Check that reduce_scatter gives rank r part r of the result, for every dtype and reduction."""
    seen = set()
    for op in ReduceOp:
        for dtype in sorted(DTYPES_OF[op], key=str):
            inputs = [random_terms(op, (group.size, 6), rank, dtype) for rank in range(group.size)]
            whole = inputs[group.rank].clone()
            from_list, from_tensor = torch.zeros(6, dtype=dtype), torch.zeros(6, dtype=dtype)
            group.reduce_scatter(from_list, list(whole), reduction(op))
            group.reduce_scatter_tensor(from_tensor, whole, reduction(op))
            expect_reduced(from_list, op, [each[group.rank] for each in inputs], f"reduce_scatter {op.name} of {dtype}")
            expect(from_tensor, from_list, f"reduce_scatter_tensor {op.name} of {dtype}, against the list")
            expect(whole, inputs[group.rank], "input of reduce_scatter")
            seen.add((op, dtype))
    expect_equal(len(seen), sum(map(len, DTYPES_OF.values())), "number of reductions")


def reduce_scatter_sum(group: ProcessGroup) -> None:
    """Check the sums of reduce_scatter in every layout. Each part has a different sum."""
    for layout in LAYOUTS:
        inputs = [Laid(layout, terms(layout.shape, group.rank) * (part + 1)) for part in range(group.size)]
        output = Laid(layout, values(layout.shape, group.size))
        group.reduce_scatter(output.tensor, [entry.tensor for entry in inputs])
        output.expect(sum_of_terms(layout.shape, group.size) * (group.rank + 1))


def reduce_scatter_in_place(group: ProcessGroup) -> None:
    """Check reduce_scatter with an output that shares memory with the input."""
    whole = torch.stack([terms((9,), group.rank) * (part + 1) for part in range(group.size)])
    group.reduce_scatter_tensor(whole[group.rank], whole)
    expect(whole[group.rank], sum_of_terms((9,), group.size) * (group.rank + 1), "reduce_scatter_tensor in place")
    # With a list, the output may be any part of an input's memory.
    memory = torch.zeros(10)
    memory[:9] = terms((9,), group.rank)
    group.reduce_scatter(memory[1:], [memory[:9]] * group.size)
    expect(memory[1:], sum_of_terms((9,), group.size), "reduce_scatter into the memory of its inputs")


def reduce_scatter_large(group: ProcessGroup) -> None:
    """Check parts of `LARGE_NUMEL` elements."""
    whole, output = terms((group.size, LARGE_NUMEL), group.rank), torch.zeros(LARGE_NUMEL)
    group.reduce_scatter_tensor(output, whole)
    expected = sum_of_terms((group.size, LARGE_NUMEL), group.size)[group.rank]
    expect(output, expected, f"reduce_scatter of parts of {LARGE_NUMEL} elements")


def reduce_scatter_of_different_sizes(group: ProcessGroup) -> None:
    """Check reduce_scatter with parts of 0, 3, 6, ... elements, and with expanded inputs. The inputs must not change."""
    for is_async in (False, True):
        inputs = [terms((part, 3), group.rank) * (part + 1) for part in range(group.size)]
        before = [entry.clone() for entry in inputs]
        output = torch.zeros(group.rank, 3)
        work = group.reduce_scatter(output, inputs, async_op=is_async)
        work.wait()
        expect(output, sum_of_terms((group.rank, 3), group.size) * (group.rank + 1), "reduce_scatter of different sizes")
        for entry, original in zip(inputs, before, strict=True):
            expect(entry, original, "input of reduce_scatter of different sizes")
    expanded = [terms((1,), group.rank).expand(part + 2) for part in range(group.size)]
    output = torch.zeros(group.rank + 2)
    group.reduce_scatter(output, expanded)
    expect(output, sum_of_terms((1,), group.size).expand(group.rank + 2), "reduce_scatter of expanded inputs")


CHECKS: dict[str, Check] = {
    "all_gather_into_tensor": into_tensor,
    "all_gather_into_tensor_in_place": into_tensor_in_place,
    "reduce_scatter_every_dtype_and_reduction": reduce_scatter_every_dtype_and_reduction,
    "reduce_scatter_sum": reduce_scatter_sum,
    "reduce_scatter_large": reduce_scatter_large,
    "reduce_scatter_in_place": reduce_scatter_in_place,
    "reduce_scatter_of_different_sizes": reduce_scatter_of_different_sizes,
}
