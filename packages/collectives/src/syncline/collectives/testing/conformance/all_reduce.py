"""Checks of all_reduce: every dtype with every reduction, every layout, and the same bits on all ranks."""

from __future__ import annotations

import functools

import torch

from ...errors import InvalidArgumentError
from ...group import ProcessGroup
from ...reduce_op import COMPLEX, DTYPES_OF, FLOATS, HALVES, ReduceOp, premul_sum
from .values import (
    LARGE_NUMEL,
    LAYOUTS,
    MOVABLE_DTYPES,
    SAME_SHAPE,
    Check,
    CheckError,
    Laid,
    expect,
    expect_equal,
    expect_raises,
    expect_reduced,
    in_every_way,
    random_terms,
    raw,
    reduction,
    sum_of_terms,
    terms,
)

_NUMEL = 60


def every_dtype_and_reduction(group: ProcessGroup) -> None:
    """Check all_reduce with every dtype and every reduction.

    If `DTYPES_OF` lists the dtype for the reduction, the result must be right. Otherwise the group must refuse the call.
    """
    computed = set()
    for op in ReduceOp:
        for dtype in MOVABLE_DTYPES:
            if dtype in DTYPES_OF[op]:
                _check_cell(group, op, dtype)
                computed.add((op, dtype))
            else:
                tensor = torch.empty(_NUMEL, dtype=dtype)
                what = f"{op.name} of {dtype}, which is not defined"
                expect_raises(InvalidArgumentError, functools.partial(group.all_reduce, tensor, reduction(op)), what, op.name)
    expect_equal(len(computed), sum(map(len, DTYPES_OF.values())), "number of reductions computed")


def _check_cell(group: ProcessGroup, op: ReduceOp, dtype: torch.dtype) -> None:
    inputs = [random_terms(op, (_NUMEL,), rank, dtype) for rank in range(group.size)]
    tensor = inputs[group.rank].clone()
    work = group.all_reduce(tensor, reduction(op))
    expect_reduced(tensor, op, inputs, f"{op.name} of {dtype}")
    if work.result()[0] is not tensor:
        raise CheckError(f"{op.name} of {dtype}: expected result() to hold the tensor that was handed in, found another")


def every_layout(group: ProcessGroup) -> None:
    """Check that all_reduce works in place on strided tensors. The memory between a tensor's elements must not change."""
    for layout in LAYOUTS:
        for dtype in (torch.float32, torch.bfloat16, torch.int16, torch.complex64):
            laid = Laid(layout, terms(layout.shape, group.rank, dtype))
            group.all_reduce(laid.tensor)
            laid.expect(sum_of_terms(layout.shape, group.size, dtype))


def layouts_differ_between_ranks(group: ProcessGroup) -> None:
    """Check all_reduce with tensors of one shape whose memory layouts differ between ranks."""
    for shift in range(len(SAME_SHAPE)):
        layout = SAME_SHAPE[(group.rank + shift) % len(SAME_SHAPE)]
        laid = Laid(layout, terms(layout.shape, group.rank))
        group.all_reduce(laid.tensor)
        laid.expect(sum_of_terms(layout.shape, group.size))


def large(group: ProcessGroup) -> None:
    """Check all_reduce with tensors of `LARGE_NUMEL` elements."""
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        tensor = terms((LARGE_NUMEL,), group.rank, dtype)
        group.all_reduce(tensor)
        expect(tensor, sum_of_terms((LARGE_NUMEL,), group.size, dtype), f"SUM of {LARGE_NUMEL} {dtype}")


def same_bits_everywhere(group: ProcessGroup) -> None:
    """Check that all_reduce of random inputs gives the same bits on all ranks."""
    generator = torch.Generator().manual_seed(4321 + group.rank)
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PRODUCT, ReduceOp.PREMUL_SUM):
        for dtype in sorted((FLOATS | COMPLEX) & DTYPES_OF[op], key=str):
            for numel in (1, 2, 3, 1000, 70_001):
                tensor = torch.randn(numel, generator=generator, dtype=torch.complex128, device=generator.device).mul_(3)
                tensor = tensor.to(torch.empty(0).device)
                mine = (tensor if dtype in COMPLEX else tensor.real).to(dtype)
                group.all_reduce(mine, reduction(op))
                _expect_same_everywhere(group, mine, f"{op.name} of {numel} random {dtype}")


