from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from syncline.collectives import (
    InvalidArgumentError,
    ProcessGroup,
    ReduceOp,
    Work,
    all_gather_coalesced,
    all_reduce_coalesced,
    broadcast_coalesced,
)
from syncline.collectives.api.coalescing import plan_buffers
from syncline.collectives.testing import run_ranks

SIZES_AND_KINDS = st.lists(st.tuples(st.integers(0, 50), st.sampled_from("abc")), max_size=30)
ON_A_BUSY_MACHINE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@ON_A_BUSY_MACHINE
@given(SIZES_AND_KINDS, st.integers(1, 60))
def test_plan(entries: list[tuple[int, str]], cap: int) -> None:
    sizes = [size for size, _ in entries]
    kinds = [kind for _, kind in entries]
    plan = plan_buffers(sizes, kinds, cap)
    assert sorted(index for members in plan for index in members) == list(range(len(entries))), "each tensor once"
    for members in plan:
        assert members == sorted(members)
        assert len({kinds[index] for index in members}) == 1, "one kind per buffer"
        assert len(members) == 1 or sum(sizes[index] for index in members) <= cap, "below the cap, or alone"
    assert [members[0] for members in plan] == sorted(members[0] for members in plan)


@ON_A_BUSY_MACHINE
@given(SIZES_AND_KINDS, st.integers(1, 60))
def test_plan_wastes_no_buffer(entries: list[tuple[int, str]], cap: int) -> None:
    """A buffer is closed only because the next tensor of its kind does not fit."""
    sizes = [size for size, _ in entries]
    kinds = [kind for _, kind in entries]
    plan = plan_buffers(sizes, kinds, cap)
    for kind in set(kinds):
        mine = [members for members in plan if kinds[members[0]] == kind]
        for members, following in pairwise(mine):
            assert sum(sizes[index] for index in members) + sizes[following[0]] > cap
            assert members[-1] < following[0]


@pytest.mark.parametrize(
    ("sizes", "kinds", "cap", "expected"),
    [
        ([], [], 10, []),
        ([4, 4, 4], "aaa", 8, [[0, 1], [2]]),
        ([4, 4, 4], "aba", 8, [[0, 2], [1]]),
        ([20, 1, 1], "aaa", 8, [[0], [1, 2]]),
        ([1, 20, 1], "aaa", 8, [[0], [1], [2]]),
        ([8, 8], "aa", 16, [[0, 1]]),
        ([0, 0, 0], "aaa", 1, [[0, 1, 2]]),
    ],
)
def test_plan_table(sizes: list[int], kinds: str, cap: int, expected: list[list[int]]) -> None:
    assert plan_buffers(sizes, kinds, cap) == expected


@pytest.mark.ranks
def test_at_most_two_in_flight() -> None:
    """Counted on the group: the third broadcast is issued only after the first was waited for."""

    def body(group: ProcessGroup) -> int:
        in_flight: list[object] = []
        most = 0
        issue = group.broadcast

        def recorded(tensor: torch.Tensor, root: int, *, async_op: bool):
            nonlocal most
            work = issue(tensor, root, async_op=async_op)
            in_flight.append(work)
            most = max(most, len(in_flight))
            wait = work.wait

            class Recorded:
                def wait(self) -> bool:
                    in_flight.remove(work)
                    return wait()

            return Recorded()

        group.broadcast = recorded  # type: ignore[method-assign,assignment]
        broadcast_coalesced([torch.ones(3) for _ in range(9)], group=group, buffer_size_bytes=12)
        assert not in_flight
        return most

    assert run_ranks(2, body) == [2, 2]


