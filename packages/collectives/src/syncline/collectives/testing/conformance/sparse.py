"""Checks of all_reduce of sparse tensors."""

from __future__ import annotations

from functools import partial

import torch

from ...errors import DisagreementError
from ...group import ProcessGroup
from ...reduce_op import ReduceOp, premul_sum
from .values import Check, expect, expect_equal, expect_raises, expect_reduced, reduction


def _mine(rank: int, scale: float = 1.0) -> torch.Tensor:
    """Return a rank's sparse tensor, with rows 0 and `rank + 1`. The tensor of rank 1 has row 0 twice, so it is uncoalesced."""
    rows = [0, rank + 1] + ([0] if rank == 1 else [])
    content = torch.tensor([[float(rank + 1), 2.0], [10.0 * rank, 3.0], [1.0, 1.0]])[: len(rows)] * scale
    return torch.sparse_coo_tensor(torch.tensor([rows]), content, (8, 2), check_invariants=True)


def sums(group: ProcessGroup) -> None:
    """Check SUM, AVG and PREMUL_SUM of sparse tensors against the reduction of the dense tensors."""
    dense = [_mine(rank).to_dense() for rank in range(group.size)]
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.PREMUL_SUM):
        for async_op in (False, True):
            tensor = _mine(group.rank)
            group.all_reduce(tensor, reduction(op), async_op=async_op).wait()
            expect_equal(tensor.layout, torch.sparse_coo, "layout")
            expect_equal(tensor.coalesce()._nnz(), group.size + 1, "number of rows present")
            expect_reduced(tensor.to_dense(), op, dense, f"{op.name} of sparse tensors")


def halves(group: ProcessGroup) -> None:
    """Check that sparse float16 and bfloat16 are added in float32, so that only the final result is rounded."""
    for dtype, exact_below in ((torch.float16, 2048.0), (torch.bfloat16, 256.0)):
        # In the dtype itself, `exact_below` + 1 is rounded to `exact_below`. The tensor of rank 0 has the same index twice.
        mine = [exact_below / 2, exact_below / 2] if group.rank == 0 else [1.0]
        added = exact_below + group.size - 1
        for op, expected in ((ReduceOp.SUM, added), (ReduceOp.AVG, added / group.size), (premul_sum(0.75), added * 0.75)):
            tensor = torch.sparse_coo_tensor(
                torch.zeros(1, len(mine), dtype=torch.int64), torch.tensor(mine, dtype=dtype), (4,), check_invariants=True
            )
            group.all_reduce(tensor, op)
            expect(tensor.to_dense()[:1], torch.tensor([expected]).to(dtype), f"{op} of {dtype}")
    # The sum of all ranks is too large for a float16, but their mean is not.
    tensor = torch.sparse_coo_tensor(
        torch.zeros(1, 1, dtype=torch.int64), torch.tensor([40000.0], dtype=torch.float16), (4,), check_invariants=True
    )
    group.all_reduce(tensor, ReduceOp.AVG)
    expect(tensor.to_dense()[:1], torch.tensor([40000.0], dtype=torch.float16), "the mean of large numbers")


def nothing_present(group: ProcessGroup) -> None:
    """Check sparse tensors without elements, on all ranks or on all ranks except the last."""
    empty = torch.sparse_coo_tensor(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 2), (8, 2), check_invariants=True)
    tensor = empty.clone()
    group.all_reduce(tensor)
    expect_equal(tensor.coalesce()._nnz(), 0, "elements of a sum of nothing")
    tensor = _mine(0) if group.rank == group.size - 1 else empty.clone()
    group.all_reduce(tensor)
    expect(tensor.to_dense(), _mine(0).to_dense(), "sum of one rank's elements")


def other_shapes(group: ProcessGroup) -> None:
    """Check sparse tensors of different shapes on the ranks: every rank must raise an error, and the group must stay usable."""
    rows = 8 + group.rank
    for async_op in (False, True):
        tensor = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1, 2), (rows, 2), check_invariants=True)
        if group.size == 1:
            group.all_reduce(tensor, async_op=async_op).wait()
            continue
        call = partial(_reduced, group, tensor, async_op)
        expect_raises(
            DisagreementError, call, "a sum of sparse tensors of other shapes", "rank 1: all_reduce(sparse float32[9, 2]"
        )
    tensor = _mine(0)
    group.all_reduce(tensor)
    expect(tensor.to_dense(), _mine(0).to_dense() * group.size, "the sum after that")


def _reduced(group: ProcessGroup, tensor: torch.Tensor, async_op: bool) -> None:
    group.all_reduce(tensor, async_op=async_op).wait()


CHECKS: dict[str, Check] = {
    "sparse_sums": sums,
    "sparse_halves": halves,
    "sparse_nothing_present": nothing_present,
    "sparse_other_shapes": other_shapes,
}
