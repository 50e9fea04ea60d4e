"""`NodePlan` runs the calls of one signature on ranks that may share a node. `choose` selects the algorithm."""

from __future__ import annotations

import enum
import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import torch
from mpi4py import MPI

from ....engine.call import Call, Signature
from ....engine.transport import LibraryPlan, LibraryTransport, Plan
from ....startup.settings import AlgorithmThresholds
from ...shared_memory.segment import Segment
from ..library import Tag, mpi_errors
from ..sync import NOWHERE, MessageSync, Sync
from .hierarchy import Hierarchy
from .shared_allocation import SharedMemoryError, allocate_shared
from .shared_sync import LEAST_SLOT_BYTES, SharedSync, ShmBarrier, barrier_bytes

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


logger = logging.getLogger("syncline.collectives")
_warned_of: set[str] = set()  # for the whole process, because every group would warn of the same reasons


class Place(NamedTuple):
    """The place of a tensor in shared memory.

    Attributes:
        segment: the shared memory, which has a part for each rank of the node.
        offset_bytes: the offset of the tensor in the rank's part.
    """

    segment: Segment
    offset_bytes: int


class _Entry(NamedTuple):
    start: int
    part_bytes: int
    first_key: int
    segment: weakref.ref[Segment]


class Windows:
    """The windows of this process: the shared segments in which tensors were allocated.

    Each place in a window has a key, an integer. All ranks make the same segments in the same order, so equal places have equal
    keys on all ranks. A key is never used again.
    """

    def __init__(self) -> None:
        # The start addresses, and the entries sorted by start. Replace both together, because a segment may be freed at
        # any moment, on any thread.
        self._known: tuple[list[int], list[_Entry]] = [], []
        self._changing = threading.RLock()  # reentrant: `_forget` may run inside `add`, on the same thread
        self._next_key = 0

    def add(self, segment: Segment) -> None:
        """Add a segment. All ranks add the same segments in the same order."""
        with self._changing:
            entry = _Entry(segment.address(), segment.part_bytes, self._next_key, weakref.ref(segment, self._forget))
            self._next_key += segment.part_bytes + 1  # + 1 because the end of a segment is a place, too
            # A segment that is freed just now may stay in the list until the next `add`. `key_of` ignores it.
            alive = (known for known in self._known[1] if known.segment() is not None)
            self._know(sorted((*alive, entry), key=lambda known: known.start))

    def key_of(self, tensor: torch.Tensor) -> int:
        """Return the key of a contiguous tensor's place, or `NOWHERE` if the tensor is not in this rank's part of a window.

        Two ranks get the same key if and only if their tensors are at the same place.
        """
        starts, entries = self._known
        address = tensor.data_ptr()
        index = bisect_right(starts, address) - 1
        # The tensor is before the first segment.
        if index < 0:
            return NOWHERE
        start, part_bytes, first_key, segment = entries[index]
        # If the tensor ends outside of the segment, it has no place there. If the segment is being freed, another segment may
        # soon have its address.
        if address + tensor.nbytes > start + part_bytes or segment() is None:
            return NOWHERE
        return first_key + address - start

    def place(self, key: int) -> Place:
        """Return the place for a key that `key_of` has returned. A tensor must still be at this place."""
        for entry in self._known[1]:
            segment = entry.segment()
            if segment is not None and 0 <= key - entry.first_key <= entry.part_bytes:
                return Place(segment, key - entry.first_key)
        raise LookupError(f"no segment has place {key}")

    def __len__(self) -> int:
        return len(self._known[1])

    def _forget(self, dead: weakref.ref[Segment]) -> None:
        with self._changing:
            self._know([entry for entry in self._known[1] if entry.segment is not dead])

    def _know(self, entries: list[_Entry]) -> None:
        self._known = [entry.start for entry in entries], entries


