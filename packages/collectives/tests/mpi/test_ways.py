"""Collectives in shared memory, with threads for ranks: every reduction and dtype, odd sizes, all in chunks."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline.collectives import ProcessGroup, ReduceOp, premul_sum
from syncline.collectives.backends.mpi.node import in_window, slice_reduction, staging, window_reduction
from syncline.collectives.backends.mpi.node.board import Board, board_bytes, is_ordered
from syncline.collectives.backends.mpi.node.exchange import Exchange
from syncline.collectives.backends.mpi.node.in_window import InWindow
from syncline.collectives.backends.mpi.node.peer_memory import PeerMemory
from syncline.collectives.backends.mpi.node.prepared import PreparedExchange, PreparedSingleCopy
from syncline.collectives.backends.mpi.node.segment import Segment, create_file, padded
from syncline.collectives.backends.mpi.node.single_copy import SingleCopy
from syncline.collectives.backends.mpi.node.staging import Slots, Staged
from syncline.collectives.backends.mpi.node.way import FullWay, Way
from syncline.collectives.backends.mpi.node.windows import Place
from syncline.collectives.contract.collective import Collective
from syncline.collectives.contract.deadline import Deadline
from syncline.collectives.contract.reduce_op import DTYPES_OF, Reduction
from syncline.collectives.host.reduction import reduce_in_rank_order
from syncline.collectives.host.transport import PreparedAllReduce
from syncline.collectives.testing import run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's"),
]

CELLS = [(op, dtype) for op in ReduceOp for dtype in sorted(DTYPES_OF[op], key=str)]
NUMELS = (1, 3, 16, 61)  # with chunks of 64 bytes: less than a rank each, less than a chunk, and several
OFFSET_BYTES = 32
PART_BYTES = 4096
NO_MEETING: Any = None  # who all call the same never needs one


def unexpected(*_: object) -> None:
    raise AssertionError("all tensors can be read")


def reduction(op: ReduceOp) -> Reduction:
    return premul_sum(0.3) if op is ReduceOp.PREMUL_SUM else op


def data(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Depends on rank and index; not exact in floating point, so that the order of additions shows."""
    index = torch.arange(numel)
    if dtype is torch.bool:
        return (index * 3 + rank) % 5 < 2
    if dtype.is_floating_point or dtype.is_complex:
        return (torch.sin(index * 1.7 + rank) * 100).to(dtype)
    return ((index * 5 + rank * 3) % 7).to(dtype)


class Rank:
    """One rank's ways, and tensors as these want them."""

    def __init__(self, group: ProcessGroup, window: Segment, slots: Slots, board: Board, name: str) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self._window, self._slots, self._board, self._name = window, slots, board, name
        self._prepared: dict[object, PreparedAllReduce] = {}

    def tensor(self, source: torch.Tensor) -> torch.Tensor:
        """A copy, at the same place on every rank, in the window or not."""
        if self._name != "in window":
            self._last = source.clone()
            return self._last
        return self._window.view(self.rank, OFFSET_BYTES, source.numel(), source.dtype).copy_(source)

    def all_reduce(self, tensor: torch.Tensor, op: Reduction) -> None:
        """By a way that is made for this call, or by one that was prepared at the first of its kind."""
        if not self._name.startswith("prepared"):
            self.way().all_reduce(tensor, op)
            return
        kind = op, tensor.dtype, tensor.numel()
        if kind not in self._prepared:
            self._prepared[kind] = self._prepare(tensor, op, Collective("all_reduce", tensor, op))
        self._prepared[kind](tensor, Deadline(30))

    def _prepare(self, tensor: torch.Tensor, op: Reduction, call: Collective) -> PreparedAllReduce:
        if self._name == "prepared exchange":
            return PreparedExchange(self._board, NO_MEETING, tensor, op, call)
        return PreparedSingleCopy(self._board, NO_MEETING, self._peers(), tensor, op, call, unexpected)

    def way(self) -> Way:
        """For one call; all ranks have met, if the way wants that."""
        if self._name == "single copy":
            return SingleCopy(self._peers(), self.rank, self._addresses(), self._arrive)
        if self._name != "staged":
            return self.full_way()
        self.group.barrier()
        return Staged(self._slots, self.group.barrier)

    def full_way(self) -> FullWay:
        """The same, if it is not staged."""
        if self._name == "exchange":
            return Exchange(self._board, self._arrive)
        self.group.barrier()
        return InWindow(Place(self._window, OFFSET_BYTES, 0), self.group.barrier)

    def _arrive(self, address: int = 0) -> None:
        self._board.arrive(Deadline(30), address=address)

    def _addresses(self) -> list[int]:
        """Where each rank has the tensor that it made last."""
        self._arrive(self._last.data_ptr())
        return self._board.addresses()

    def _peers(self) -> PeerMemory:
        """All in this process, which may read itself."""
        return PeerMemory([os.getpid()] * self.size)


