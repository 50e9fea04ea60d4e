"""The functional forms on the default group over real ranks: names and arguments of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import syncline.collectives as sc
from syncline.collectives import InvalidArgumentError, MisuseError, NonMember, ProcessGroup
from syncline.collectives.health.statements import ranks_in_words
from syncline.ddp import DistributedDataParallel, SyncBatchNorm, convert_sync_batchnorm
from syncline.hooks import PeriodicModelAverager

pytestmark = pytest.mark.mpi


def mine(rank: int) -> torch.Tensor:
    """Depends on rank and index."""
    return torch.arange(4.0) + 10 * rank


def test_rooted_forms_take_ranks_of_the_default_group(world: ProcessGroup) -> None:
    last = world.size - 1
    tensor = mine(world.rank)
    sc.broadcast(tensor, src=last)
    assert tensor.tolist() == mine(last).tolist()
    tensor = mine(world.rank)
    sc.reduce(tensor, dst=last)
    total = sum(mine(rank) for rank in range(world.size)) if world.rank == last else mine(world.rank)
    assert torch.equal(tensor, torch.as_tensor(total))
    outputs = [torch.zeros(4) for _ in range(world.size)] if world.rank == 0 else None
    sc.gather(mine(world.rank), outputs)
    assert outputs is None or [entry.tolist() for entry in outputs] == [mine(r).tolist() for r in range(world.size)]
    sc.scatter(tensor, [mine(2 * r) for r in range(world.size)] if world.rank == 0 else None)
    assert torch.equal(tensor, mine(2 * world.rank))


def test_forms_with_a_part_for_each_rank(world: ProcessGroup) -> None:
    gathered = torch.zeros(world.size * 4)
    work = sc.all_gather_into_tensor(gathered, mine(world.rank), async_op=True)
    assert work is not None
    work.wait()
    assert torch.equal(gathered, torch.cat([mine(rank) for rank in range(world.size)]))
    for scatter, source in (
        (sc.reduce_scatter, [mine(rank + world.rank) for rank in range(world.size)]),
        (sc.reduce_scatter_tensor, torch.cat([mine(rank + world.rank) for rank in range(world.size)])),
    ):
        output = torch.zeros(4)
        assert scatter(output, source) is None  # type: ignore[operator]
        assert torch.equal(output, torch.stack([mine(world.rank + rank) for rank in range(world.size)]).sum(0))
    outputs = [torch.zeros(4) for _ in range(world.size)]
    sc.all_to_all(outputs, [mine(world.rank + 100 * dst) for dst in range(world.size)])
    assert all(torch.equal(output, mine(src + 100 * world.rank)) for src, output in enumerate(outputs))
    output = torch.zeros(world.size)
    sc.all_to_all_single(output, torch.full((world.size,), float(world.rank)))
    assert output.tolist() == list(map(float, range(world.size)))


def test_point_to_point(world: ProcessGroup) -> None:
    if world.size == 1:
        with pytest.raises(InvalidArgumentError, match="another rank"):
            sc.send(mine(0), dst=0)
        return
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    tensor = torch.zeros(4)
    works = sc.batch_isend_irecv([sc.P2POp(sc.isend, mine(world.rank), right), sc.P2POp(sc.irecv, tensor, left)])
    for work in works:
        work.wait()
    assert torch.equal(tensor, mine(left))
    if world.rank == 0:
        assert sorted(sc.recv(tensor, tag=5) for _ in range(world.size - 1)) == list(range(1, world.size))
    else:
        sc.send(mine(world.rank), dst=0, tag=5)


def test_batches_are_checked(world: ProcessGroup) -> None:
    with pytest.raises(InvalidArgumentError, match="at least one"):
        sc.batch_isend_irecv([])
    with pytest.raises(InvalidArgumentError, match="isend or irecv"):
        sc.P2POp(sc.send, mine(0), 0)  # type: ignore[arg-type]


def test_objects(world: ProcessGroup) -> None:
    last = world.size - 1
    places: list[Any] = [None] * world.size
    sc.all_gather_object(places, {"rank": world.rank})
    assert places == [{"rank": rank} for rank in range(world.size)]
    shared = [world.rank, "x" * world.rank]
    sc.broadcast_object_list(shared, src=last)
    assert shared == [last, "x" * last]
    collected: list[Any] | None = [None] * world.size if world.rank == 0 else None
    sc.gather_object(world.rank**2, collected)
    assert collected is None or collected == [rank**2 for rank in range(world.size)]
    received: list[Any] = [None]
    sc.scatter_object_list(received, [("for", rank) for rank in range(world.size)] if world.rank == last else None, src=last)
    assert received == [("for", world.rank)]
    with pytest.raises(InvalidArgumentError, match="places"):
        sc.all_gather_object([None] * (world.size + 1), 0)


def test_coalesced_forms(world: ProcessGroup) -> None:
    tensors = [torch.full((n + 1,), float(world.rank + n)) for n in range(4)] + [torch.full((2,), world.rank)]
    work = sc.all_reduce_coalesced(tensors, async_op=True)
    assert work is not None
    assert [len(work.get_future().wait()), work.wait()] == [5, True]
    total = world.size * (world.size - 1) // 2
    assert [tensor.unique().tolist() for tensor in tensors] == [[total + n * world.size] for n in range(4)] + [[total]]
    outputs = [[torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64)] for _ in range(world.size)]
    sc.all_gather_coalesced(outputs, [torch.full((3,), float(world.rank)), torch.full((2, 2), world.rank + 7)])
    assert [[entry.unique().item() for entry in row] for row in outputs] == [[rank, rank + 7] for rank in range(world.size)]
    with pytest.raises(InvalidArgumentError, match="lists of outputs"):
        sc.all_gather_coalesced(outputs[1:], [torch.zeros(3), torch.zeros(2, 2, dtype=torch.int64)])


def test_new_group(world: ProcessGroup) -> None:
    members = list(range(0, world.size, 2))
    group = sc.new_group(members[::-1])
    tensor = torch.tensor([float(world.rank)])
    if world.rank not in members:
        assert isinstance(group, NonMember)
        assert (sc.get_rank(group), sc.get_world_size(group)) == (-1, -1)
        with pytest.raises(MisuseError, match=f"rank {world.rank} is not in group"):
            sc.all_reduce(tensor, group=group)  # type: ignore[arg-type]
        with pytest.raises(MisuseError, match="is not in group"):
            group.all_reduce(tensor)
        made: list[Callable[[], object]] = [
            lambda: DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group),
            lambda: convert_sync_batchnorm(torch.nn.BatchNorm1d(2), group),
            lambda: SyncBatchNorm(2, process_group=group),
            lambda: PeriodicModelAverager(2, process_group=group).average_parameters([]),
        ]
        for make in made:
            with pytest.raises(MisuseError, match=f"rank {world.rank} is not in group"):
                make()
        return
    assert isinstance(group, ProcessGroup)
    assert group.ranks == tuple(members)
    sc.all_reduce(tensor, group=group)
    assert tensor.item() == sum(members)
    sc.broadcast(tensor.fill_(world.rank), src=members[-1], group=group)
    assert tensor.item() == members[-1]
    if world.size > 1:
        with pytest.raises(InvalidArgumentError, match="is not in group"):
            sc.broadcast(tensor, src=1, group=group)


def test_new_subgroups(world: ProcessGroup) -> None:
    size = 2 if world.size % 2 == 0 else world.size
    group, lists = sc.new_subgroups(size)
    assert lists == [list(range(start, start + size)) for start in range(0, world.size, size)]
    assert list(group.ranks) in lists
    halves = [[0], list(range(1, world.size))] if world.size > 1 else [[0]]
    part, _ = sc.new_subgroups_by_enumeration(halves)
    assert isinstance(part, ProcessGroup)
    assert list(part.ranks) == halves[world.rank > 0]
    with pytest.raises(InvalidArgumentError, match="divides"):
        sc.new_subgroups(world.size + 1)
    with pytest.raises(InvalidArgumentError, match="each rank once"):
        sc.new_subgroups_by_enumeration([[0], [0]])
    with pytest.raises(InvalidArgumentError, match=f"ranks in 0..{world.size - 1}"):
        sc.new_group([world.size])


def test_monitored_barrier_names_the_missing(world: ProcessGroup) -> None:
    sc.monitored_barrier(timeout=20)
    if world.size < 3:
        return
    group = world.split(0)
    assert group is not None
    missing = world.size - 1
    if world.rank == missing:
        world.barrier()
        return
    expected = (
        f"Rank 0 timed out in monitoredBarrier .*: Rank {missing} failed to pass monitoredBarrier"
        if world.rank == 0
        else f"Rank {world.rank} successfully reached monitoredBarrier, but received errors .* from rank 0"
    )
    with pytest.raises(sc.CollectiveTimeout, match=expected):
        sc.monitored_barrier(group, timeout=0.5, wait_all_ranks=True)
    world.barrier()


def test_monitored_barrier_after_a_time_out(world: ProcessGroup) -> None:
    """Over MPI, a receive that rank 0 has given up still takes the next message."""
    others = ", ".join(str(rank) for rank in range(1, world.size))
    for _ in range(3):
        if world.rank == 0 and world.size > 1:
            with pytest.raises(sc.CollectiveTimeout, match=f"Ranks? {others} failed to pass"):
                sc.monitored_barrier(timeout=0.3, wait_all_ranks=True)
        world.barrier()
        sc.monitored_barrier(timeout=20)


def test_round_robin_overlaps_groups(world: ProcessGroup) -> None:
    parts = [part for part in (world.split(0), world.split(0), world.split(0)) if part is not None]
    group = sc.RoundRobinGroup(parts)
    tensors = [torch.full((1000,), float(world.rank + n)) for n in range(12)]
    for work in [group.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    total = world.size * (world.size - 1) / 2
    assert [tensor.unique().tolist() for tensor in tensors] == [[total + n * world.size] for n in range(12)]
    group.close()
    with pytest.raises(InvalidArgumentError, match="at least one group"):
        sc.RoundRobinGroup([])


def test_a_time_out_says_who_waits_and_who_is_silent(mpi_group: ProcessGroup) -> None:
    if mpi_group.size == 1:
        pytest.skip("nobody to wait for")
    group = mpi_group.split(0, timeout_s=1.0)
    assert group is not None
    absent = mpi_group.size - 1
    if mpi_group.rank != absent:
        with pytest.raises(sc.CollectiveTimeout) as caught:
            group.all_reduce(torch.zeros(3, 2))
        text = str(caught.value)
        assert "all_reduce(float32[3, 2], op=SUM), number 0 on rank" in text
        assert f"rank {absent} said nothing" in text
        others = [rank for rank in range(absent) if rank != mpi_group.rank]
        waits = "waits" if len(others) == 1 else "wait"
        assert not others or f"{ranks_in_words(others)} {waits} in all_reduce(float32[3, 2], op=SUM)" in text
        with pytest.raises(sc.TransportError, match="the group had failed before"):
            group.barrier()
    mpi_group.barrier()


def test_wait_with_a_time_limit_of_its_own(mpi_group: ProcessGroup) -> None:
    if mpi_group.size == 1:
        pytest.skip("nobody to wait for")
    group = mpi_group.split(0)
    assert group is not None
    tensor = torch.ones(2)
    if mpi_group.rank == 0:
        work = group.all_reduce(tensor, async_op=True)
        with pytest.raises(sc.CollectiveTimeout, match=r"given to wait\(\)"):
            work.wait(0.2)
        mpi_group.barrier()
    else:
        mpi_group.barrier()
        work = group.all_reduce(tensor, async_op=True)
    work.wait(20)
    assert tensor.tolist() == [mpi_group.size] * 2


def test_tensors_larger_than_a_piece(mpi_group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors beyond MPI's counts are sent in pieces; here a piece is 64 bytes."""
    from syncline.collectives.testing import CHECKS
    from syncline.collectives.transports.mpi import transport

    monkeypatch.setattr(transport, "PIECE_BYTES", 64)
    chosen = [name for name in CHECKS if "every_layout" in name or "sum" in name or "lists" in name or "single" in name]
    assert len(chosen) >= 8
    for name in chosen:
        CHECKS[name](mpi_group)