def _expect_same_everywhere(group: ProcessGroup, tensor: torch.Tensor, what: str) -> None:
    mine = raw(tensor)
    theirs = [torch.empty_like(mine) for _ in range(group.size)]
    group.all_gather(theirs, mine)
    different = [rank for rank, other in enumerate(theirs) if not torch.equal(other, theirs[0])]
    if different:
        raise CheckError(f"{what}: rank(s) {different} ended with other bits than rank 0")


def halves_round_once(group: ProcessGroup) -> None:
    """Check that all_reduce, reduce and reduce_scatter_tensor add float16 and bfloat16 in float32."""
    for dtype, big in ((torch.bfloat16, 256), (torch.float16, 2048)):
        tensor = torch.full((9,), big if group.rank == 0 else 1, dtype=dtype)
        expected = torch.tensor(float(big + group.size - 1)).to(dtype).expand(9)
        for call, found in in_every_way(group, tensor, ReduceOp.SUM):
            expect(found, expected, f"{call} of {big} + 1 + 1 + ... in {dtype}")
    for dtype in sorted(HALVES, key=str):
        tensor = torch.full((9,), 57344.0, dtype=dtype)
        for call, found in in_every_way(group, tensor, ReduceOp.AVG):
            expect(found, tensor, f"{call}, AVG of large {dtype}")


def extremes(group: ProcessGroup) -> None:
    """Check sums of the smallest numbers, MIN and MAX of infinities, and PREMUL_SUM of numbers whose plain sum overflows."""
    for dtype in sorted(FLOATS, key=str):
        smallest = torch.zeros(5 * dtype.itemsize, dtype=torch.uint8)
        smallest[:: dtype.itemsize] = 1  # the last bit of each element
        tiny = smallest.view(dtype)
        for call, found in in_every_way(group, tiny * (group.rank == 0), ReduceOp.SUM):
            expect(found, tiny, f"{call} of the smallest {dtype} and zeros")
        for op, value in ((ReduceOp.MIN, torch.inf), (ReduceOp.MAX, -torch.inf)):
            for call, found in in_every_way(group, torch.full((5,), value, dtype=dtype), op):
                expect(found, torch.full((5,), value, dtype=dtype), f"{call}, {op.name} of {value} in {dtype}")
        large = torch.full((5,), torch.finfo(dtype).max / 2, dtype=dtype)
        for call, found in in_every_way(group, large, premul_sum(1 / group.size)):
            is_right = bool((found.double() / large.double() - 1).abs().amax() < group.size * torch.finfo(dtype).eps)
            expect_equal(is_right, True, f"{call}, PREMUL_SUM of large {dtype}")


def infinities_and_nans(group: ProcessGroup) -> None:
    """Check that an inf or nan of one rank reaches all ranks through all_reduce, reduce and reduce_scatter."""
    last = group.size - 1
    for op in (ReduceOp.SUM, ReduceOp.AVG):
        for dtype in sorted(FLOATS, key=str):
            tensor = torch.ones(4, dtype=dtype)
            if group.rank == last:
                tensor[1], tensor[2] = torch.inf, torch.nan
            for call, result in in_every_way(group, tensor, op):
                found = (result.isfinite().tolist(), bool(result[1] == torch.inf), bool(result[2].isnan()))
                what = f"{call}, {op.name} of {dtype} with inf and nan"
                expect_equal(found, ([True, False, False, True], True, True), what)
    for op in (ReduceOp.MIN, ReduceOp.MAX):
        for dtype in sorted(FLOATS, key=str):
            for numel in (2, 100_000):
                tensor = torch.full((numel,), 1.0, dtype=dtype)
                tensor[group.rank % 2 :: 2] = torch.nan if group.rank in (0, last) else 2.0
                for call, result in in_every_way(group, tensor, op):
                    what = f"{call}, {op.name} of {numel} {dtype} keeps not-a-number"
                    expect_equal(bool(result[::2].isnan().all()), True, what)
                group.all_reduce(tensor, op)
                _expect_same_everywhere(group, tensor, f"{op.name} of {numel} {dtype}, some not-a-number")


