"""Which algorithm a collective takes inside a node, and who works on which elements. Pure functions of sizes."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from ....startup.algorithm_thresholds import AlgorithmThresholds

# Each rank reads the slots of all: with more ranks MPI's trees move less.
MOST_EAGER_RANKS = 8
# Two slots of this size stay in a core's cache.
MOST_SLOT_BYTES = 512 << 10


class Choice(enum.Enum):
    """How a collective on tensors in no window is done."""

    EAGER = "eager"
    COPY_IN_COPY_OUT = "copy-in copy-out"
    HIERARCHICAL = "hierarchical"
    MPI = "MPI"


class Operation(enum.Enum):
    """What the shared memory of a node is used for."""

    ALL_REDUCE = enum.auto()
    REDUCE_SCATTER = enum.auto()
    ALL_GATHER = enum.auto()
    BROADCAST = enum.auto()


class Capabilities(NamedTuple):
    """What the ranks of a group can do; the same on all of them.

    Attributes:
        ranks: how many there are.
        nodes: on how many nodes.
        least_ranks_of_node: on the node that has the fewest.
        shares_memory: whether any of them are on one node.
        has_barrier: whether there can be a `ShmBarrier`.
        reproducible: reductions give the same bits in every run.
    """

    ranks: int
    nodes: int
    least_ranks_of_node: int
    shares_memory: bool
    has_barrier: bool
    reproducible: bool


class Size(NamedTuple):
    """How large a call is, in bytes.

    Attributes:
        whole: the larger tensor: the block where there is one.
        shown: what a rank shows to the others.
    """

    whole: int
    shown: int


def size_of(operation: Operation, part_bytes: int, ranks: int) -> Size:
    """The size of a call whose tensor, or whose part for each rank, has `part_bytes`."""
    has_block = operation in (Operation.REDUCE_SCATTER, Operation.ALL_GATHER)
    whole = part_bytes * (ranks if has_block else 1)
    return Size(whole, part_bytes if operation is Operation.ALL_GATHER else whole)


def choose(
    operation: Operation, size: Size, capabilities: Capabilities, thresholds: AlgorithmThresholds, *, is_native: bool
) -> Choice:
    """The algorithm for tensors that are in no window; all ranks choose alike.

    Args:
        operation: the collective.
        size: of the call.
        capabilities: of the group.
        thresholds: the same on all ranks.
        is_native: MPI does the reduction itself.
    """
    if not capabilities.shares_memory or size.whole == 0:
        return Choice.MPI
    is_reduction = operation in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER)
    is_staged = is_reduction and size.whole >= thresholds.staged_bytes
    if capabilities.nodes > 1:
        # What MPI does not reduce itself would be exchanged between all ranks. A node's only rank has nobody to share with.
        is_gain = operation is Operation.ALL_REDUCE and not is_native and capabilities.least_ranks_of_node > 1
        return Choice.HIERARCHICAL if is_staged and is_gain and not capabilities.reproducible else Choice.MPI
    if size.shown <= slot_bytes(capabilities, thresholds):
        return Choice.EAGER
    return Choice.COPY_IN_COPY_OUT if is_staged else Choice.MPI


def slot_bytes(capabilities: Capabilities, thresholds: AlgorithmThresholds) -> int:
    """The size of an eager slot, a multiple of 64; 0 where nothing is eager."""
    others = capabilities.ranks - 1
    if capabilities.nodes > 1 or not capabilities.has_barrier or not 0 < others < MOST_EAGER_RANKS:
        return 0
    return min(thresholds.eager_bytes // others, MOST_SLOT_BYTES) // 64 * 64


def may_be_in_window(operation: Operation, size: Size, capabilities: Capabilities, thresholds: AlgorithmThresholds) -> bool:
    """Whether the ranks compare where a tensor lies, as soon as the group has windows."""
    if not capabilities.shares_memory or size.whole == 0 or size.whole < thresholds.window_bytes:
        return False
    return capabilities.nodes == 1 or (operation is Operation.ALL_REDUCE and not capabilities.reproducible)


def slice_of(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Where slice `index` of `parts` begins and ends; the first `numel % parts` are one element longer."""
    length, longer = divmod(numel, parts)
    start = index * length + min(index, longer)
    return start, start + length + (index < longer)


def chunks(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """From `start` to `stop` in pieces of `step` elements; the last may be shorter."""
    for begin in range(start, stop, step):
        yield begin, min(begin + step, stop)