class NodeMemory:
    """Makes segments, which are memory that the ranks of a node share. Windows are the segments that hold tensors.

    `communicator` is a private communicator of the whole group.
    """

    def __init__(self, hierarchy: Hierarchy, communicator: MPI.Intracomm, messages: MessageSync) -> None:
        self.windows = Windows()
        self._hierarchy = hierarchy
        self._communicator = communicator
        self._messages = messages
        self._has_windows = False

    @property
    def has_windows(self) -> bool:
        """Whether `allocate` has ever succeeded. The value is the same on all ranks."""
        return self._has_windows

    def allocate_segment(self, part_bytes: int, call: Call) -> Segment | None:
        """Make a segment on each node, with a part for each rank of the node. Return this node's segment.

        All ranks call this method. If the allocation fails, all ranks return None.
        """
        try:
            with mpi_errors():
                run = lambda start: self._messages.run(call, start)  # noqa: E731
                return allocate_shared(self._hierarchy, self._communicator, part_bytes, run)
        except SharedMemoryError as error:
            self._warn(error)
            return None

    def allocate(self, numel: int, dtype: torch.dtype, call: Call) -> torch.Tensor | None:
        """Make a window, and return this rank's tensor in the window, filled with zeros.

        All ranks call this method. If the allocation fails, all ranks return None.
        """
        segment = self.allocate_segment(numel * dtype.itemsize, call)
        if segment is None:
            return None
        segment.holds_tensors = True
        self.windows.add(segment)
        self._has_windows = True
        # Zeros map the pages now, so the first use is not slower. Fill bytes: torch cannot fill int4 or quantized tensors.
        segment.view(segment.mine, 0, numel * dtype.itemsize, torch.uint8).zero_()
        return segment.view(segment.mine, 0, numel, dtype)

    def _warn(self, error: SharedMemoryError) -> None:
        reason = str(error)
        # Only rank 0 warns, and only once for each reason, because every new bucket would fail for the same reason.
        if self._communicator.Get_rank() == 0 and reason not in _warned_of:
            _warned_of.add(reason)
            logger.warning(
                "in a group of %d ranks those of a node cannot share memory (%s). They use MPI instead, which is slower; the "
                "results are equal up to rounding. Leave the job more memory, or start the ranks of a node in one container; "
                "`syncline doctor` tries whether they can share any",
                self._communicator.Get_size(),
                reason,
            )


class Node:
    """A group's ranks on this node, and the shared memory of these ranks.

    The first call on the group makes a barrier in shared memory.

    Args:
        communicator: a private communicator of the whole group.
        messages: lets all ranks of the group wait for one another by MPI messages.
        local_messages: like `messages`, but only for the ranks of this node.
        slot_bytes: the size of an eager slot; a multiple of 64, or 0.
        ranks_on_node: the number of the job's ranks on this node.
    """

    def __init__(
        self,
        hierarchy: Hierarchy,
        communicator: MPI.Intracomm,
        messages: MessageSync,
        local_messages: MessageSync,
        slot_bytes: int,
        ranks_on_node: int,
    ) -> None:
        self.hierarchy = hierarchy
        self.memory = NodeMemory(hierarchy, communicator, messages)
        self._communicator = communicator
        self._messages = messages
        self._local_messages = local_messages
        self._slot_bytes = max(slot_bytes, LEAST_SLOT_BYTES)
        self._has_own_core = ranks_on_node <= len(os.sched_getaffinity(0))
        self._fence = hierarchy.fence if hierarchy.shares_memory else None  # None: make no barrier
        self._shared: SharedSync | None = None

    def sync(self, call: Call) -> Sync:
        """Return the object with which all ranks of the group wait for one another. All ranks call this method together."""
        return self._messages if self.hierarchy.nodes > 1 else self.shared_sync(call) or self._messages

    def local_sync(self, call: Call) -> Sync:
        """Return the object with which the ranks of this node wait for one another. All ranks of the group call this method."""
        return self.shared_sync(call) or self._local_messages

    def shared_sync(self, call: Call) -> SharedSync | None:
        """Return the object with which the ranks of this node wait for one another in shared memory.

        All ranks of the group call this method together. The first call makes the object. If a rank cannot make it, all ranks
        return None.
        """
        if self._shared is None and self._fence is not None:
            # Making the sync is a collective, so first make sure that all ranks are here, for the same call.
            self._messages.compare(call)
            segment = self.memory.allocate_segment(barrier_bytes(self._slot_bytes), call)
            if segment is None:
                # The ranks have agreed that no rank has the memory, so all ranks use messages from now on.
                self._fence = None
            else:
                # A probe for a message that never comes lets MPI make progress while this rank waits in shared memory.
                probe, rank = self._communicator.Iprobe, self._communicator.Get_rank()
                barrier = ShmBarrier(
                    segment, self._slot_bytes, lambda: probe(rank, Tag.NOTHING), self._fence, has_own_core=self._has_own_core
                )
                self._shared = SharedSync(barrier, self._messages)
        return self._shared

    def segment(self, part_bytes: int, call: Call) -> Segment | None:
        """Make new memory with a part for each rank of a node. If the allocation fails, all ranks return None.

        All ranks of the group call this method together.
        """
        self.sync(call).compare(call)
        return self.memory.allocate_segment(part_bytes, call)

    def give_up(self) -> None:
        """Tell the ranks of this node that this rank makes no more calls."""
        if self._shared is not None:
            self._shared.barrier.give_up()

    def forget(self) -> None:
        """Release the barrier."""
        self._shared, self._fence = None, None


