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

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

from syncline.collectives import ProcessGroup, ReduceOp, premul_sum
from syncline.collectives.engine.call import Call, Signature
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.engine.transport import Plan
from syncline.collectives.reduce_op import DTYPES_OF, Reduction
from syncline.collectives.tensors.reduction import reduce_in_rank_order
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.mpi.node import copy_in_copy_out, window
from syncline.collectives.transports.mpi.node.choice import Operation, size_of
from syncline.collectives.transports.mpi.node.copy_in_copy_out import CopyInCopyOut, StagingArea
from syncline.collectives.transports.mpi.node.eager import Eager
from syncline.collectives.transports.mpi.node.memory import Windows
from syncline.collectives.transports.mpi.node.plan import NodePlan
from syncline.collectives.transports.mpi.node.shared_sync import SharedSync, ShmBarrier, barrier_bytes
from syncline.collectives.transports.mpi.node.window import SlicesInWindow, tensor_from_address
from syncline.collectives.transports.shared_memory.os_memory import find_fence
from syncline.collectives.transports.shared_memory.segment import Segment, create_file, padded
from syncline.collectives.transports.threads import InProcessTransport, SharedState
from test_support.full_run import cases

FENCE = find_fence()
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's"),
    pytest.mark.skipif(FENCE is None, reason="this processor's fence is in libatomic, which is not installed"),
]

CELLS = [(op, dtype) for op in ReduceOp for dtype in sorted(DTYPES_OF[op], key=str)]
NUMELS = (1, 3, 16, 61)  # with chunks of 64 bytes: less than a rank each, less than a chunk, and several
OFFSET_BYTES = 32
OPERATIONS = {
    "all_reduce": Operation.ALL_REDUCE,
    "reduce_scatter_tensor": Operation.REDUCE_SCATTER,
    "all_gather_into_tensor": Operation.ALL_GATHER,
    "broadcast": Operation.BROADCAST,
}
PART_BYTES = 4096
SLOT_BYTES = 4096


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


class FakeNode:
    """What plans ask of a `Node` whose ranks are threads: a barrier, a window, and a segment for staging."""

    has_windows = True

    def __init__(self, window: Segment, staging: Segment, barrier: ShmBarrier) -> None:
        self.windows = Windows()
        self.windows.add(window)
        self._staging = staging
        self._sync = SharedSync(barrier, None)  # type: ignore[arg-type]  # it asks for messages only after a disagreement

    def sync(self, call: Call) -> SharedSync:
        return self._sync

    local_sync = shared_sync = sync

    def segment(self, part_bytes: int, call: Call) -> Segment:
        return self._staging


class ByNodePlans(InProcessTransport):
    """Carries out everything by plans of one algorithm."""

    def __init__(self, shared_state: SharedState, rank: int, node: Any, name: str) -> None:
        super().__init__(shared_state, rank)
        self._node, self._name, self._staging = node, name, StagingArea(node)

    def plan(self, signature: Signature) -> Plan:
        operation = OPERATIONS[signature.name]
        size = size_of(operation, signature.nbytes, self._size)
        eager = Eager(self._node, signature, operation, size)
        if self._name == "window":
            return NodePlan(self._node, eager, eager, SlicesInWindow(self._node, signature, operation))
        if self._name == "eager":
            return NodePlan(self._node, eager, eager)
        return NodePlan(self._node, CopyInCopyOut(self._node, signature, operation, self._staging), eager)


class Rank:
    """One rank, whose group carries out everything by one algorithm."""

    def __init__(self, group: HostGroup, window: Segment, name: str) -> None:
        self.group, self.rank, self.size = group, group.rank, group.size
        self._window, self._name = window, name

    def tensor(self, source: torch.Tensor) -> torch.Tensor:
        """A copy, at the same place on every rank, in the window or not."""
        if self._name != "window":
            return source.clone()
        return self._window.view(self.rank, OFFSET_BYTES, source.numel(), source.dtype).copy_(source)

    def took(self, collective: str, tensor: torch.Tensor) -> bool:
        """Whether the latest call on such a tensor went the way that is tested."""
        return self.group.algorithm_of(collective, tensor) == self._name


