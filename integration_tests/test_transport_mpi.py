"""The transport over MPI alone, as it is between nodes; on one node most calls go through shared memory instead."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from mpi4py import MPI

from syncline.collectives import CollectiveTimeout, DisagreementError, ProcessGroup, ReduceOp
from syncline.collectives.engine import host_group
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.health.statements import ranks_in_words
from syncline.collectives.tensors.reduction import reduce_in_rank_order
from syncline.collectives.testing import CHECKS
from syncline.collectives.transports.mpi import transport as transport_module
from syncline.collectives.transports.mpi.library import Tag
from syncline.collectives.transports.mpi.node.node_transport import NodeTransport
from syncline.collectives.transports.mpi.transport import PRESYNC_MIN_BYTES, MPITransport

pytestmark = pytest.mark.mpi

# Every collective, with every dtype, reduction and root.
CHOSEN = [name for name in CHECKS if "every_dtype" in name or "every_root" in name or "into_tensor" in name or "single" in name]


def connect(*, reproducible: bool = False) -> HostGroup:
    world = MPI.COMM_WORLD
    transport = MPITransport(world.Dup(), reproducible=reproducible)
    return HostGroup(transport, world.Get_rank(), world.Get_size(), timeout_s=30)


@pytest.fixture(scope="module")
def group() -> Iterator[HostGroup]:
    group = connect()
    yield group
    group.close()


def test_the_checks_are_those_of_every_collective() -> None:
    kinds = ("all_reduce", "broadcast", "all_gather", "reduce", "gather", "scatter", "reduce_scatter", "all_to_all")
    assert [kind for kind in kinds if not any(name.startswith(f"{kind}_") for name in CHOSEN)] == []


@pytest.mark.parametrize("check", CHOSEN)
def test_it_conforms(group: ProcessGroup, check: str) -> None:
    CHECKS[check](group)


def test_large_calls_that_differ_are_told_apart_on_every_rank() -> None:
    """See Note [Presync]: small calls are not compared here."""
    group = connect()
    if group.size == 1:
        group.close()
        return
    numel = PRESYNC_MIN_BYTES // 4
    others = ranks_in_words(range(1, group.size))
    calls = rf"\n  rank 0: all_reduce\(float32\[{numel}\], op=SUM\)\n  {others}: all_reduce\(float32\[{numel + 1}\], op=SUM\)"
    with pytest.raises(DisagreementError, match=calls):
        group.all_reduce(torch.ones(numel if group.rank == 0 else numel + 1))
    group.abort()


@pytest.mark.parametrize("check_calls", [False, True])
def test_a_rank_that_closes_while_another_calls_frees_no_communicator(
    check_calls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it did, Open MPI would keep the other rank's messages for the next communicator with the same number."""
    world = MPI.COMM_WORLD
    if world.Get_size() == 1:
        return
    monkeypatch.setattr(host_group, "_FREE_S", 30.0)
    transport = MPITransport(world.Dup())
    # Only with `check_calls` do the two calls meet. Without it, each rank waits until the time limit.
    timeout_s = 30.0 if check_calls else 1.0
    group = HostGroup(transport, world.Get_rank(), world.Get_size(), timeout_s=timeout_s, check_calls=check_calls)
    told = pytest.raises(DisagreementError, match=r"rank.*: close\(\)") if check_calls else nullcontext()
    if group.rank == 1:
        with told if check_calls else pytest.raises(CollectiveTimeout):
            group.all_reduce(torch.ones(1))
        group.abort()
    else:
        with told:
            group.close()
    assert transport._communicator != MPI.COMM_NULL
    world.Barrier()


