"""Checks of all_to_all and all_to_all_single."""

from __future__ import annotations

from functools import partial

import torch

from ...errors import InvalidArgumentError
from ...group import ProcessGroup
from .values import LARGE_NUMEL, MOVABLE_DTYPES, Check, bits, expect, expect_raises, values


def _parcel(src: int, dst: int, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> torch.Tensor:
    number = 11 * src + dst  # distinct for up to 11 ranks
    return values(shape, number) if dtype is None else bits(shape, number, dtype)


def lists(group: ProcessGroup) -> None:
    """Check all_to_all: output s of rank r must equal input r of rank s."""
    for dtype in MOVABLE_DTYPES:
        inputs = [_parcel(group.rank, dst, (4, 3), dtype) for dst in range(group.size)]
        outputs = [torch.zeros(4, 3, dtype=dtype) for _ in range(group.size)]
        group.all_to_all(outputs, inputs)
        for src, output in enumerate(outputs):
            expect(output, _parcel(src, group.rank, (4, 3), dtype), f"all_to_all of {dtype} from rank {src}")


def lists_of_different_shapes(group: ProcessGroup) -> None:
    """Check all_to_all with strided tensors whose sizes differ between pairs of ranks. Some tensors are empty."""
    inputs = [_parcel(group.rank, dst, (2 * group.rank + dst, 3)) for dst in range(group.size)]
    outputs = [torch.zeros(3, 2 * src + group.rank).t() for src in range(group.size)]
    group.all_to_all(outputs, [entry.t().contiguous().t() for entry in inputs])
    for src, output in enumerate(outputs):
        expect(output, _parcel(src, group.rank, (2 * src + group.rank, 3)), f"uneven all_to_all from rank {src}")


def single_even(group: ProcessGroup) -> None:
    """Check all_to_all_single without splits: every rank sends the same number of rows to every rank."""
    for dtype in MOVABLE_DTYPES:
        tensor = torch.cat([_parcel(group.rank, dst, (2, 3), dtype) for dst in range(group.size)])
        output = torch.zeros(2 * group.size, 3, dtype=dtype)
        group.all_to_all_single(output, tensor)
        expected = torch.cat([_parcel(src, group.rank, (2, 3), dtype) for src in range(group.size)])
        expect(output, expected, f"all_to_all_single of {dtype}")


def single_uneven(group: ProcessGroup) -> None:
    """Check all_to_all_single with splits that differ between pairs of ranks. Some pairs exchange no rows."""
    sent = [(group.rank + dst) % 3 for dst in range(group.size)]
    received = [(src + group.rank) % 3 for src in range(group.size)]
    tensor = torch.cat([_parcel(group.rank, dst, (rows, 4)) for dst, rows in enumerate(sent)])
    output = torch.zeros(sum(received), 4)
    group.all_to_all_single(output, tensor, received, sent)
    expected = torch.cat([_parcel(src, group.rank, (rows, 4)) for src, rows in enumerate(received)])
    expect(output, expected, "uneven all_to_all_single")


def large(group: ProcessGroup) -> None:
    """Check all_to_all_single of a large tensor: MPI does not buffer large messages, so each send waits for its receiver."""
    tensor = torch.stack([_parcel(group.rank, dst, (LARGE_NUMEL,)) for dst in range(group.size)])
    output = torch.zeros_like(tensor)
    group.all_to_all_single(output, tensor)
    for src in range(group.size):
        expect(output[src], _parcel(src, group.rank, (LARGE_NUMEL,)), f"{LARGE_NUMEL} elements from rank {src}")


def refusals(group: ProcessGroup) -> None:
    """Check that all_to_all and all_to_all_single refuse wrong splits, wrong rows, overlapping memory, and too few tensors."""
    tensor, single = torch.zeros(group.size, 3), group.all_to_all_single
    wrong = [*[1] * (group.size - 1), 2]
    for name, call, mentions in (
        ("splits", partial(single, torch.zeros(group.size, 3), tensor, None, wrong), "input splits"),
        ("too few splits", partial(single, torch.zeros(group.size, 3), tensor, [], None), "output splits"),
        ("other rows", partial(single, torch.zeros(group.size, 4), tensor), "rows"),
        ("no dimension", partial(single, torch.zeros(()), tensor), "dimension"),
        ("in place", partial(single, tensor, tensor), "shares memory"),
        ("too few tensors", partial(group.all_to_all, [], [tensor] * group.size), f"expected {group.size}"),
    ):
        expect_raises(InvalidArgumentError, call, name, mentions)


CHECKS: dict[str, Check] = {
    "all_to_all_lists": lists,
    "all_to_all_lists_of_different_shapes": lists_of_different_shapes,
    "all_to_all_single_even": single_even,
    "all_to_all_single_uneven": single_uneven,
    "all_to_all_large": large,
    "all_to_all_refusals": refusals,
}
