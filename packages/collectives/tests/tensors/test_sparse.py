"""The all-reduce of sparse tensors, over groups of which each promises another order."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from syncline.collectives import ReduceOp
from syncline.collectives.tensors import sparse
from syncline.collectives.work import FinishedWork, Work


class OneRank:
    """A group of one rank, which notes whether its calls were asynchronous."""

    size = 1

    def __init__(self, has_total_order: bool) -> None:
        self.has_total_order = has_total_order
        self.were_async: list[bool] = []

    def place(self) -> str:
        return "rank 0 of 1"

    def all_gather(self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, async_op: bool = False) -> Work:
        self.were_async.append(async_op)
        outputs[0].copy_(tensor)
        return FinishedWork(list(outputs))


@pytest.mark.parametrize("has_total_order", [True, False])
def test_a_group_without_a_total_order_gets_no_call_from_a_callback(has_total_order: bool) -> None:
    group = OneRank(has_total_order)
    tensor = torch.sparse_coo_tensor(torch.tensor([[3, 3, 1]]), torch.tensor([1.0, 2.0, 4.0]), (5,), check_invariants=True)
    sparse.all_reduce(group, tensor, ReduceOp.SUM, async_op=True).wait()
    assert tensor.to_dense().tolist() == [0.0, 4.0, 0.0, 3.0, 0.0]
    assert group.were_async == [has_total_order, False, False]


def test_a_sum_of_bools_is_refused_by_its_dtype() -> None:
    tensor = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.tensor([True]), (5,), check_invariants=True)
    problem = sparse.irreducible(tensor, ReduceOp.BOR)
    assert problem is not None
    assert "tensor of dtype bool cannot be reduced; pass tensor.to_dense" in problem