def integers_are_averaged_towards_zero(group: ProcessGroup) -> None:
    """Check that all_reduce rounds the mean (AVG) of integers towards zero."""
    for dtype in (torch.int8, torch.int32, torch.int64):
        tensor = torch.tensor([7, -7, 3 * group.size], dtype=dtype) if group.rank == 0 else torch.zeros(3, dtype=dtype)
        group.all_reduce(tensor, ReduceOp.AVG)
        found = int(7 / group.size)
        expect(tensor, torch.tensor([found, -found, 3], dtype=dtype), f"AVG of {dtype}")


def truth_values(group: ProcessGroup) -> None:
    """Check all_reduce of bool tensors: the sum is a logical or, and the product is a logical and, as in torch."""
    mine = torch.tensor([group.rank == 0, True, False])
    for op, expected in ((ReduceOp.SUM, [True, True, False]), (ReduceOp.PRODUCT, [group.size == 1, True, False])):
        tensor = mine.clone()
        group.all_reduce(tensor, op)
        expect(tensor, torch.tensor(expected), f"{op.name} of bool")


def lazily_conjugated(group: ProcessGroup) -> None:
    """Check all_reduce of lazy conjugates and negations: the values count, not the bytes in memory."""
    numbers = torch.complex(terms((6,), group.rank), terms((6,), group.rank + 1))
    tensor = numbers.clone().conj()
    group.all_reduce(tensor)
    total = torch.complex(sum_of_terms((6,), group.size), -(sum_of_terms((6,), group.size + 1) - terms((6,), 0)))
    expect(tensor.resolve_conj(), total, "SUM of conj()")
    negative = numbers.clone().conj().imag
    group.all_reduce(negative, ReduceOp.MIN)
    expect(negative.resolve_neg(), -terms((6,), group.size), "MIN of conj().imag")


def parameters(group: ProcessGroup) -> None:
    """Check that all_reduce treats a parameter as any other tensor, and that autograd does not record the reduction."""
    for op, factor in ((ReduceOp.SUM, 1.0), (premul_sum(0.5), 0.5)):
        parameter = torch.nn.Parameter(terms((7,), group.rank))
        group.all_reduce(parameter, op)
        expect(parameter.detach(), sum_of_terms((7,), group.size) * factor, f"{op.name} of a parameter")
        expect_equal((parameter.requires_grad, parameter.grad_fn), (True, None), "autograd's view of the parameter")


def parameter_on_one_rank(group: ProcessGroup) -> None:
    """Check that autograd records nothing on a rank that reduces a plain tensor, even if rank 0 reduces a parameter."""
    tensor = terms((7,), group.rank)
    if group.rank == 0:
        tensor = torch.nn.Parameter(tensor)
    block, received = torch.zeros(group.size, 7), torch.zeros(group.size)
    group.all_gather_into_tensor(block, tensor)
    expect(block[0], terms((7,), 0), "part of rank 0")
    numbers = torch.full((group.size,), float(group.rank))
    group.all_to_all_single(received, torch.nn.Parameter(numbers) if group.rank == 0 else numbers)
    expect(received, torch.arange(group.size, dtype=torch.float32), "numbers of all ranks")
    group.all_reduce(tensor)
    expect(tensor.detach(), sum_of_terms((7,), group.size), "SUM with a parameter of rank 0")
    group.broadcast(tensor)
    expect_equal((tensor.requires_grad, tensor.grad_fn), (group.rank == 0, None), "autograd's view of the tensor")
    for output in (block, received):
        expect_equal((output.requires_grad, output.grad_fn), (False, None), "autograd's view of an output")


CHECKS: dict[str, Check] = {
    "all_reduce_every_dtype_and_reduction": every_dtype_and_reduction,
    "all_reduce_every_layout": every_layout,
    "all_reduce_layouts_differ_between_ranks": layouts_differ_between_ranks,
    "all_reduce_large": large,
    "all_reduce_same_bits_everywhere": same_bits_everywhere,
    "all_reduce_halves_round_once": halves_round_once,
    "all_reduce_extremes": extremes,
    "all_reduce_infinities_and_nans": infinities_and_nans,
    "all_reduce_integers_are_averaged_towards_zero": integers_are_averaged_towards_zero,
    "all_reduce_truth_values": truth_values,
    "all_reduce_lazily_conjugated": lazily_conjugated,
    "all_reduce_parameters": parameters,
    "all_reduce_parameter_on_one_rank": parameter_on_one_rank,
}