def on_ranks(size: int, name: str, body: Callable[[Rank], None]) -> None:
    slot_bytes = 1024 if name == "prepared exchange" else 64  # that takes all at once, others piece by piece
    files = [create_file("test", size * padded(nbytes)) for nbytes in (PART_BYTES, PART_BYTES, board_bytes(slot_bytes))]

    def run(group: ProcessGroup) -> None:
        window, slots = (Segment(file, size, PART_BYTES, group.rank) for file in files[:2])
        # Sleeping lets the other threads run; between processes nothing need be done.
        meeting_place = Board(Segment(files[2], size, board_bytes(slot_bytes), group.rank), slot_bytes, lambda: time.sleep(0))
        body(Rank(group, window, Slots(slots), meeting_place, name))

    try:
        run_ranks(size, run)
    finally:
        for file in files:
            os.close(file)


@pytest.fixture(params=["in window", "staged", "exchange", "single copy"])
def name(request: pytest.FixtureRequest) -> str:
    return _usable(request.param)


@pytest.fixture(params=["in window", "staged", "exchange", "single copy", "prepared exchange", "prepared single copy"])
def all_reduce_name(request: pytest.FixtureRequest) -> str:
    return _usable(request.param)


@pytest.fixture(params=["in window", "exchange"])
def full_name(request: pytest.FixtureRequest) -> str:
    return _usable(request.param)


def _usable(name: str) -> str:
    if name not in ("in window", "staged") and not is_ordered():
        pytest.skip("this processor reorders writes")
    return name


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_window, "CHUNK_BYTES", 64)
    monkeypatch.setattr(window_reduction, "CHUNK_BYTES", 64)
    monkeypatch.setattr(window_reduction, "LEAST_CHUNK_BYTES", 1)
    monkeypatch.setattr(staging, "SLOT_BYTES", 64)
    monkeypatch.setattr(slice_reduction, "CHUNK_BYTES", 64)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_all_reduce(size: int, all_reduce_name: str) -> None:
    def body(rank: Rank) -> None:
        for op, dtype in CELLS:
            for numel in NUMELS:
                for repetition in range(2 if all_reduce_name.startswith("prepared") else 1):
                    terms = [data(other + repetition, numel, dtype) for other in range(size)]
                    tensor = rank.tensor(terms[rank.rank])
                    rank.all_reduce(tensor, reduction(op))
                    assert torch.equal(tensor, reduce_in_rank_order(reduction(op), terms)), (op, dtype, numel, repetition)

    on_ranks(size, all_reduce_name, body)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("is_part", [False, True])
def test_reduce_scatter(size: int, name: str, is_part: bool) -> None:
    def body(rank: Rank) -> None:
        for op, dtype in CELLS:
            for numel in NUMELS:
                blocks = [data(other, size * numel, dtype) for other in range(size)]
                block = rank.tensor(blocks[rank.rank])
                mine = block.view(size, numel)[rank.rank]
                output = mine if is_part else torch.zeros(numel, dtype=dtype)
                rank.way().reduce_scatter(output, block, reduction(op))
                terms = [source.view(size, numel)[rank.rank] for source in blocks]
                assert torch.equal(output, reduce_in_rank_order(reduction(op), terms)), (op, dtype, numel)
                expected = blocks[rank.rank].clone()
                if is_part:
                    expected.view(size, numel)[rank.rank] = output
                assert torch.equal(block, expected)

    on_ranks(size, name, body)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("is_part", [False, True])
def test_all_gather(size: int, full_name: str, is_part: bool) -> None:
    def body(rank: Rank) -> None:
        for dtype in (torch.float32, torch.bool, torch.complex128, torch.float8_e4m3fn):
            for numel in NUMELS:
                sources = [data(other, numel, torch.float32).to(dtype) for other in range(size)]
                block = rank.tensor(torch.zeros(size * numel, dtype=dtype))
                part = block.view(size, numel)[rank.rank].copy_(sources[rank.rank])
                rank.full_way().all_gather(block, part if is_part else sources[rank.rank].clone())
                assert torch.equal(block.view(torch.uint8), torch.cat(sources).view(torch.uint8)), (dtype, numel)

    on_ranks(size, full_name, body)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_broadcast(size: int, full_name: str) -> None:
    def body(rank: Rank) -> None:
        for root in range(size):
            for numel in NUMELS:
                tensor = rank.tensor(data(rank.rank, numel, torch.float64))
                rank.full_way().broadcast(tensor, root)
                assert torch.equal(tensor, data(root, numel, torch.float64))

    on_ranks(size, full_name, body)


def test_calls_in_a_row_with_delays(all_reduce_name: str) -> None:
    """Each rank sleeps now and then, so that they overtake one another wherever nothing stops them."""

    def body(rank: Rank) -> None:
        chance = random.Random(rank.rank)
        for repetition in range(60):
            numel = 1 + repetition * 7 % 61
            tensor = rank.tensor(data(rank.rank + repetition, numel, torch.float64))
            _delay(chance)
            rank.all_reduce(tensor, ReduceOp.SUM)
            _delay(chance)
            terms = [data(other + repetition, numel, torch.float64) for other in range(rank.size)]
            assert torch.equal(tensor, reduce_in_rank_order(ReduceOp.SUM, terms)), repetition
            tensor.fill_(-1.0)  # nobody may see that any more

    on_ranks(3, all_reduce_name, body)


def _delay(chance: random.Random) -> None:
    if chance.random() < 0.3:
        time.sleep(chance.random() * 1e-3)
