"""Collectives through memory that ranks of a node share: which algorithm runs, on one node and on emulated ones."""

from __future__ import annotations

import gc
import logging
import os
import random
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from syncline.collectives import (
    CollectiveTimeout,
    DisagreementError,
    ProcessGroup,
    ReduceOp,
    RoundRobinGroup,
    TransportError,
    exchange_objects,
    premul_sum,
)
from syncline.collectives.engine.call import Call
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.engine.transport import Plan
from syncline.collectives.health.statements import ranks_in_words
from syncline.collectives.reduce_op import DTYPES_OF, Reduction
from syncline.collectives.startup.settings import AlgorithmThresholds
from syncline.collectives.tensors.reduction import reduce_in_rank_order
from syncline.collectives.testing import CHECKS
from syncline.collectives.transports.shared_memory.os_memory import huge_page_bytes
from syncline.collectives.transports.shared_memory.segment import Segment, create_file
from syncline.ddp import DistributedDataParallel
from test_support.full_run import FULL

pytestmark = pytest.mark.mpi

REDUCTIONS = [
    "all_reduce_every_dtype_and_reduction",
    "all_reduce_every_layout",
    "reduce_scatter_sum",
    "reduce_scatter_in_place",
]
NEVER = 2**62
# For each algorithm, the sizes for which it can run.
ALGORITHMS = {
    "eager": AlgorithmThresholds(eager_bytes=NEVER, staged_bytes=NEVER),
    "copy-in copy-out": AlgorithmThresholds(eager_bytes=1, window_bytes=1, staged_bytes=1),
    "MPI": AlgorithmThresholds(eager_bytes=1, window_bytes=NEVER, staged_bytes=NEVER),
}
STAGED, BY_MPI = ALGORITHMS["copy-in copy-out"], ALGORITHMS["MPI"]
# With these values every order of additions gives the same bits.
EXACT = [
    (op, dtype) for op in ReduceOp for dtype in sorted(DTYPES_OF[op], key=str) if op not in (ReduceOp.AVG, ReduceOp.PRODUCT)
]


class Group:
    """A group of all ranks, which notes the algorithms of its plans."""

    def __init__(self, **options: Any) -> None:
        from mpi4py import MPI

        from syncline.collectives.transports.mpi.node.node_transport import NodeTransport

        world = MPI.COMM_WORLD
        self.transport = NodeTransport(world.Dup(), **options)
        self.group = HostGroup(self.transport, world.Get_rank(), world.Get_size(), timeout_s=30)
        self.algorithms: list[str] = []
        make = self.transport.plan

        def recording(*arguments: Any) -> RecordingPlan:
            return RecordingPlan(make(*arguments), self.algorithms)

        self.transport.plan = recording  # type: ignore[method-assign, assignment]

    def took(self, algorithm: str) -> list[str]:
        """The expected algorithm for each call; MPI's own if the rank is alone."""
        return [algorithm if self.group.size > 1 else "MPI"] * len(self.algorithms)


class RecordingPlan(Plan):
    """Wraps another plan, and adds to a list in each run."""

    def __init__(self, plan: Plan, algorithms: list[str]) -> None:
        self._plan = plan
        self._algorithms = algorithms

    @property
    def algorithm(self) -> str:
        return self._plan.algorithm

    def run(self, part: torch.Tensor, whole: torch.Tensor | None, call: Call) -> None:
        self._plan.run(part, whole, call)
        self._algorithms.append(self._plan.algorithm)