def test_messages_larger_than_mpi_counts(mpi_group: ProcessGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are sent as one element of a type made of pieces, here of 64 bytes, and of the rest."""
    from mpi4py import MPI

    from syncline.collectives.transports.mpi import transport
    from syncline.collectives.transports.mpi.library import message

    monkeypatch.setattr(transport, "PIECE_BYTES", 64)
    _, count, datatype = message(torch.zeros(173, dtype=torch.uint8), 64)
    assert (count, datatype.Get_size(), datatype.Get_extent()) == (1, 173, (0, 173))
    assert message(torch.zeros(64, dtype=torch.uint8), 64)[1] is MPI.BYTE
    if mpi_group.size == 1:
        return
    rank, size = mpi_group.rank, mpi_group.size
    given = torch.arange(173, dtype=torch.uint8) + rank
    taken = torch.zeros_like(given)
    work = mpi_group.recv(taken, (rank - 1) % size if rank else None, async_op=True)
    mpi_group.send(given, (rank + 1) % size)
    work.wait(20)
    assert work.source_rank() == (rank - 1) % size
    assert taken.tolist() == (torch.arange(173, dtype=torch.uint8) + (rank - 1) % size).tolist()
    mpi_group.barrier()
    if rank == 0:
        mpi_group.send(given[:170], 1)
    elif rank == 1:
        with pytest.raises(sc.DisagreementError, match="rank 0 sent 170 bytes, this rank expects 173"):
            mpi_group.recv(taken, 0)
    mpi_group.barrier()
    if rank == 0:
        mpi_group.send(given, 1)
    elif rank == 1:
        work = mpi_group.recv(taken[:170], 0, async_op=True)
        for _ in range(2):  # the second wait raises the same error
            with pytest.raises(sc.DisagreementError, match="sent more bytes than the 170 bytes that this rank expects"):
                work.wait(20)
        assert taken[170:].tolist() == given[170:].sub(1).tolist()
