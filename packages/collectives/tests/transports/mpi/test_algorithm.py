"""Which algorithm is chosen, and who works on what, as tables."""

from __future__ import annotations

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

from syncline.collectives.startup.settings import AlgorithmThresholds
from syncline.collectives.transports.mpi.node.choice import (
    Capabilities,
    Choice,
    Operation,
    choose,
    chunks,
    may_be_in_window,
    size_of,
    slice_of,
    slot_bytes,
)

EAGER, STAGED, MPI, NODES = Choice.EAGER, Choice.COPY_IN_COPY_OUT, Choice.MPI, Choice.HIERARCHICAL
ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER, BROADCAST = Operation
SIZES = AlgorithmThresholds(eager_bytes=1 << 12, window_bytes=1 << 13, staged_bytes=1 << 14)
PAIR = Capabilities(ranks=2, nodes=1, least_ranks_of_node=2, shares_memory=True, has_barrier=True, reproducible=False)
FOUR = PAIR._replace(ranks=4, least_ranks_of_node=4)
TWO_NODES = FOUR._replace(nodes=2, least_ranks_of_node=2)
UNORDERED = PAIR._replace(has_barrier=False)
APART = Capabilities(4, 4, 1, shares_memory=False, has_barrier=False, reproducible=False)


@pytest.mark.parametrize(
    ("operation", "part_bytes", "capabilities", "is_native", "expected"),
    [
        (ALL_REDUCE, 4, PAIR, True, EAGER),
        (ALL_REDUCE, 4096, PAIR, True, EAGER),
        (ALL_REDUCE, 4097, PAIR, True, MPI),
        (ALL_REDUCE, 1 << 14, PAIR, True, STAGED),
        (ALL_REDUCE, 1 << 14, PAIR, False, STAGED),
        (ALL_REDUCE, 1344, FOUR, True, EAGER),  # each reads those of three others
        (ALL_REDUCE, 1345, FOUR, True, MPI),
        (ALL_REDUCE, 4, FOUR._replace(ranks=8), True, EAGER),
        (ALL_REDUCE, 4, FOUR._replace(ranks=9), True, MPI),
        (REDUCE_SCATTER, 2048, PAIR, False, EAGER),  # the block is twice as large
        (REDUCE_SCATTER, 2049, PAIR, False, MPI),
        (REDUCE_SCATTER, 1 << 13, PAIR, False, STAGED),
        (ALL_GATHER, 4096, PAIR, False, EAGER),  # a rank shows its part
        (ALL_GATHER, 4097, PAIR, False, MPI),
        (ALL_GATHER, 1 << 20, PAIR, False, MPI),
        (BROADCAST, 4096, PAIR, False, EAGER),
        (BROADCAST, 1 << 20, PAIR, False, MPI),
        *((operation, 0, PAIR, True, MPI) for operation in Operation),
        (ALL_REDUCE, 4, UNORDERED, True, MPI),
        (ALL_REDUCE, 1 << 14, UNORDERED, True, STAGED),
        *((operation, 1 << size, APART, False, MPI) for operation in Operation for size in (2, 20)),
        (ALL_REDUCE, 1 << 14, TWO_NODES, True, MPI),
        (ALL_REDUCE, 1 << 14, TWO_NODES, False, NODES),
        (ALL_REDUCE, (1 << 14) - 1, TWO_NODES, False, MPI),
        (ALL_REDUCE, 1 << 14, TWO_NODES._replace(reproducible=True), False, MPI),
        (ALL_REDUCE, 1 << 14, TWO_NODES._replace(least_ranks_of_node=1), False, MPI),
        (REDUCE_SCATTER, 1 << 14, TWO_NODES, False, MPI),
        (BROADCAST, 4, TWO_NODES, False, MPI),
    ],
)
def test_the_algorithm_of_tensors_in_no_window(
    operation: Operation, part_bytes: int, capabilities: Capabilities, is_native: bool, expected: Choice
) -> None:
    size = size_of(operation, part_bytes, capabilities.ranks)
    assert choose(operation, size, capabilities, SIZES, is_native=is_native) is expected


@pytest.mark.parametrize(
    ("operation", "part_bytes", "capabilities", "expected"),
    [
        (ALL_REDUCE, 1 << 13, PAIR, True),
        (ALL_REDUCE, (1 << 13) - 1, PAIR, False),
        (ALL_REDUCE, 1 << 13, UNORDERED, True),
        (ALL_GATHER, 1 << 12, PAIR, True),  # the block is twice as large
        (BROADCAST, 1 << 13, PAIR, True),
        (ALL_REDUCE, 1 << 13, TWO_NODES, True),
        (BROADCAST, 1 << 13, TWO_NODES, False),
        (ALL_REDUCE, 1 << 13, TWO_NODES._replace(reproducible=True), False),
        (ALL_REDUCE, 1 << 13, APART, False),
    ],
)
def test_for_which_tensors_the_ranks_compare_places(
    operation: Operation, part_bytes: int, capabilities: Capabilities, expected: bool
) -> None:
    assert may_be_in_window(operation, size_of(operation, part_bytes, capabilities.ranks), capabilities, SIZES) is expected


@pytest.mark.parametrize(
    ("eager_bytes", "capabilities", "expected"),
    [
        (1000, PAIR, 960),
        (1000, FOUR, 320),
        (63, PAIR, 0),
        (2**62, PAIR, 512 << 10),
        (1000, UNORDERED, 0),
        (1000, TWO_NODES, 0),
        (1000, PAIR._replace(ranks=1), 0),
    ],
)
def test_the_size_of_a_slot(eager_bytes: int, capabilities: Capabilities, expected: int) -> None:
    assert slot_bytes(capabilities, AlgorithmThresholds(eager_bytes=eager_bytes)) == expected


@pytest.mark.parametrize(
    ("numel", "parts", "slices"),
    [
        (6, 3, [(0, 2), (2, 4), (4, 6)]),
        (8, 3, [(0, 3), (3, 6), (6, 8)]),
        (2, 3, [(0, 1), (1, 2), (2, 2)]),
        (5, 1, [(0, 5)]),
        (0, 2, [(0, 0), (0, 0)]),
    ],
)
def test_slices(numel: int, parts: int, slices: list[tuple[int, int]]) -> None:
    assert [slice_of(numel, parts, index) for index in range(parts)] == slices


@pytest.mark.parametrize(
    ("start", "stop", "step", "expected"),
    [
        (0, 6, 3, [(0, 3), (3, 6)]),
        (2, 9, 3, [(2, 5), (5, 8), (8, 9)]),
        (4, 5, 100, [(4, 5)]),
        (4, 4, 3, []),
    ],
)
def test_chunks(start: int, stop: int, step: int, expected: list[tuple[int, int]]) -> None:
    assert list(chunks(start, stop, step)) == expected
