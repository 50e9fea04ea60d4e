"""`choose` selects the algorithm of a collective from sizes and facts about the group. All functions are pure."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import NamedTuple

from ....startup.settings import AlgorithmThresholds

# In the eager algorithm each rank reads the slots of all ranks. With more ranks, MPI's trees move less data.
MOST_EAGER_RANKS = 8
# Two slots of this size stay in a core's cache.
MOST_SLOT_BYTES = 512 << 10


class Choice(enum.Enum):
    """The algorithms for a collective on tensors that are in no window."""

    EAGER = "eager"
    COPY_IN_COPY_OUT = "copy-in copy-out"
    HIERARCHICAL = "hierarchical"
    MPI = "MPI"


class Operation(enum.Enum):
    """The collectives that may use the shared memory of a node."""

    ALL_REDUCE = enum.auto()
    REDUCE_SCATTER = enum.auto()
    ALL_GATHER = enum.auto()
    BROADCAST = enum.auto()


class Capabilities(NamedTuple):
    """Facts about a group, from which `choose` selects an algorithm. All ranks have equal facts.

    Attributes:
        least_ranks_of_node: the number of ranks on the node with the fewest ranks.
        shares_memory: whether any node has more than one rank.
        has_barrier: whether the group can make a `ShmBarrier`.
        reproducible: whether reductions must give the same bits in every run.
    """

    ranks: int
    nodes: int
    least_ranks_of_node: int
    shares_memory: bool
    has_barrier: bool
    reproducible: bool


class Size(NamedTuple):
    """The size of a call, in bytes.

    Attributes:
        whole: the size of the call's larger tensor, for example of the output of an all-gather.
        in_slot: the size of the data that a rank writes to its slot in shared memory, in the eager algorithm.
    """

    whole: int
    in_slot: int


def size_of(operation: Operation, part_bytes: int, ranks: int) -> Size:
    """Return the size of a call. `part_bytes` is the size of the call's smaller tensor, or of its only tensor."""
    has_block = operation in (Operation.REDUCE_SCATTER, Operation.ALL_GATHER)
    whole = part_bytes * (ranks if has_block else 1)
    return Size(whole, part_bytes if operation is Operation.ALL_GATHER else whole)


def choose(
    operation: Operation, size: Size, capabilities: Capabilities, thresholds: AlgorithmThresholds, *, is_native: bool
) -> Choice:
    """Choose the algorithm for tensors that are in no window. All ranks choose the same algorithm.

    `thresholds` are the sizes in bytes at which the choice changes. `is_native` says whether MPI itself can do the reduction.
    """
    # If no ranks share memory, or there is nothing to move, use MPI.
    if not capabilities.shares_memory or size.whole == 0:
        return Choice.MPI
    is_reduction = operation in (Operation.ALL_REDUCE, Operation.REDUCE_SCATTER)
    is_staged = is_reduction and size.whole >= thresholds.staged_bytes
    if capabilities.nodes > 1:
        # If MPI can reduce the dtype, or a node has only one rank, shared memory gains nothing. In other cases, shared memory
        # saves an exchange of all terms between all ranks.
        is_gain = operation is Operation.ALL_REDUCE and not is_native and capabilities.least_ranks_of_node > 1
        return Choice.HIERARCHICAL if is_staged and is_gain and not capabilities.reproducible else Choice.MPI
    # If the data fits in a slot, the eager algorithm, with its single barrier, is cheaper than any other algorithm.
    if size.in_slot <= slot_bytes(capabilities, thresholds):
        return Choice.EAGER
    return Choice.COPY_IN_COPY_OUT if is_staged else Choice.MPI


def slot_bytes(capabilities: Capabilities, thresholds: AlgorithmThresholds) -> int:
    """Return the size in bytes of a rank's slot in the eager algorithm: a multiple of 64, or 0 if the group has no slots."""
    others = capabilities.ranks - 1
    # Without a barrier, or across nodes, no rank sees another rank's slot. With many ranks, reading all slots costs too much.
    if capabilities.nodes > 1 or not capabilities.has_barrier or not 0 < others < MOST_EAGER_RANKS:
        return 0
    return min(thresholds.eager_bytes // others, MOST_SLOT_BYTES) // 64 * 64


def may_be_in_window(operation: Operation, size: Size, capabilities: Capabilities, thresholds: AlgorithmThresholds) -> bool:
    """Return whether a call of this size is faster in a window. If True, the ranks must compare the places of their tensors."""
    # A comparison of places costs one exchange. For a small tensor, a window saves less than this exchange costs.
    if not capabilities.shares_memory or size.whole == 0 or size.whole < thresholds.window_bytes:
        return False
    # Across nodes, only an all-reduce is faster in a window. But an all-reduce in a window is not reproducible, because the
    # order of its additions depends on the nodes.
    return capabilities.nodes == 1 or (operation is Operation.ALL_REDUCE and not capabilities.reproducible)


def slice_of(numel: int, parts: int, index: int) -> tuple[int, int]:
    """Divide `numel` elements into `parts` slices, and return the start and end of slice `index`.

    The first `numel % parts` slices are one element longer than the others.
    """
    length, longer = divmod(numel, parts)
    start = index * length + min(index, longer)
    return start, start + length + (index < longer)


def chunks(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    """Divide the range from `start` to `stop` into pieces of `step` elements. The last piece may be shorter."""
    for begin in range(start, stop, step):
        yield begin, min(begin + step, stop)
