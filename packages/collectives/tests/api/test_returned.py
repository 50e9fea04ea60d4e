"""Collectives that return what they make, and calls that ranks may leave early."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

import syncline.collectives as sc
from syncline.collectives import DisagreementError, InvalidArgumentError, MisuseError, ProcessGroup, ReduceOp, UnevenCalls
from syncline.collectives.api.returned import row_shares
from syncline.collectives.testing import run_ranks

pytestmark = pytest.mark.ranks

SIZES = [1, 2, 3, 4]


def mine(rank: int, rows: int = 3, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.arange(2.0 * rows).view(rows, 2) + 10 * rank + 1).to(dtype)


def rows_of(rank: int) -> int:
    return (3 * rank + 2) % 4


@pytest.mark.parametrize("world_size", SIZES)
def test_rows_of_all_ranks_in_order(world_size: int) -> None:
    def body(group: ProcessGroup) -> None:
        for dtype in (torch.float32, torch.int64, torch.bool):
            expected = torch.cat([mine(rank, rows_of(rank), dtype) for rank in range(world_size)])
            tensor = mine(group.rank, rows_of(group.rank), dtype)
            assert torch.equal(sc.all_gather_rows(tensor, group), expected)
            pending = sc.all_gather_rows(tensor, group, async_op=True)
            assert torch.equal(pending.wait(), expected)
            assert pending.is_completed()
            assert pending.wait() is pending.wait()
        several = [
            mine(group.rank, rows_of(group.rank)),
            mine(group.rank, 2).int(),
            mine(group.rank + 1, rows_of(group.rank + 1)),
        ]
        first, second, third = sc.all_gather_rows_coalesced(several, group)
        ranks = range(world_size)
        assert torch.equal(first, torch.cat([mine(rank, rows_of(rank)) for rank in ranks]))
        assert torch.equal(second, torch.cat([mine(rank, 2).int() for rank in ranks]))
        assert torch.equal(third, torch.cat([mine(rank + 1, rows_of(rank + 1)) for rank in ranks]))

    run_ranks(world_size, body)


def test_rows_that_differ_are_an_error_on_every_rank_and_do_no_harm() -> None:
    def body(group: ProcessGroup) -> None:
        wide = group.rank == 1
        with pytest.raises(DisagreementError, match=r"rank\(s\) "):
            sc.all_gather_rows(torch.ones(2, 3 if wide else 2), group)
        with pytest.raises(DisagreementError, match="same dtypes and row shapes"):
            sc.all_to_all_rows(torch.ones(3, dtype=torch.int32 if wide else torch.int64), None, group)
        assert sc.all_gather_rows(torch.ones(1), group).tolist() == [1.0] * 3

    run_ranks(3, body)


@pytest.mark.parametrize("world_size", SIZES)
def test_only_the_sender_knows_the_splits(world_size: int) -> None:
    def splits(rank: int) -> list[int]:
        return [(rank + 2 * peer) % 3 for peer in range(world_size)]

    def body(group: ProcessGroup) -> None:
        output, received = sc.all_to_all_rows(mine(group.rank, sum(splits(group.rank))), splits(group.rank), group)
        parts = [torch.split(mine(rank, sum(splits(rank))), splits(rank))[group.rank] for rank in range(world_size)]
        assert torch.equal(output, torch.cat(parts))
        assert received == [splits(rank)[group.rank] for rank in range(world_size)]
        with pytest.raises(InvalidArgumentError, match="add up to"):
            sc.all_to_all_rows(mine(group.rank), [4] + [0] * (world_size - 1), group)

    run_ranks(world_size, body)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("rows", [4, 5, 2])
def test_reduced_rows_are_shared_as_equally_as_can_be(world_size: int, rows: int) -> None:
    def body(group: ProcessGroup) -> None:
        total = torch.stack([mine(rank, rows) for rank in range(world_size)]).sum(0)
        expected = torch.split(total, row_shares(rows, world_size))[group.rank]
        assert torch.equal(sc.reduce_scatter_rows(mine(group.rank, rows), group=group), expected)
        first, second = sc.reduce_scatter_rows_coalesced(
            [mine(group.rank, rows), mine(group.rank, rows).int()], group=group, postscale=2.0
        )
        assert torch.equal(first, 2 * expected)
        assert torch.equal(second, 2 * expected.int())

    run_ranks(world_size, body)


def test_shares_add_up_and_differ_by_one_at_most() -> None:
    for rows in range(20):
        for size in range(1, 7):
            shares = row_shares(rows, size)
            assert sum(shares) == rows
            assert shares == sorted(shares, reverse=True)
            assert shares[0] - shares[-1] <= 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.bfloat16, torch.float32, torch.complex64])
def test_scaled_reductions_leave_the_input_alone(dtype: torch.dtype) -> None:
    def body(group: ProcessGroup) -> None:
        tensor = mine(group.rank, dtype=dtype)
        before = tensor.clone()
        wide = torch.complex128 if dtype.is_complex else torch.float64
        terms = [(mine(rank, dtype=dtype).to(wide) * 0.5).to(dtype).to(wide) for rank in range(2)]
        expected = ((terms[0] + terms[1]).to(dtype).to(wide) * 1.5).to(dtype)
        assert torch.equal(sc.all_reduce_copy(tensor, group=group, prescale=0.5, postscale=1.5), expected)
        assert torch.equal(tensor, before)

    run_ranks(2, body)


@pytest.mark.parametrize("world_size", [1, 3])
def test_gradients_are_those_of_the_sum_of_all_losses(world_size: int) -> None:
    """Against autograd on one process, which has the tensors of all ranks."""
    cases: dict[str, tuple[Any, Any]] = {
        "sum": (lambda t, g: sc.all_reduce_copy(t, group=g, prescale=2.0), lambda all_, _: 2 * sum(all_)),
        "average": (lambda t, g: sc.all_reduce_copy(t, ReduceOp.AVG, g), lambda all_, _: sum(all_) / len(all_)),
        "torch's sum": (lambda t, g: sc.all_reduce_copy(t, dist.ReduceOp.SUM, g), lambda all_, _: sum(all_)),
        "torch's average of rows": (
            lambda t, g: sc.reduce_scatter_rows(t, dist.ReduceOp.AVG, g),
            lambda all_, rank: torch.split(sum(all_) / len(all_), row_shares(4, len(all_)))[rank],
        ),
        "gather": (lambda t, g: sc.all_gather_rows(t, g), lambda all_, _: torch.cat(all_)),
        "broadcast": (lambda t, g: sc.broadcast_copy(t, group=g, group_src=0), lambda all_, _: all_[0]),
        "exchange": (
            lambda t, g: sc.all_to_all_rows(t, [t.shape[0]] + [0] * (g.size - 1), g)[0],
            lambda all_, rank: torch.cat(all_) if rank == 0 else all_[0][:0],
        ),
        "scatter": (
            lambda t, g: sc.reduce_scatter_rows(t, ReduceOp.AVG, g, postscale=3.0),
            lambda all_, rank: torch.split(3 * sum(all_) / len(all_), row_shares(4, len(all_)))[rank],
        ),
    }

    def loss(result: torch.Tensor, rank: int) -> torch.Tensor:
        return (result.square() * (rank + 1)).sum()

    def body(group: ProcessGroup, form: Any) -> torch.Tensor:
        tensor = mine(group.rank, 4).requires_grad_()
        loss(form(tensor, group), group.rank).backward()
        assert tensor.grad is not None
        return tensor.grad

    for name, (form, meaning) in cases.items():
        found = run_ranks(world_size, body, form)
        leaves = [mine(rank, 4).requires_grad_() for rank in range(world_size)]
        sum(loss(meaning(leaves, rank), rank) for rank in range(world_size)).backward()  # type: ignore[union-attr]
        for gradient, leaf in zip(found, leaves, strict=True):
            expected = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            torch.testing.assert_close(gradient, expected, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("root", [0, 1])
def test_second_derivatives_go_back_to_the_rank_whose_tensor_was_sent(root: int) -> None:
    """Against autograd on one process, which has the tensors of all ranks."""

    def body(group: ProcessGroup) -> list[list[float]]:
        tensor = mine(group.rank).requires_grad_()
        result = sc.broadcast_copy(tensor, group=group, group_src=root)
        loss = (group.rank + 1) * (result**3).sum()
        (gradient,) = torch.autograd.grad(loss, tensor, create_graph=True)
        # Every rank calls the collectives of the second backward, also a rank whose gradient is zero.
        (second,) = torch.autograd.grad((gradient**2).sum(), tensor)
        return [gradient.flatten().tolist(), second.flatten().tolist()]

    sent = mine(root).requires_grad_()
    (gradient,) = torch.autograd.grad((1 + 2 + 3) * (sent**3).sum(), sent, create_graph=True)
    (second,) = torch.autograd.grad((gradient**2).sum(), sent)
    expected = [[0.0] * 6, [0.0] * 6]
    for rank, found in enumerate(run_ranks(3, body)):
        assert found == ([gradient.flatten().tolist(), second.flatten().tolist()] if rank == root else expected)


def test_a_gradient_that_is_not_defined_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match="MIN is not defined"):
            sc.all_reduce_copy(mine(group.rank).requires_grad_(), ReduceOp.MIN, group).sum().backward()

    run_ranks(2, body)


def test_results_that_require_a_gradient_may_be_changed_in_place() -> None:
    makers: dict[str, Any] = {
        "reduced": lambda t, g: sc.all_reduce_copy_coalesced(t, group=g),
        "gathered": sc.all_gather_rows_coalesced,
        "gathered alone": lambda t, g: [sc.all_gather_rows(tensor, g) for tensor in t],
        "scattered": lambda t, g: sc.reduce_scatter_rows_coalesced(t, group=g),
        "scattered and scaled": lambda t, g: sc.reduce_scatter_rows_coalesced(t, group=g, postscale=0.5),
        "broadcast": lambda t, g: [sc.broadcast_copy(tensor, group=g, group_src=0) for tensor in t],
        "exchanged": lambda t, g: [sc.all_to_all_rows(tensor, group=g)[0] for tensor in t],
    }

    def body(group: ProcessGroup, make: Any, in_place: bool) -> torch.Tensor:
        tensors = [mine(group.rank, 2).requires_grad_(), mine(group.rank + 5, 4).requires_grad_()]
        first, second = make(tensors, group)
        loss = second.square().sum()  # backward needs `second`, which is not changed below
        first = first.mul_(3) if in_place else first * 3
        (loss + first.sum()).backward()
        return torch.cat([tensor.grad for tensor in tensors if tensor.grad is not None])

    for name, make in makers.items():
        changed, copied = (run_ranks(2, body, make, in_place) for in_place in (True, False))
        assert all(map(torch.equal, changed, copied)), name


def test_an_object_of_one_rank() -> None:
    def body(group: ProcessGroup) -> list[Any]:
        return [sc.broadcast_object({"of": group.rank}, group=group), sc.broadcast_object(group.rank, group=group, group_src=2)]

    assert run_ranks(3, body) == [[{"of": 0}, 2]] * 3


# ---- uneven calls ----


class Steps:
    """Each step adds one on the ranks that take it."""

    def __init__(self, group: ProcessGroup, calls: UnevenCalls) -> None:
        self.group, self.calls = group, calls
        self.number = calls.add_step(self.shadow)
        self.totals: list[float] = []

    def take(self) -> None:
        pending = self.calls.announce_step(self.number)
        self._add(1.0)
        pending.wait()

    def shadow(self) -> None:
        self._add(0.0)

    def _add(self, value: float) -> None:
        total = torch.tensor([value])
        self.group.all_reduce(total)
        self.totals.append(total.item())


@pytest.mark.parametrize("world_size", SIZES)
def test_ranks_leave_one_after_the_other(world_size: int) -> None:
    """Rank r makes r calls and takes r steps."""

    def body(group: ProcessGroup) -> tuple[int, list[float], list[float]]:
        calls = UnevenCalls(group)
        steps = Steps(group, calls)
        sums = []
        for number in range(group.rank):
            tensors = [mine(group.rank) * (number + 1), mine(group.rank).int()]
            calls.announce_all_reduce(tensors, ReduceOp.SUM)
            result = sc.all_reduce_copy_coalesced(tensors, ReduceOp.SUM, group)
            sums.append(result[0].sum().item() + 0.5 * result[1].sum().item())
            steps.take()
        last = calls.join()
        assert calls.join() == group.size - 1  # begins anew
        return last, sums, steps.totals

    for rank, (last, sums, totals) in enumerate(run_ranks(world_size, body)):
        assert last == world_size - 1
        present = [range(number + 1, world_size) for number in range(world_size - 1)]
        assert totals == [float(len(ranks)) for ranks in present]
        expected = [
            sum((number + 1) * mine(r).sum().item() + 0.5 * mine(r).sum().item() for r in present[number])
            for number in range(rank)
        ]
        assert all(math.isclose(a, b) for a, b in zip(sums, expected, strict=True))


def test_a_step_that_the_others_do_not_take_is_an_error() -> None:
    def body(group: ProcessGroup) -> None:
        calls = UnevenCalls(group)
        steps = Steps(group, calls)
        announce = calls.announce_step(steps.number).wait if group.rank == 0 else lambda: calls.announce_complete("barrier")
        with pytest.raises(DisagreementError, match="step 0"):
            announce()

    run_ranks(2, body)


def test_what_needs_all_ranks_is_refused_after_the_first_has_left() -> None:
    def body(group: ProcessGroup) -> int:
        calls = UnevenCalls(group)
        calls.announce_complete("broadcast")
        if group.rank == 0:
            with pytest.raises(MisuseError, match="a rank has joined"):
                calls.announce_complete("broadcast")
            with pytest.raises(MisuseError, match="all_reduce with MAX"):
                calls.announce_all_reduce([torch.ones(1)], ReduceOp.MAX)
        return calls.join()

    assert run_ranks(3, body) == [0] * 3
