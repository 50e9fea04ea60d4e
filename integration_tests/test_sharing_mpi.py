"""Allocation of memory that the ranks of a node share: errors of one rank, and their effect on all."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

if TYPE_CHECKING:
    from syncline.collectives.transports.mpi.node.hierarchy import Hierarchy

pytestmark = pytest.mark.mpi

PART_BYTES = 5000


class Ranks:
    """All ranks, on the node where they are."""

    def __init__(self) -> None:
        from mpi4py import MPI

        from syncline.collectives.transports.mpi.node.hierarchy import Hierarchy

        self.all = MPI.COMM_WORLD.Dup()
        self.hierarchy: Hierarchy = Hierarchy(self.all)
        self.rank, self.size = self.all.Get_rank(), self.all.Get_size()

    def share(self, part_bytes: int = PART_BYTES) -> str:
        """Why the ranks share no memory, or nothing if they do: then each reads what the others wrote."""
        from syncline.collectives.transports.mpi.node.shared_allocation import SharedMemoryError, allocate_shared

        before = len(os.listdir("/proc/self/fd"))
        try:
            segment = allocate_shared(self.hierarchy, self.all, part_bytes, lambda start: start().Wait())
        except SharedMemoryError as error:
            return str(error)
        finally:
            assert len(os.listdir("/proc/self/fd")) == before
        segment.view(segment.mine, 0, 9, torch.float64).copy_(torch.arange(9) * (self.rank + 1))
        self.all.Barrier()
        for rank in range(self.size):
            assert torch.equal(segment.view(rank, 0, 9, torch.float64), torch.arange(9).double() * (rank + 1))
        self.all.Barrier()
        return ""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.hierarchy.node.Free()
    made.all.Free()


def raising(error: Exception) -> Any:
    def raise_it(*_: Any) -> None:
        raise error

    return raise_it


@pytest.mark.parametrize("step", ["memory_limits", "create_file", "open_peer_fd", "reserve", "Segment"])
def test_any_error_of_one_rank_is_told_to_all(ranks: Ranks, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After any error, no rank waits for this one. (A rank that cannot open the file asks for it, which fails here, too.)"""
    from syncline.collectives.transports.mpi.node import shared_allocation

    culprit = 0 if step == "create_file" else ranks.size - 1
    if ranks.rank == culprit:
        monkeypatch.setattr(shared_allocation, step, raising(OverflowError("too large for an int")))
        monkeypatch.setattr(shared_allocation, "request_fd", raising(MemoryError()))
    said = ranks.share()
    if step == "open_peer_fd" and ranks.size == 1:
        assert said == ""
    else:
        also = "; MemoryError: " if step == "open_peer_fd" else ""
        assert said == f"rank {culprit}: OverflowError: too large for an int{also}"
    monkeypatch.undo()
    assert ranks.share() == ""


def test_a_size_that_is_no_size(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the amount of memory is unknown, the system refuses the size, with its own error."""
    from syncline.collectives.transports.mpi.node import shared_allocation

    assert "no room for" in ranks.share(2**61)
    monkeypatch.setattr(shared_allocation, "memory_limits", list)
    assert "rank 0: " in ranks.share(2**63)


@pytest.mark.parametrize("only_last", [True, False])
def test_ranks_that_may_not_look_into_one_another(ranks: Ranks, only_last: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in containers that each have users of their own: the file is handed over at a socket."""
    from syncline.collectives.transports.mpi.node import shared_allocation

    asked = []
    if ranks.rank == ranks.size - 1 or not only_last:
        ask = shared_allocation.request_fd
        monkeypatch.setattr(shared_allocation, "open_peer_fd", raising(PermissionError(13, "Permission denied")))
        monkeypatch.setattr(shared_allocation, "request_fd", lambda *where: asked.append(where) or ask(*where))
    assert ranks.share() == ""
    assert len(asked) == int(ranks.rank > 0 and (ranks.rank == ranks.size - 1 or not only_last))


@pytest.mark.parametrize("step", ["request_fd", "FdServer", "receive_fd"])
def test_neither_way_is_open(ranks: Ranks, step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With separate network namespaces, too: the first error says why each way was closed."""
    from syncline.collectives.transports.mpi.node import shared_allocation

    monkeypatch.setattr(shared_allocation, "open_peer_fd", raising(PermissionError(13, "Permission denied")))
    monkeypatch.setattr(shared_allocation, step, raising(ConnectionRefusedError(111, "Connection refused")))
    said = ranks.share()
    if ranks.size == 1:
        assert said == ""
    elif step == "FdServer":
        assert said.startswith("rank 0: [Errno 111] Connection refused (and ")
    else:
        assert said.startswith("rank 1: [Errno 13] Permission denied; [Errno 111] Connection refused")
    monkeypatch.undo()
    assert ranks.share() == ""


@pytest.mark.parametrize("same", [True, False])
def test_beyond_the_limit_of_a_control_group(ranks: Ranks, same: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel would kill a rank. The ranks share one limit, or each has its own."""
    from syncline.collectives.transports.mpi.node import shared_allocation
    from syncline.collectives.transports.shared_memory.memory_limit import HEADROOM_BYTES, Limit

    identity = (1, 0 if same else ranks.rank)
    sharers = ranks.size if same else 1
    left = HEADROOM_BYTES + sharers * 8192
    monkeypatch.setattr(shared_allocation, "memory_limits", lambda: [Limit(identity, "the limit of /slurm/job_7", left)])
    assert ranks.share(8192) == ""
    assert ranks.share(8193) == (
        "rank 0: [Errno 12] no room for 12,288 bytes of each rank: the limit of /slurm/job_7 leaves 8,192 for each of the "
        f"{sharers} rank(s) under it"
    )


def test_trying_it(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor's attempt."""
    from syncline.collectives.transports.mpi.node import shared_allocation
    from syncline.collectives.transports.mpi.node.shared_allocation import probe_shared_memory

    if ranks.size == 1:
        assert probe_shared_memory() == "nothing to share: every rank is alone on its node"
        return
    assert probe_shared_memory() == "yes: each rank read what the others of its node wrote"
    if ranks.rank == 1:
        monkeypatch.setattr(shared_allocation, "reserve", raising(OSError(12, "no memory left")))
    assert probe_shared_memory() == "no: rank 1: [Errno 12] no memory left"


def test_the_warning(ranks: Ranks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline.collectives.transports.mpi.node import memory, shared_allocation
    from syncline.collectives.transports.mpi.node.node_transport import NodeTransport

    monkeypatch.setattr(memory, "_warned_of", set())
    from syncline.collectives.engine.host_group import HostGroup

    monkeypatch.setattr(shared_allocation, "reserve", raising(OSError(12, "no memory left")))
    group = HostGroup(NodeTransport(ranks.all.Dup()), ranks.rank, ranks.size, timeout_s=30)
    with caplog.at_level(logging.WARNING, "syncline.collectives"):
        group.allocate(100_000, torch.float32)
    group.close()
    others = f" (and {ranks.size - 1} more rank(s))"
    said = f"in a group of {ranks.size} ranks those of a node cannot share memory (rank 0: [Errno 12] no memory left{others}). "
    assert [record.getMessage().partition("They use")[0] for record in caplog.records] == [said] * (
        ranks.rank == 0 < ranks.size - 1
    )