def by_pairs(communicator: Any) -> Any:
    """Ranks 0 and 1 on one node, 2 and 3 on the next, and so on."""
    return communicator.Split(communicator.Get_rank() // 2, communicator.Get_rank())


def alone(communicator: Any) -> Any:
    """Every rank on a node of its own."""
    return communicator.Split(communicator.Get_rank())


@pytest.fixture(scope="module")
def staged() -> Iterator[Group]:
    """A group in which all sizes go through windows or are staged."""
    made = Group(thresholds=STAGED)
    yield made
    made.group.close()


@pytest.fixture(scope="module", params=["eager", "copy-in copy-out"])
def one_algorithm(request: pytest.FixtureRequest) -> Iterator[tuple[Group, str]]:
    """A group, and the algorithm of its reductions of all sizes."""
    made = Group(thresholds=ALGORITHMS[request.param])
    yield made, request.param
    made.group.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Group]:
    """A staged group on nodes of two ranks; the last node may have one."""
    made = Group(thresholds=STAGED, split=by_pairs)
    yield made
    made.group.close()


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline.collectives.transports.mpi.node import copy_in_copy_out, hierarchical, window

    monkeypatch.setattr(window, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(window, "LEAST_CHUNK_BYTES", 1 << 8)
    monkeypatch.setattr(copy_in_copy_out, "SLOT_BYTES", 1 << 10)
    monkeypatch.setattr(hierarchical, "CHUNK_BYTES", 1 << 10)


def noise(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


def whole(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return ((torch.arange(numel) * 5 + rank * 3) % (2 if dtype is torch.bool else 7)).to(dtype)


def reduction(op: ReduceOp) -> Reduction:
    return premul_sum(2) if op is ReduceOp.PREMUL_SUM else op


def calls_of(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> list[None]:
    """A list that grows with each call of a class's method."""
    called: list[None] = []
    function = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        called.append(None)
        return function(*arguments, **options)

    monkeypatch.setattr(owner, name, counted)
    return called


def huge_bytes_at(address: int) -> int:
    """How much of the mapping around an address uses huge pages."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if ":" not in name:
            start, stop = (int(edge, 16) for edge in name.split("-"))
            found = start <= address < stop
        elif found and name == "ShmemPmdMapped:":
            return int(rest[0]) << 10
    return 0


def makes_huge_pages() -> bool:
    """Whether this system uses huge pages, tested on one rank alone."""
    size = huge_page_bytes()
    if not size:
        return False
    file = create_file("test", size)
    segment = Segment(file, 1, size, 0)
    os.close(file)
    segment.view(0, 0, size, torch.uint8).zero_()
    segment.use_huge_pages()
    return huge_bytes_at(segment.address()) > 0


def test_windows_lie_in_huge_pages(staged: Group) -> None:
    if not makes_huge_pages() or staged.group.size == 1:
        pytest.skip("on several ranks, and where the kernel makes huge pages of shared memory")
    tensor = staged.group.allocate(4 * huge_page_bytes() // 4, torch.float32)
    assert huge_bytes_at(tensor.data_ptr()) >= 2 * huge_page_bytes()


@pytest.mark.parametrize("check", REDUCTIONS)
def test_each_algorithm_conforms(one_algorithm: tuple[Group, str], small_pieces: None, check: str) -> None:
    made, algorithm = one_algorithm
    made.algorithms.clear()
    CHECKS[check](made.group)
    # A tensor without elements always goes to MPI.
    assert set(made.algorithms) - {"MPI"} == ({algorithm} if made.group.size > 1 else set())


def test_in_the_window(staged: Group, small_pieces: None) -> None:
    group = staged.group
    memory = group.allocate((group.size + 1) * 1003, torch.float32)
    block, tensor = memory[: group.size * 1003], memory[5:1008]
    staged.algorithms.clear()
    terms = [noise(rank, 1003) for rank in range(group.size)]
    total = reduce_in_rank_order(ReduceOp.AVG, terms)
    group.all_reduce(tensor.copy_(terms[group.rank]), ReduceOp.AVG)
    assert torch.equal(tensor, total)
    work = group.all_reduce(tensor.copy_(terms[group.rank]), ReduceOp.AVG, async_op=True)
    work.wait()
    assert torch.equal(tensor, total)
    group.broadcast(tensor.copy_(terms[group.rank]), group.size - 1)
    assert torch.equal(tensor, terms[-1])
    group.all_gather_into_tensor(block, terms[group.rank])
    assert torch.equal(block, torch.cat(terms))
    output = torch.zeros(1003)
    group.reduce_scatter_tensor(output, block.mul_(group.rank + 1))
    assert torch.equal(output, reduce_in_rank_order(ReduceOp.SUM, [terms[group.rank] * (r + 1) for r in range(group.size)]))
    assert staged.algorithms == staged.took("window")


def test_where_the_ranks_tensors_lie_is_agreed(staged: Group) -> None:
    """Tensors in the window at different places, on some ranks only, and on its edge: the result is the same."""
    group = staged.group
    window = group.allocate(1024, torch.float32)
    last = group.rank == group.size - 1
    edge = window.as_strided((1020,), (1,), 0)
    for tensor, algorithm in (
        (window[1:1001] if last else window[:1000], "copy-in copy-out"),
        (torch.empty(1000) if last else window[:1000], "copy-in copy-out"),
        (edge[20:], "window"),
    ):
        staged.algorithms.clear()
        terms = [noise(rank, 1000) for rank in range(group.size)]
        group.all_reduce(tensor.copy_(terms[group.rank]))
        assert torch.equal(tensor, reduce_in_rank_order(ReduceOp.SUM, terms))
        assert staged.algorithms == staged.took(algorithm)


def test_every_reduction_on_emulated_nodes(nodes: Group, small_pieces: None) -> None:
    """Whole numbers, odd sizes; ranks 2 + 2, and 2 + 1. In the latter only one rank of each node owns a slice."""
    group = nodes.group
    nodes.algorithms.clear()
    for op, dtype in EXACT:
        memory = group.allocate(700, dtype)
        for numel in (700, 1):
            tensor = memory[:numel].copy_(whole(group.rank, numel, dtype))
            group.all_reduce(tensor, reduction(op))
            terms = [whole(rank, numel, dtype) for rank in range(group.size)]
            assert torch.equal(tensor, reduce_in_rank_order(reduction(op), terms)), (op, dtype, numel)
    assert nodes.algorithms == nodes.took("hierarchical" if group.size > 2 else "window")


def test_averages_and_rounding_on_emulated_nodes(nodes: Group) -> None:
    group = nodes.group
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.complex64):
        tensor = group.allocate(700, dtype).copy_(noise(group.rank, 700, dtype))
        group.all_reduce(tensor, ReduceOp.AVG)
        expected = reduce_in_rank_order(ReduceOp.AVG, [noise(rank, 700, dtype) for rank in range(group.size)])
        assert torch.allclose(tensor, expected, atol=1e-2 if dtype is torch.bfloat16 else 1e-6)
        _same_bits(group, tensor)
    halves = group.allocate(3, torch.bfloat16).fill_(256.0 if group.rank == 0 else 1.0)
    group.all_reduce(halves)
    assert halves.tolist() == torch.full((3,), 256.0 + group.size - 1).bfloat16().tolist()  # rounded once


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_cross_as_float32_and_come_back_as_halves(
    nodes: Group, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = nodes.group.allocate(4000, dtype).copy_(whole(nodes.group.rank, 4000, dtype))
    crossed: list[tuple[str, int]] = []
    between = nodes.transport._between
    if between is not None:
        collective = between._collective

        def recording(name: str, arguments: Any, nbytes: int, *rest: Any) -> None:
            crossed.append((name, nbytes))
            collective(name, arguments, nbytes, *rest)

        monkeypatch.setattr(between, "_collective", recording)
    nodes.group.all_reduce(tensor)
    numel = 4000 // nodes.transport._hierarchy.leaders
    assert crossed == ([] if between is None else [("Alltoallv", 4 * numel), ("Allgatherv", 2 * numel)])


@pytest.mark.parametrize("has_windows", [False, True], ids=["no windows", "windows"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, premul_sum(0.5)], ids=str)
def test_halves_outside_windows_cross_by_the_slice(
    nodes: Group, op: Reduction, has_windows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, the last of which is shorter; repeatedly, and with ranks that come late."""
    from syncline.collectives.transports.mpi.node import hierarchical

    monkeypatch.setattr(hierarchical, "STAGE_BYTES", 2048)
    group, generator = nodes.group, random.Random(nodes.group.rank)
    made = Group(thresholds=STAGED, split=by_pairs)
    crossings = calls_of(monkeypatch, hierarchical.NodeReduction, "run")
    window = made.group.allocate(10, torch.float32) if has_windows else None
    for repetition in range(20):
        tensor = whole(group.rank + repetition, 5000, torch.bfloat16)
        terms = [whole(rank + repetition, 5000, torch.bfloat16) for rank in range(group.size)]
        time.sleep(generator.random() * 0.003)
        made.group.all_reduce(tensor, op)
        expected = reduce_in_rank_order(op, terms)
        assert torch.equal(tensor, expected)
        _same_bits(made.group, tensor)
    del window
    has_two_on_each = group.size == 4
    assert len(crossings) == (20 * 5 if has_two_on_each else 0)
    made.group.close()


def test_staged_halves_are_rounded_once_and_other_dtypes_are_exact() -> None:
    """Also a tensor with fewer elements than a node has ranks."""
    made = Group(thresholds=STAGED, split=by_pairs)
    group = made.group
    for dtype in (torch.bfloat16, torch.float16):
        large = 256.0 if dtype is torch.bfloat16 else 2048.0  # so large that adding 1 changes nothing
        halves = torch.full((1,), large if group.rank == 0 else 1.0, dtype=dtype)
        group.all_reduce(halves)
        assert halves.tolist() == torch.full((1,), large + group.size - 1).to(dtype).tolist()
    for op, dtype in EXACT:
        tensor = whole(group.rank, 701, dtype)
        group.all_reduce(tensor, reduction(op))
        terms = [whole(rank, 701, dtype) for rank in range(group.size)]
        assert torch.equal(tensor, reduce_in_rank_order(reduction(op), terms)), (op, dtype)
    group.close()


@pytest.mark.parametrize("has_windows", [False, True], ids=["no windows", "windows"])
def test_ranks_that_stage_different_calls_are_told_so(has_windows: bool) -> None:
    made = Group(thresholds=STAGED, split=by_pairs)
    if made.group.size == 1:
        pytest.skip("no other rank")
    if has_windows:
        made.group.allocate(10, torch.float32)
    numel = 40_000 if made.group.rank == 0 else 40_001
    with pytest.raises(DisagreementError, match="40000"):
        made.group.all_reduce(torch.ones(numel, dtype=torch.bfloat16))
    made.group.abort()


def test_halves_outside_windows_where_no_memory_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline.collectives.transports.mpi.node import hierarchical

    made = Group(thresholds=STAGED, split=by_pairs)
    # All ranks are told if one of them gets no memory.
    monkeypatch.setattr(made.transport._node, "_new_segment", lambda *_: None)
    crossings = calls_of(monkeypatch, hierarchical.NodeReduction, "run")
    for _ in range(2):
        tensor = whole(made.group.rank, 5000, torch.bfloat16)
        made.group.all_reduce(tensor)
        terms = [whole(rank, 5000, torch.bfloat16) for rank in range(made.group.size)]
        assert torch.equal(tensor, reduce_in_rank_order(ReduceOp.SUM, terms))
    assert not crossings
    made.group.close()


def test_other_collectives_on_emulated_nodes(nodes: Group) -> None:
    group = nodes.group
    block = group.allocate(group.size * 100, torch.float32)
    group.all_gather_into_tensor(block, noise(group.rank, 100))
    assert torch.equal(block, torch.cat([noise(rank, 100) for rank in range(group.size)]))
    group.broadcast(block[:100].copy_(noise(group.rank, 100)), group.size - 1)
    assert torch.equal(block[:100], noise(group.size - 1, 100))


# ---- between nodes ----


@pytest.mark.parametrize("numel", [16_384, 70_001, 300_000])
@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (ReduceOp.SUM, torch.float32),
        (ReduceOp.AVG, torch.float64),
        (ReduceOp.AVG, torch.int32),
        (ReduceOp.MAX, torch.int32),
        (ReduceOp.PRODUCT, torch.int64),
        (ReduceOp.BXOR, torch.int64),
    ],
)
def test_nodes_of_one_rank_reduce_in_a_ring(
    monkeypatch: pytest.MonkeyPatch, op: ReduceOp, numel: int, dtype: torch.dtype
) -> None:
    """Parts of one piece, of several, and of more than can arrive at once; in turn, so that a rank may be a call ahead."""
    from syncline.collectives.transports.mpi import ring_all_reduce

    for name, nbytes in (("LEAST_PIECE_BYTES", 1 << 14), ("MOST_PIECE_BYTES", 1 << 16), ("LANDING_BYTES", 150_000)):
        monkeypatch.setattr(ring_all_reduce, name, nbytes)
    made = Group(thresholds=replace(BY_MPI, ring_bytes=1), split=alone)
    group = made.group
    for number in range(3):
        terms = [whole(rank + number, numel, dtype) for rank in range(group.size)]
        tensor = terms[group.rank].clone()
        if group.rank == number % group.size:
            time.sleep(0.01)
        group.all_reduce(tensor, op)
        assert torch.equal(tensor, reduce_in_rank_order(op, terms))
    assert made.algorithms == made.took("ring")
    group.close()


def test_sums_of_a_ring_have_the_same_bits_on_every_rank() -> None:
    group = Group(thresholds=replace(BY_MPI, ring_bytes=1), split=alone).group
    tensor = noise(group.rank, 100_000)
    group.all_reduce(tensor)
    assert all(torch.equal(tensor, other) for other in exchange_objects(tensor, group=group))
    group.close()


def test_leaders_of_nodes_reduce_in_a_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline.collectives.transports.mpi.ring_all_reduce import RingAllReduce

    called = calls_of(monkeypatch, RingAllReduce, "run")
    group = Group(thresholds=replace(STAGED, ring_bytes=1), split=by_pairs).group
    tensor = group.allocate(100_000, torch.float32).copy_(whole(group.rank, 100_000, torch.float32))
    group.all_reduce(tensor)
    assert torch.equal(
        tensor, reduce_in_rank_order(ReduceOp.SUM, [whole(r, 100_000, torch.float32) for r in range(group.size)])
    )
    assert any(exchange_objects(bool(called), group=group)) == (group.size > 2)
    group.close()


@pytest.mark.parametrize("split", [None, by_pairs], ids=["one node", "emulated nodes"])
def test_reproducible_is_in_rank_order_everywhere(split: Callable[[Any], Any] | None) -> None:
    options = {} if split is None else {"split": split}
    group = Group(reproducible=True, thresholds=replace(STAGED, staged_bytes=2048), **options).group
    memory = group.allocate(1000, torch.float32)
    for tensor in (memory, memory.clone(), torch.empty(100)):
        terms = [noise(rank, tensor.numel()) for rank in range(group.size)]
        group.all_reduce(tensor.copy_(terms[group.rank]))
        assert torch.equal(tensor, reduce_in_rank_order(ReduceOp.SUM, terms))
    group.close()


PLANS = [(5, AlgorithmThresholds(), "eager"), (1_200_001, STAGED, "copy-in copy-out"), (10_000, BY_MPI, "MPI")]


@pytest.mark.parametrize(("numel", "thresholds", "algorithm"), PLANS, ids=[name for _, _, name in PLANS])
def test_a_plan_serves_tracked_and_plain_tensors_in_turn(numel: int, thresholds: AlgorithmThresholds, algorithm: str) -> None:
    """On rank 0 the second tensor is tracked, on the others it is not."""
    made = Group(thresholds=thresholds)
    group = made.group
    for number in range(4):
        terms = [whole(rank + number, numel, torch.float32) for rank in range(group.size)]
        tensor = terms[group.rank].clone().requires_grad_(number < 2 and group.rank == 0)
        group.all_reduce(tensor)
        assert torch.equal(tensor.detach(), reduce_in_rank_order(ReduceOp.SUM, terms))
    assert made.algorithms == made.took(algorithm)
    assert len(made.algorithms) == 4
    assert group.algorithm_of("all_reduce", tensor) == made.algorithms[-1]
    group.close()


@pytest.mark.parametrize("numel", [40_000, 1_200_001])
def test_windows_that_are_made_after_a_plan_are_used(numel: int) -> None:
    made = Group()
    group = made.group
    plain = torch.empty(numel)
    for _ in range(2):
        _sum_of_noise(group, plain)
    elsewhere = made.algorithms[0]
    window = group.allocate(numel, torch.float32)
    for tensor in (window, plain, window):
        _sum_of_noise(group, tensor)
    in_window = "window" if group.size > 1 else elsewhere
    assert made.algorithms == [elsewhere] * 2 + [in_window, elsewhere, in_window]
    for tensor in (window, plain):
        if group.rank == 0:  # it has no plan, others have
            group._plans.clear()
        _sum_of_noise(group, tensor)
    group.close()


@pytest.mark.parametrize("numel", [40_000, 200_000, 1_200_001])
def test_what_was_planned_in_windows_serves_tensors_elsewhere(numel: int) -> None:
    """Also if the algorithm for such tensors was never tried before."""
    for thresholds in (AlgorithmThresholds(), STAGED, replace(BY_MPI, window_bytes=1)):
        group = Group(thresholds=thresholds).group
        window = group.allocate(numel, torch.float32)
        for tensor in (window, window, torch.empty(numel), torch.empty(numel), window):
            _sum_of_noise(group, tensor)
            if group.rank == 0:  # it has no plan, others have
                group._plans.clear()
        group.close()


@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX, ReduceOp.PREMUL_SUM])
@pytest.mark.parametrize("numel", [8, 40_000, 200_000])
def test_a_plan_serves_windows_and_plain_memory_and_tells_autograd(op: ReduceOp, numel: int) -> None:
    """By every algorithm, with tensors of two dimensions. Autograd sees that they were written."""
    for thresholds in (*ALGORITHMS.values(), replace(STAGED, window_bytes=1024)):
        group = Group(thresholds=thresholds).group
        for tensor in (group.allocate(numel, torch.float32).view(2, -1), torch.empty(2, numel // 2), torch.empty(numel)):
            for number in range(3):
                terms = [whole(rank + number, numel, torch.float32).view(tensor.shape) for rank in range(group.size)]
                version = tensor.copy_(terms[group.rank])._version
                group.all_reduce(tensor, reduction(op))
                assert torch.allclose(tensor, reduce_in_rank_order(reduction(op), terms))
                assert tensor._version > version
        group.close()


def _sum_of_noise(group: ProcessGroup, tensor: torch.Tensor) -> None:
    terms = [noise(rank, tensor.numel()) for rank in range(group.size)]
    group.all_reduce(tensor.copy_(terms[group.rank]))
    assert torch.allclose(tensor, torch.stack(terms).sum(0), atol=1e-5)


@pytest.mark.parametrize("numel", [5, 1_200_001])
def test_planned_calls_that_differ_are_told_apart(numel: int) -> None:
    group = Group().group
    if group.size > 1:
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            group.all_reduce(torch.ones(numel), op)
        others = ranks_in_words(range(1, group.size))
        calls = rf"\n  rank 0: all_reduce\(float32\[{numel}\], op=AVG\)\n  {others}: all_reduce\(float32\[{numel}\], op=SUM\)"
        with pytest.raises(DisagreementError, match=calls):
            group.all_reduce(torch.ones(numel), ReduceOp.AVG if group.rank == 0 else ReduceOp.SUM)
        group.abort()
    else:
        group.close()


@pytest.mark.parametrize("numel", [5, 40_000, 1_200_001])
@pytest.mark.parametrize("in_window", [False, True])
def test_what_is_kept_for_the_next_call_keeps_no_tensor(numel: int, in_window: bool) -> None:
    made = Group(thresholds=AlgorithmThresholds(window_bytes=1))
    group = made.group
    tensor = group.allocate(numel, torch.float32) if in_window else torch.empty(numel)
    for _ in range(3):
        _sum_of_noise(group, tensor)
    kept = weakref.ref(tensor)
    del tensor
    assert kept() is None
    assert len(made.transport._node.windows) == 0
    group.close()


def test_a_rank_that_fails_within_a_collective_is_named_by_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from syncline.collectives.transports.mpi.node import copy_in_copy_out

    group = Group().group
    group.all_reduce(torch.zeros(1_200_000))
    last = group.size - 1
    if group.rank == last:
        monkeypatch.setattr(copy_in_copy_out.CopyInCopyOut, "_reduce", _refused)
    if group.size > 1:
        words = "not permitted" if group.rank == last else rf"rank {last} of this node gave up|rank \d of this node gave up"
        with pytest.raises(TransportError, match=words):
            group.all_reduce(torch.zeros(1_200_000))
        group.abort()


def _refused(*_: Any) -> None:
    raise TransportError("not permitted")


def test_a_rank_that_comes_late_with_another_call_does_not_wait() -> None:
    """The others gave up before. All have plans for the calls, so nothing would stop a late rank."""
    group = Group().group
    if group.size > 1:
        group.all_reduce(torch.zeros(1))
        late = group.split(0)
        assert late is not None
        for numel in (1, 4, 8):
            late.all_reduce(torch.zeros(numel))
        late.set_timeout(0.5)
        if group.rank == 0:
            with pytest.raises(CollectiveTimeout, match=r"all_reduce\(float32\[4\], op=SUM\).* did not finish within 0\.5 s"):
                late.all_reduce(torch.zeros(4))
        group.barrier()
        if group.rank > 0:
            with pytest.raises(TransportError, match="gave up"):
                late.all_reduce(torch.zeros(8))
        late.abort()
    group.close()


def mappings() -> int:
    """How many segments of shared memory this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:syncline")


def test_memory_to_stage_in_is_made_when_a_tensor_needs_it() -> None:
    made = Group(thresholds=STAGED)
    group = made.group
    window = group.allocate(1000, torch.float32)
    _sum_of_noise(group, window)
    in_window = mappings()
    _sum_of_noise(group, torch.empty(1000))
    assert mappings() == in_window + (group.size > 1)
    assert made.algorithms == [*made.took("window")[:1], *made.took("copy-in copy-out")[:1]]
    group.close()


def test_closing_gives_the_memory_back() -> None:
    gc.collect()
    before = mappings()
    made = Group()
    made.group.all_reduce(torch.zeros(1))
    assert mappings() == before + (made.group.size > 1)
    made.group.close()
    gc.collect()
    assert mappings() == before


@pytest.mark.parametrize("dtype", [torch.uint4, torch.int3, torch.bits8, torch.float8_e5m2, torch.uint16], ids=str)
def test_what_torch_cannot_copy_moves_all_the_same(staged: Group, dtype: torch.dtype) -> None:
    for group in (staged.group, Group().group):
        source = torch.arange(24, dtype=torch.uint8).view(dtype)
        tensor = (source if group.rank == 0 else torch.zeros(24, dtype=torch.uint8).view(dtype)).view(-1)
        group.broadcast(tensor, 0)
        assert torch.equal(tensor.view(torch.uint8), source.view(torch.uint8))
        block = torch.zeros(24 * group.size, dtype=torch.uint8).view(dtype)
        group.all_gather_into_tensor(block, source)
        assert torch.equal(block.view(torch.uint8), source.view(torch.uint8).repeat(group.size))
        if group is not staged.group:
            group.close()


@pytest.mark.parametrize("dtype", [torch.uint4, torch.int3, torch.bits8], ids=str)
def test_a_window_holds_what_torch_cannot_fill(staged: Group, dtype: torch.dtype) -> None:
    window = staged.group.allocate(300_000, dtype)
    assert (window.numel(), window.dtype) == (300_000, dtype)
    assert window.view(torch.uint8).fill_(3).sum() == 3 * window.nbytes


@pytest.mark.parametrize(
    "options", [{}, {"thresholds": replace(BY_MPI, ring_bytes=1), "split": alone}], ids=["one node", "a ring of nodes"]
)
def test_another_default_device_does_no_harm(options: dict[str, Any]) -> None:
    with torch.device("meta"):
        group = Group(**options).group
        for numel in (5, 1_200_000):
            tensor = torch.full((numel,), 1.0, device="cpu")
            group.all_reduce(tensor)
            assert tensor[-1].item() == group.size
        part = group.split(0)
        assert part is not None
    group.close()


@pytest.mark.parametrize("numel", [4, 100])
def test_calls_that_differ_are_told_apart(numel: int) -> None:
    group = Group(thresholds=replace(STAGED, eager_bytes=64, window_bytes=64)).group
    if group.size == 1:
        group.close()
        return
    window = group.allocate(numel, torch.float32)
    others = ranks_in_words(range(1, group.size))
    calls = rf"\n  rank 0: all_reduce\(float32\[{numel}\], op=AVG\)\n  {others}: all_reduce\(float32\[{numel}\], op=SUM\)"
    with pytest.raises(DisagreementError, match=calls):
        group.all_reduce(window, ReduceOp.AVG if group.rank == 0 else ReduceOp.SUM)
    group.abort()


@pytest.mark.usefixtures("small_pieces")  # it changes how the group divides its memory
def test_shapes_may_differ_as_in_torch(one_algorithm: tuple[Group, str]) -> None:
    group = one_algorithm[0].group
    tensor = torch.full((2, 6) if group.rank % 2 else (12,), float(group.rank))
    group.all_reduce(tensor)
    assert tensor.unique().tolist() == [group.size * (group.size - 1) / 2]


def test_allocations_that_differ_are_told_apart() -> None:
    group = Group().group
    if group.size == 1:
        group.close()
        return
    with pytest.raises(DisagreementError, match=r"allocate\(numel=100000, dtype=torch.float32\)"):
        group.allocate(100_000 + group.rank, torch.float32)
    group.abort()


@pytest.mark.parametrize("step", ["create_file", "reserve"])
def test_without_memory_on_one_rank_all_use_mpi(
    step: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank cannot make the file, or the last one has no memory for its part."""
    from syncline.collectives.transports.mpi.node import memory, shared_allocation

    made = Group(thresholds=STAGED)
    group = made.group
    culprit = 0 if step == "create_file" else group.size - 1
    monkeypatch.setattr(memory, "_warned_of", set())
    if group.rank == culprit:
        monkeypatch.setattr(shared_allocation, step, _no_memory)
    with caplog.at_level(logging.WARNING, "syncline.collectives"):
        memories = [group.allocate(100_000, torch.float32) for _ in range(2)]
        for tensor in (*memories, torch.empty(100_000)):
            group.all_reduce(tensor.copy_(noise(group.rank, 100_000)))
            assert torch.allclose(tensor, torch.stack([noise(r, 100_000) for r in range(group.size)]).sum(0), atol=1e-5)
    assert set(made.algorithms) == {"MPI"}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (1 if group.rank == 0 and group.size > 1 else 0)
    assert not said or f"rank {culprit}: [Errno 12] no memory left" in said[0]
    group.close()


def _no_memory(*_: Any) -> None:
    raise OSError(12, "no memory left")


def test_memory_outlives_its_group(world: ProcessGroup) -> None:
    group = Group(thresholds=STAGED).group
    memory = group.allocate(1000, torch.float32)
    group.close()
    assert memory.fill_(3.0).sum().item() == 3000.0


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_groups_that_communicate_at_the_same_time(algorithm: str) -> None:
    """Each group has its own thread, and another one may be first on each rank, also while they make their shared memory."""
    made = [Group(thresholds=ALGORITHMS[algorithm]) for _ in range(3)]
    group = RoundRobinGroup([one.group for one in made])
    tensors = [torch.full((20_000,), float(group.rank + number)) for number in range(9)]
    for work in [group.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
    total = group.size * (group.size - 1) / 2
    assert [tensor.unique().tolist() for tensor in tensors] == [[total + number * group.size] for number in range(9)]
    group.close()


PATHS: dict[str, dict[str, Any]] = {
    **{algorithm: {"thresholds": thresholds} for algorithm, thresholds in ALGORITHMS.items()},
    "emulated nodes": {"thresholds": STAGED, "split": by_pairs},
    "emulated nodes by MPI": {"thresholds": BY_MPI, "split": by_pairs},
    "a ring of nodes": {"thresholds": replace(BY_MPI, ring_bytes=1), "split": alone},
}


@pytest.mark.parametrize("path", PATHS)
def test_ranks_that_overtake_one_another(path: str, small_pieces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On every path, in windows and elsewhere, with random delays, also inside. No rank may see another's next call."""
    from mpi4py import MPI

    group = Group(**PATHS[path]).group
    chance = random.Random(group.rank)
    forgetful = random.Random(-1 - group.rank)
    _delay_synchronisation(monkeypatch, chance)
    is_long = group.size == 4 and MPI.get_vendor()[0] == "MPICH"
    repetitions = (1000 if FULL else 400) if is_long else 20
    windows = group.allocate(4 * 307, torch.float64), group.allocate(307, torch.float64)
    elsewhere = torch.empty(4 * 307, dtype=torch.float64), torch.empty(307, dtype=torch.float64)
    for repetition in range(repetitions):
        large, small = windows if chance_of_all(repetition) else elsewhere
        if forgetful.random() < 0.3:  # while other ranks may have kept their plans
            group._plans.clear()
        _one_of_each_kind(group, large[: group.size * 307], small, repetition)
        _delay(chance)
    group.close()


def chance_of_all(repetition: int) -> bool:
    """Heads or tails, the same on all ranks."""
    return random.Random(repetition).random() < 0.5


def _one_of_each_kind(group: ProcessGroup, block: torch.Tensor, tensor: torch.Tensor, repetition: int) -> None:
    """One collective, and a check of its result; afterwards the tensors hold other values."""

    def data(rank: int, like: torch.Tensor) -> torch.Tensor:
        return whole(rank + repetition, like.numel(), torch.float64)

    mine, ranks = group.rank, range(group.size)
    kind = repetition % 4
    if kind == 0:
        group.all_reduce(block.copy_(data(mine, block)))
        assert torch.equal(block, torch.stack([data(rank, block) for rank in ranks]).sum(0)), repetition
    elif kind == 1:
        group.reduce_scatter_tensor(tensor, block.copy_(data(mine, block)))
        assert torch.equal(tensor, torch.stack([data(rank, block) for rank in ranks]).sum(0).view(group.size, -1)[mine]), (
            repetition
        )
    elif kind == 2:
        group.all_gather_into_tensor(block, tensor.copy_(data(mine, tensor)))
        assert torch.equal(block, torch.cat([data(rank, tensor) for rank in ranks])), repetition
    else:
        root = repetition // 4 % group.size
        group.broadcast(block.copy_(data(mine, block)), root)
        assert torch.equal(block, data(root, block)), repetition
    block.fill_(-1.0)
    tensor.fill_(-2.0)


def _delay_synchronisation(monkeypatch: pytest.MonkeyPatch, chance: random.Random) -> None:
    """Delays before and after ranks meet, so also in the middle of collectives."""
    from syncline.collectives.transports.mpi.node.shared_sync import SharedSync
    from syncline.collectives.transports.mpi.sync import MessageSync

    for room, name in ((SharedSync, "compare"), (SharedSync, "wait"), (MessageSync, "run")):
        plain = getattr(room, name)

        def delayed(*arguments: Any, plain: Any = plain, **options: Any) -> Any:
            _delay(chance)
            result = plain(*arguments, **options)
            _delay(chance)
            return result

        monkeypatch.setattr(room, name, delayed)


def _delay(chance: random.Random) -> None:
    if chance.random() < 0.02:
        time.sleep(chance.random() * 1e-3)


@pytest.mark.parametrize("as_view", [False, True])
def test_buckets_of_ddp_lie_in_windows(staged: Group, as_view: bool) -> None:
    """Also the buckets that are rebuilt after the first backward; the first ones are then freed."""
    group, windows = staged.group, staged.transport._node.windows
    gc.collect()
    before = len(windows)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Tanh(), torch.nn.Linear(30, 20))
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.002, gradient_as_bucket_view=as_view)
    for _ in range(3):
        staged.algorithms.clear()
        ddp(noise(group.rank, 80).view(2, 40)).square().sum().backward()
        buckets = ddp._reducer.buckets
        assert len(buckets) > 1
        assert staged.algorithms.count("window") == (len(buckets) if group.size > 1 else 0)
        assert len(windows) - before == (len(buckets) if group.size > 1 else 0)
        assert ddp.logging_data()["bucket_algorithms"] == ", ".join(staged.took("window")[: len(buckets)])
    for parameter in model.parameters():
        assert parameter.grad is not None
        _same_bits(group, parameter.grad)


def _same_bits(group: ProcessGroup, tensor: torch.Tensor) -> None:
    rows = [torch.empty_like(tensor) for _ in range(group.size)]
    group.all_gather(rows, tensor)
    assert all(torch.equal(row, tensor) for row in rows)