@pytest.mark.parametrize("all_close", [True, False])
def test_on_one_node_communicators_are_freed_if_all_ranks_close(all_close: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    world = MPI.COMM_WORLD
    transport = NodeTransport(world.Dup())
    group = HostGroup(transport, world.Get_rank(), world.Get_size(), timeout_s=30.0)
    group.all_reduce(torch.ones(1))
    monkeypatch.setattr(host_group, "_FREE_S", 30.0 if all_close else 0.2)
    closes_late = not all_close and group.rank == 1
    if closes_late:
        world.Barrier()
    group.close()
    if not closes_late:
        assert (transport._communicator == MPI.COMM_NULL) == (all_close or group.size == 1)
    if not all_close and not closes_late:
        world.Barrier()


class Kept(MPI.Intracomm):
    """A communicator that can still be asked for messages after a transport has freed it."""

    def Free(self) -> None:  # noqa: N802 - mpi4py's name
        pass


def test_a_status_line_that_nobody_has_read_does_not_outlive_the_transport() -> None:
    """Otherwise Open MPI would keep it for its next communicator with the same number."""
    world = MPI.COMM_WORLD
    transport = MPITransport(world.Dup())
    private = transport._private = Kept(transport._private)
    if world.Get_rank() == 1:
        transport.status_post().post("waits")
    if world.Get_size() > 1 and world.Get_rank() == 0:
        private.Probe(MPI.ANY_SOURCE, Tag.STATUS)
    transport.close()
    assert not private.Iprobe(MPI.ANY_SOURCE, Tag.STATUS)
    MPI.Intracomm.Free(private)


@pytest.mark.parametrize("numel", [4, 1 << 20])
def test_a_message_that_was_never_received_does_not_reach_the_next_group(numel: int, caplog: pytest.LogCaptureFixture) -> None:
    """A large message leaves its sender only when it is received."""
    before = connect()
    sent = [] if before.rank == 0 else [before.send(torch.full((numel,), -1.0), 0, 5, async_op=True)]
    with caplog.at_level(logging.WARNING, "syncline.collectives"):
        before.close()
    others = range(1, before.size) if before.rank == 0 else ()
    words = f"rank {before.rank} closes a group and drops 1 message(s) from rank"
    assert [message[: len(words) + 2] for message in caplog.messages] == [f"{words} {rank}" for rank in others]
    for work in sent:
        assert work.is_completed()
    group = connect()
    for rank in others:
        tensor = torch.empty(numel)
        group.recv(tensor, rank, 5)
        assert torch.equal(tensor, torch.full((numel,), float(rank)))
    if group.rank > 0:
        group.send(torch.full((numel,), float(group.rank)), 0, 5)
    group.close()


def test_if_a_rank_is_lost_while_all_close_the_communicators_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    world = MPI.COMM_WORLD
    if world.Get_size() == 1:
        return
    monkeypatch.setattr(transport_module, "_CLOSE_S", 0.2)
    transport = MPITransport(world.Dup())
    if world.Get_rank() > 0:
        transport.close()
        assert transport._communicator != MPI.COMM_NULL
    world.Barrier()


def test_reproducible_reductions_are_in_rank_order() -> None:
    group = connect(reproducible=True)
    for numel in (1, 2, 1000, 70_001):
        terms = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(group.size)]
        tensor = terms[group.rank].clone()
        group.all_reduce(tensor)
        assert torch.equal(tensor, reduce_in_rank_order(ReduceOp.SUM, terms))
    group.close()


def test_a_receive_that_was_dropped_keeps_its_memory_until_the_message_has_come() -> None:
    """MPI writes to this memory when the message comes, even if it comes very late."""
    transport = MPITransport(MPI.COMM_SELF.Dup())
    tensor = torch.zeros(100)
    request = transport.start_recv(tensor, 0, 7)
    with pytest.raises(TimeoutError):
        request.wait(CancelScope(0.05))
    memory = weakref.ref(tensor)
    del request, tensor
    assert memory() is not None
    transport.start_send(torch.ones(100), 0, 7).wait(CancelScope(30))
    kept = memory()
    assert kept is not None
    deadline = CancelScope(30)
    while kept[-1] == 0 and not deadline.is_over():
        MPI.COMM_SELF.Iprobe()  # Intel MPI delivers messages only inside its calls
    assert kept.unique().tolist() == [1.0]
    del kept
    transport.start_send(torch.ones(1), 0, 8)  # a new transfer checks transfers that were dropped
    assert memory() is None
    transport.start_recv(torch.ones(1), 0, 8).wait(CancelScope(30))
    transport.close()


def test_a_part_of_a_transport_for_a_device_is_for_it_too() -> None:
    whole = MPITransport(MPI.COMM_WORLD.Dup(), on_device=True)
    part = whole.subset(list(range(MPI.COMM_WORLD.Get_size())), "part", 1, CancelScope(30))
    assert isinstance(part, MPITransport)
    assert part._on_device
    part.close()
    whole.close()