@pytest.mark.ranks
def test_little_is_broadcast_at_once() -> None:
    """Each kind after the other, by the thread that asks."""

    def body(group: ProcessGroup) -> list[bool]:
        asked: list[bool] = []

        broadcast = group.broadcast

        def watched(tensor: torch.Tensor, root: int, async_op: bool = False) -> Work:
            asked.append(async_op)
            return broadcast(tensor, root, async_op=async_op)

        group.broadcast = watched  # type: ignore[method-assign, assignment]
        tensors = [torch.full((2, 3), group.rank + 1.0), torch.full((), group.rank), torch.full((4,), group.rank + 1.0).t()]
        broadcast_coalesced(tensors, group=group, root=1)
        assert [tensor.unique().tolist() for tensor in tensors] == [[2.0], [1], [2.0]]
        large = [torch.full((1 << 18,), float(group.rank)), torch.full((2,), group.rank)]
        broadcast_coalesced(large, group=group, root=1)
        assert [tensor.unique().tolist() for tensor in large] == [[1.0], [1]]
        return asked

    assert run_ranks(2, body) == [[False, False, True, True]] * 2


@pytest.mark.ranks
def test_buffer_size_must_be_positive() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match="at least 1, found 0"):
            broadcast_coalesced([], group=group, buffer_size_bytes=0)

    run_ranks(1, body)


@pytest.mark.parametrize("wrong", ["reduction", "memory", "device"])
def test_all_tensors_are_looked_at_before_the_first_is_sent(wrong: str) -> None:
    """One rank alone is refused, and nobody else has to call."""

    def body(group: ProcessGroup) -> None:
        second = torch.ones(3, dtype=torch.bool, device="meta" if wrong == "device" else "cpu")
        if wrong == "memory":
            second.untyped_storage().resize_(0)
        op = ReduceOp.AVG if wrong == "reduction" else ReduceOp.SUM
        if group.rank == 0:
            with pytest.raises(InvalidArgumentError):
                all_reduce_coalesced([torch.ones(2), second], op, group=group)
            rows = [[torch.ones(2), second] for _ in range(group.size + (wrong == "reduction"))]
            with pytest.raises(InvalidArgumentError):
                all_gather_coalesced(rows, [torch.ones(2), torch.ones(3, dtype=torch.bool)], group=group)
        tensor = torch.arange(3.0) + group.rank
        group.all_reduce(tensor)
        assert tensor.tolist() == [1.0, 3.0, 5.0]

    run_ranks(2, body)


def lazy(kind: str, values: list[float]) -> torch.Tensor:
    """A tensor that torch conjugates or negates only when it is read."""
    if kind == "conjugated":
        return torch.tensor([complex(0, -value) for value in values]).conj()
    return torch.tensor([complex(0, value) for value in values]).conj().imag


@pytest.mark.parametrize("kind", ["conjugated", "negated"])
def test_lazily_conjugated_and_negated_tensors_get_the_results(kind: str) -> None:
    def body(group: ProcessGroup) -> None:
        mine = [lazy(kind, [group.rank + 1.0, 2.0]), lazy(kind, [3.0, group.rank + 4.0])]
        assert all(tensor.is_conj() or tensor.is_neg() for tensor in mine)
        all_reduce_coalesced(mine, group=group)
        assert torch.equal(mine[0], lazy(kind, [3.0, 4.0]))
        assert torch.equal(mine[1], lazy(kind, [6.0, 9.0]))
        other = [lazy(kind, [group.rank + 5.0]), lazy(kind, [group.rank + 6.0])]
        broadcast_coalesced(other, root=1, group=group)
        assert torch.equal(torch.cat(other), lazy(kind, [6.0, 7.0]))

    run_ranks(2, body)


def test_outputs_that_overlap_are_refused() -> None:
    def body(group: ProcessGroup) -> list[float]:
        memory = torch.zeros(5)
        with pytest.raises(InvalidArgumentError, match=f"all_gather_coalesced on rank {group.rank} .*an output shares memory"):
            all_gather_coalesced([[memory[:2]], [memory[1:3]]], [torch.ones(2)], group)
        all_gather_coalesced([[memory[:2]], [memory[2:4]]], [torch.ones(2) + group.rank], group)  # the group still works
        return memory.tolist()

    assert run_ranks(2, body) == [[1.0, 1.0, 2.0, 2.0, 0.0]] * 2