class Algorithm(ABC):
    """Moves the data of calls of one signature. The tensors may be in any memory.

    `name` is for logs. If `compares` is True, the ranks must compare the call before `run`. Otherwise `run` compares the call
    itself, or the group compares the call later.
    """

    name: str
    compares = True

    def prepare(self, call: Call) -> bool:
        """At the first call, make the shared memory that the algorithm needs. Return whether the algorithm has this memory.

        All ranks call this method together, and get the same answer.
        """
        return True

    @abstractmethod
    def run(self, part: torch.Tensor, whole: torch.Tensor, call: Call) -> None:
        """See `Plan.run`."""


class ByMPI(Algorithm):
    """Runs a collective of an `MPITransport`, without shared memory. `name` is "MPI" or "ring"."""

    def __init__(self, transport: LibraryTransport, signature: Signature, name: str, *, compares: bool) -> None:
        self.name = name
        self.compares = compares
        self._plan = LibraryPlan(transport, signature)

    def run(self, part: torch.Tensor, whole: torch.Tensor, call: Call) -> None:
        """See `Plan.run`."""
        self._plan.run(part, whole, call)


class WindowAlgorithm(ABC):
    """Runs calls of one signature. The tensors of all ranks must be in a window, at the same place. `name` is for logs."""

    name: str

    @abstractmethod
    def run(self, place_key: int, part: torch.Tensor, call: Call) -> None:
        """See `Plan.run`. Instead of the argument `whole`, this method takes the key of a place in a window.

        `place_key` is from `Windows.key_of`, and equal on all ranks. An all-reduce ignores `part`, because its tensor is at the
        place.
        """


class NodePlan(Plan):
    """Runs the calls of one signature, for ranks that may share memory.

    [1] The ranks compare the call and the places of their tensors. They skip this step if no tensor can be in a window, and
        `outside.compares` is False (see `Algorithm`).
    [2] If all tensors are at the same place of a window, `in_window` moves the data.
    [3] Otherwise `outside` moves the data. If the shared memory of `outside` cannot be made, `by_mpi` replaces `outside` for
        ever.

    If `in_window` is None, the ranks do not compare places.
    """

    def __init__(self, node: Node, outside: Algorithm, by_mpi: Algorithm, in_window: WindowAlgorithm | None = None) -> None:
        self._node = node
        self._outside = outside
        self._by_mpi = by_mpi
        self._in_window = in_window
        self._latest = outside.name

    @property
    def algorithm(self) -> str:
        """The name of the algorithm that the latest run used."""
        return self._latest

    def run(self, part: torch.Tensor, whole: torch.Tensor | None, call: Call) -> None:
        """See `Plan.run`."""
        assert whole is not None
        node, algorithm = self._node, self._outside
        # Until `allocate` has made a window, no tensor can be in a window, so the ranks need not compare places.
        looks = self._in_window is not None and node.memory.has_windows
        is_compared = looks or algorithm.compares
        if is_compared:
            place_key = node.memory.windows.key_of(whole) if looks else NOWHERE
            # `compare` raises an error if the calls differ. It returns whether all tensors are at the same place of a window.
            if node.sync(call).compare(call, place_key):  # [1]
                assert self._in_window is not None
                self._latest = self._in_window.name
                self._in_window.run(place_key, part, call)  # [2]
                return
        # Call `prepare` only here: if all tensors are in windows, the memory of the other algorithms is never made.
        if not algorithm.prepare(call):
            logger.debug("no shared memory for %s (%s): %s from now on", call.signature.name, algorithm.name, self._by_mpi.name)
            algorithm = self._outside = self._by_mpi
            # The first algorithm might have compared the call itself. MPI's collective does not, so compare the call now.
            if algorithm.compares and not is_compared:
                node.sync(call).compare(call)
        self._latest = algorithm.name
        algorithm.run(part, whole, call)  # [3]