def on_ranks(size: int, name: str, body: Callable[[Rank], None]) -> None:
    part_bytes, shared_state = barrier_bytes(SLOT_BYTES), SharedState(size)
    files = [create_file("test", size * padded(nbytes)) for nbytes in (PART_BYTES, PART_BYTES, part_bytes)]

    def run(group: ProcessGroup) -> None:
        window, staging = (Segment(file, size, PART_BYTES, group.rank) for file in files[:2])
        # Sleeping lets the other threads run; between processes nothing need be done.
        barrier = ShmBarrier(Segment(files[2], size, part_bytes, group.rank), SLOT_BYTES, lambda: time.sleep(0), FENCE)
        transport = ByNodePlans(shared_state, group.rank, FakeNode(window, staging, barrier), name)
        body(Rank(HostGroup(transport, group.rank, size, timeout_s=30), window, name))

    try:
        run_ranks(size, run)
    finally:
        for file in files:
            os.close(file)


@pytest.fixture(params=["window", "copy-in copy-out", "eager"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["window", "eager"])
def full_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window, "CHUNK_BYTES", 64)
    monkeypatch.setattr(window, "LEAST_CHUNK_BYTES", 1)
    monkeypatch.setattr(copy_in_copy_out, "SLOT_BYTES", 64)


@pytest.mark.parametrize("size", cases([2, 3], in_full=[1, 4]))
def test_all_reduce(size: int, name: str) -> None:
    def body(rank: Rank) -> None:
        for op, dtype in CELLS:
            for numel in NUMELS:
                for repetition in range(2):
                    terms = [data(other + repetition, numel, dtype) for other in range(size)]
                    tensor = rank.tensor(terms[rank.rank])
                    rank.group.all_reduce(tensor, reduction(op))
                    assert rank.took("all_reduce", tensor)
                    assert torch.equal(tensor, reduce_in_rank_order(reduction(op), terms)), (op, dtype, numel, repetition)

    on_ranks(size, name, body)


@pytest.mark.parametrize("size", cases([2, 3], in_full=[1]))
@pytest.mark.parametrize("is_part", [False, True])
def test_reduce_scatter(size: int, name: str, is_part: bool) -> None:
    def body(rank: Rank) -> None:
        for op, dtype in CELLS:
            for numel in NUMELS:
                blocks = [data(other, size * numel, dtype) for other in range(size)]
                block = rank.tensor(blocks[rank.rank])
                mine = block.view(size, numel)[rank.rank]
                output = mine if is_part else torch.zeros(numel, dtype=dtype)
                written, read = output._version, block._version
                rank.group.reduce_scatter_tensor(output, block, reduction(op))
                assert rank.took("reduce_scatter_tensor", output)
                assert output._version > written
                assert is_part or block._version == read
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
                source, written = part if is_part else sources[rank.rank].clone(), block._version
                rank.group.all_gather_into_tensor(block, source)
                assert rank.took("all_gather_into_tensor", source)
                assert block._version > written
                assert is_part or source._version == 0
                assert torch.equal(block.view(torch.uint8), torch.cat(sources).view(torch.uint8)), (dtype, numel)

    on_ranks(size, full_name, body)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_broadcast(size: int, full_name: str) -> None:
    def body(rank: Rank) -> None:
        for root in range(size):
            for numel in NUMELS:
                tensor = rank.tensor(data(rank.rank, numel, torch.float64))
                rank.group.broadcast(tensor, root)
                assert rank.took("broadcast", tensor)
                assert torch.equal(tensor, data(root, numel, torch.float64))

    on_ranks(size, full_name, body)


def test_calls_in_a_row_with_delays(name: str) -> None:
    """Each rank sleeps now and then, so that they overtake one another wherever nothing stops them."""

    def body(rank: Rank) -> None:
        chance = random.Random(rank.rank)
        for repetition in range(60):
            numel = 1 + repetition * 7 % 61
            tensor = rank.tensor(data(rank.rank + repetition, numel, torch.float64))
            _delay(chance)
            rank.group.all_reduce(tensor, ReduceOp.SUM)
            _delay(chance)
            terms = [data(other + repetition, numel, torch.float64) for other in range(rank.size)]
            assert torch.equal(tensor, reduce_in_rank_order(ReduceOp.SUM, terms)), repetition
            tensor.fill_(-1.0)  # nobody may see that any more

    on_ranks(3, name, body)


def _delay(chance: random.Random) -> None:
    if chance.random() < 0.3:
        time.sleep(chance.random() * 1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_view_of_an_address_shares_its_memory_and_keeps_nothing(dtype: torch.dtype) -> None:
    tensor = torch.zeros(6, dtype=dtype)
    with torch.inference_mode():
        view = tensor_from_address(tensor.data_ptr() + 2 * dtype.itemsize, 4, dtype)
    assert not view.is_inference()
    view.fill_(3)
    assert tensor.tolist() == [0, 0, 3, 3, 3, 3]
