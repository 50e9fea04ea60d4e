"""Groups in turn; that they overlap is tested under MPI."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from syncline.collectives import (
    DisagreementError,
    InvalidArgumentError,
    MisuseError,
    ProcessGroup,
    ReduceOp,
    RoundRobinGroup,
    Work,
)
from syncline.collectives.engine.composed import PerDeviceGroup
from syncline.collectives.startup.backend import ConnectRequest
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.threads import backend as in_process
from syncline.collectives.work import FinishedWork, PendingWork


def test_each_collective_goes_to_the_next_group() -> None:
    groups = [in_process.connect(ConnectRequest(None, None, None, None, 5.0)) for _ in range(3)]
    in_turn = RoundRobinGroup(groups)
    for _ in range(2):
        in_turn.all_reduce(torch.ones(2))
        in_turn.broadcast(torch.ones(2), 0)
    in_turn.all_reduce(torch.ones(2), async_op=True).wait()
    turns = [[record.name for record in group.recorder.records()] for group in groups]
    assert turns == [["all_reduce", "broadcast"], ["broadcast", "all_reduce"], ["all_reduce"]]
    in_turn.close()


def test_barriers_and_comparisons_of_calls_are_those_of_every_group() -> None:
    groups = [in_process.connect(ConnectRequest(None, None, None, None, 5.0)) for _ in range(3)]
    asked: list[tuple[int, str]] = []

    def note(number: int, name: str, *, async_op: bool) -> Any:
        asked.append((number, name))
        return groups[number].all_reduce(torch.ones(1), async_op=async_op)

    for number, group in enumerate(groups):
        group.agree_on_calls = partial(note, number, "agree_on_calls")  # type: ignore[method-assign]
        group.barrier = partial(note, number, "barrier")  # type: ignore[method-assign]
    in_turn = RoundRobinGroup(groups)
    in_turn.barrier()
    work = in_turn.agree_on_calls(async_op=True)
    assert work is not None
    work.wait()
    assert asked == [(number, name) for name in ("barrier", "agree_on_calls") for number in range(3)]
    in_turn.close()


@pytest.mark.parametrize("async_op", [False, True])
def test_a_comparison_of_calls_fails_if_any_member_group_fails(async_op: bool) -> None:
    groups = [in_process.connect(ConnectRequest(None, None, None, None, 5.0)) for _ in range(2)]

    def finished(*, async_op: bool) -> Work:
        return FinishedWork([])

    def failed(*, async_op: bool) -> Work:
        work = PendingWork([], lambda: "the comparison")
        work.fail(DisagreementError("the second group's calls differ"))
        if not async_op:
            work.wait()
        return work

    groups[0].agree_on_calls = finished  # type: ignore[method-assign, assignment]
    groups[1].agree_on_calls = failed  # type: ignore[method-assign, assignment]
    groups[1]._device_types = frozenset({"cuda"})
    for group in (RoundRobinGroup(groups), PerDeviceGroup({"cpu": groups[0], "cuda": groups[1]})):
        with pytest.raises(DisagreementError, match="the second group's calls differ"):
            waited(group.agree_on_calls(async_op=async_op))
    groups[0].close()
    groups[1].close()


def waited(work: Work | None) -> None:
    assert work is not None
    work.wait()


def groups_in_turn(group: ProcessGroup, number: int) -> RoundRobinGroup:
    parts = [group.split(0) for _ in range(number)]
    return RoundRobinGroup([part for part in parts if part is not None])


@pytest.mark.ranks
def test_a_collective_from_a_callback_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        in_turn = groups_in_turn(group, 2)
        future = in_turn.all_reduce(torch.ones(2), async_op=True).get_future()
        with pytest.raises(MisuseError, match="each rank could choose another member group"):
            future.then(lambda _: in_turn.broadcast(torch.ones(1), 0)).wait()
        in_turn.barrier()
        in_turn.close()

    run_ranks(2, body)


@pytest.mark.ranks
def test_a_sparse_all_reduce_takes_one_turn() -> None:
    """However late its callbacks run on a rank."""

    def body(group: ProcessGroup) -> None:
        in_turn = groups_in_turn(group, 3)
        for number in range(20):
            sparse = torch.eye(3).mul(group.rank + number).to_sparse()
            works = [in_turn.all_reduce(sparse, async_op=True)]
            dense = [torch.full((2,), float(n)) for n in range(4)]
            works += [in_turn.all_reduce(tensor, async_op=True) for tensor in dense]
            for work in works:
                work.wait()
            total = sum(rank + number for rank in range(group.size))
            assert torch.equal(sparse.to_dense(), torch.eye(3) * total)
            assert [tensor.tolist() for tensor in dense] == [[3.0 * n] * 2 for n in range(4)]
        in_turn.close()

    run_ranks(3, body)


def expect_turns_in_step(in_turn: RoundRobinGroup) -> None:
    """A collective in flight on each member group. The sums show whether all ranks have sent them to the same member groups."""
    weights = [100.0**number for number in range(len(in_turn.groups))]
    tensors = [torch.full((1,), weight) for weight in weights]
    for work in [in_turn.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    assert [tensor.item() for tensor in tensors] == [in_turn.size * weight for weight in weights]


@pytest.mark.ranks
def test_a_transfer_between_two_ranks_takes_no_turn() -> None:
    def body(group: ProcessGroup) -> None:
        in_turn = groups_in_turn(group, 3)  # the check and the transfer could take two turns
        received = torch.zeros(1)
        if group.rank == 0:
            in_turn.send(torch.full((1,), 5.0), 1)
        elif group.rank == 1:
            in_turn.recv(received, 0)
            assert received.item() == 5.0
        expect_turns_in_step(in_turn)
        in_turn.close()

    run_ranks(3, body)


def test_only_the_first_member_group_checks_transfers() -> None:
    groups = [in_process.connect(ConnectRequest(None, None, None, None, 5.0)) for _ in range(2)]
    asked: list[int] = []
    for number, group in enumerate(groups):
        group.check_transfer = lambda *_, number=number: asked.append(number)  # type: ignore[method-assign]
    in_turn = RoundRobinGroup(groups)
    in_turn.size = 2
    in_turn.check_transfer("send", torch.ones(1), 1, 5)
    assert asked == [0]
    in_turn.close()


@pytest.mark.ranks
def test_transfers_meet_in_any_order_of_their_receives() -> None:
    def body(group: ProcessGroup) -> None:
        in_turn = groups_in_turn(group, 2)
        if group.rank > 0:
            for tag in (1, 2):
                in_turn.send(torch.full((1,), 10.0 * group.rank + tag), 0, tag)
        else:
            received = torch.zeros(5)
            for number, (src, tag) in enumerate([(2, 2), (1, 2), (2, 1)]):
                in_turn.recv(received[number], src, tag)
            assert in_turn.recv(received[3], None, 1, async_op=True).wait()
            assert received.tolist() == [22.0, 12.0, 21.0, 11.0, 0.0]
        in_turn.close()

    run_ranks(3, body)


@pytest.mark.ranks
def test_a_refused_sparse_all_reduce_takes_no_turn() -> None:
    def body(group: ProcessGroup) -> None:
        in_turn = groups_in_turn(group, 2)
        elsewhere: torch.Tensor = torch.sparse_coo_tensor(size=(3,), device="meta", check_invariants=False)  # type: ignore[call-arg]
        if group.rank == 0:
            with pytest.raises(
                InvalidArgumentError, match="a sparse tensor can be reduced by SUM, AVG and premul_sum, found MAX"
            ):
                in_turn.all_reduce(torch.ones(3).to_sparse(), ReduceOp.MAX)
            with pytest.raises(InvalidArgumentError, match=r"^all_reduce .* moves tensors on cpu, found a tensor on meta"):
                in_turn.all_reduce(elsewhere)
        expect_turns_in_step(in_turn)
        in_turn.close()

    run_ranks(2, body)
