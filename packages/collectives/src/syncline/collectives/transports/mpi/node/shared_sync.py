"""`SharedSync` lets the ranks of a node wait for one another and compare calls in shared memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mpi4py import MPI

from ....engine.call import Call
from ....engine.cancel_scope import CancelScope
from ....errors import TransportError
from ...shared_memory.os_memory import Fence
from ...shared_memory.segment import Segment
from ..library import mapped
from ..sync import NOWHERE, MessageSync, Sync
from ..waiting import ARRIVAL_NAP_S, Patience

# A rank's part of the memory has two lines of numbers, which arrivals use in turn, and then two eager slots.
_LINE_BYTES = 128  # two cache lines, because some processors fetch them in pairs
_HEAD_BYTES = 2 * _LINE_BYTES
LEAST_SLOT_BYTES = 64

# How often a rank checks before it yields the core and calls the MPI library for the first time. These two steps take as long
# as a small collective, and a check costs 0.06 us. If ranks share cores, this number is smaller, because another rank may need
# this core to arrive.
_LOOKS_ON_OWN_CORE = 1000
_LOOKS_ON_SHARED_CORE = 100


def barrier_bytes(slot_bytes: int) -> int:
    """Return the size in bytes of each rank's part of the shared memory of a `ShmBarrier`."""
    return _HEAD_BYTES + 2 * slot_bytes


class GaveUpError(Exception):
    """A rank will not arrive at the barrier any more."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class ShmBarrier:
    """A barrier in shared memory for the ranks of a node. The barrier compares calls, and has eager slots for small tensors.

    Note [Arrivals in turn]
    ~~~~~~~~~~~~~~~~~~~~~~~
    Each rank has its own part of the memory, with two slots for data and two lines of 128 bytes for numbers. A rank writes only
    in its own part. These are the steps of arrival k, the k-th time that a rank comes to the barrier:

    1. Write the data into slot k mod 2.
    2. Write the digest of the call into line k mod 2, and then the number k into the same line.
    3. Wait until all other ranks have written k.
    4. Read the slots of the other ranks.

    A rank writes the same slot and line again for arrival k + 2. At that time, all ranks have come to arrival k + 1, so all
    ranks have read the data of arrival k.

    Note [Order in memory]
    ~~~~~~~~~~~~~~~~~~~~~~
    A processor may reorder reads and writes, so `arrive` has two full fences. No read or write crosses a fence.

    [1] A rank passes this fence before it writes its number.
    [2] A rank passes this fence after it has seen all numbers.

    A rank reads new data: rank A writes data, passes [1], and writes its number. Rank B reads this number, passes [2], and
    reads the data.

    No rank overwrites a slot too early: A reads B's slot of arrival k, passes [1], and writes its number k + 1. B reads this
    number, passes [2], and writes its slot for arrival k + 2.

    A number is an aligned word of 64 bits, which a processor writes in one piece. x86 needs no instruction for a fence here. An
    x86 processor may execute a write after a later read, but no step above needs a write to come before a later read.

    Args:
        segment: the memory, with parts of `barrier_bytes(slot_bytes)` bytes.
        slot_bytes: the size of an eager slot; a multiple of 64.
        progress: called while this rank waits, so that the MPI library sends messages that other ranks need before they come.
        fence: this processor's memory fence, from `find_fence`.
        has_own_core: whether there is a core for every rank of the job on this node.
    """

    def __init__(
        self,
        segment: Segment,
        slot_bytes: int,
        progress: Callable[[], object],
        fence: Fence,
        *,
        has_own_core: bool = False,
    ) -> None:
        self.size = segment.parts
        self.mine = segment.mine
        self.slot_bytes = slot_bytes
        self._segment = segment
        self._progress = progress
        self._fence = fence
        self._numbers = segment.contents().cast("q")
        self._lines = [self._lines_of(parity) for parity in (0, 1)]
        self._looks_before_yielding = _LOOKS_ON_OWN_CORE if has_own_core else _LOOKS_ON_SHARED_CORE
        self.arrivals = 0  # the number of this rank's latest arrival; the parity of an arrival is its number mod 2
        self._complete = 0  # the latest arrival for which this rank has seen all others
        self._has_given_up = False

    @property
    def next_parity(self) -> int:
        """The number of this rank's next arrival, modulo 2."""
        return (self.arrivals + 1) & 1

    def slots(self, parity: int, numel: int, dtype: torch.dtype, offset_bytes: int = 0) -> list[torch.Tensor]:
        """Return, for each rank, a flat tensor of `numel` elements in the rank's slot `parity`, which is 0 or 1.

        `numel` is at least 1. Arrival k uses slot k mod 2. Write this rank's slot before `arrive`, and read other ranks' slots
        afterwards.
        """
        with torch.inference_mode(False):  # the tensors are kept for later calls, which may be outside of this mode
            return self._segment.rows(_HEAD_BYTES + parity * self.slot_bytes + offset_bytes, numel, dtype)

    def arrive(self, scope: CancelScope, digest: int = 0, place_key: int = NOWHERE) -> tuple[bool, bool]:
        """Wait for all ranks. Return whether all passed the same `digest`, and whether all passed the same `place_key`.

        `digest` is the digest of this rank's call. `place_key` is the key of this rank's tensor from `Windows.key_of`, or
        `NOWHERE`. If a rank passes `NOWHERE`, the second answer is False. `digest` and `place_key` have 64 bits.

        Raises:
            GaveUpError: a rank will not come, or `give_up` was called on this rank.
            TimeoutError: the time limit was reached.
            BaseException: the scope was cancelled with this error.
        """
        self.arrivals = arrival = self.arrivals + 1
        numbers, (own, others) = self._numbers, self._lines[arrival & 1]
        numbers[own + 1] = digest
        numbers[own + 2] = place_key
        self._fence()  # [1] of Note [Order in memory]
        numbers[own] = arrival  # written last: a rank that sees this number must see the other two, too
        # `give_up` was called before this arrival, or on another thread just now. The number above may have replaced the mark
        # of `give_up`, so call `give_up` again.
        if self._has_given_up:
            self.give_up()
            scope.check()
            raise GaveUpError(self.mine)
        for line in others:
            if numbers[line] != arrival:
                self._wait(line, arrival, scope)
        self._fence()  # [2]
        is_same, is_common = True, place_key != NOWHERE
        for line in others:
            if numbers[line + 1] != digest:
                is_same = False
            if numbers[line + 2] != place_key:
                is_common = False
        self._complete = arrival
        return is_same, is_common

    def give_up(self) -> None:
        """Tell all ranks that this rank does not come to the barrier any more. Any thread may call this method.

        If this rank has arrived and still waits for other ranks, its arrival does not count any more.
        """
        self._has_given_up = True
        # A mark is the negative number of an arrival to which this rank does not come. Ranks may still wait for an earlier
        # arrival on the same line; the mark shows them that this rank came to the earlier arrival.
        self._mark(self.arrivals + 1)
        # Another rank may have seen this arrival already, and may wait at the next one. So mark both arrivals.
        if self._complete != self.arrivals:
            self._mark(self.arrivals)

    def _mark(self, arrival: int) -> None:
        self._numbers[self._lines[arrival & 1][0]] = -arrival

    def _lines_of(self, parity: int) -> tuple[int, list[int]]:
        lines = [(self._segment.offset_of(rank) + parity * _LINE_BYTES) // 8 for rank in range(self.size)]
        return lines[self.mine], lines[: self.mine] + lines[self.mine + 1 :]

    def _wait(self, line: int, arrival: int, scope: CancelScope) -> None:
        numbers = self._numbers
        for _ in range(self._looks_before_yielding):
            # Usually the wait ends here, because ranks come at about the same time.
            if numbers[line] == arrival:
                return
        patience = Patience(ARRIVAL_NAP_S)
        while (number := numbers[line]) != arrival:
            # The other rank has given up, but only after this arrival.
            if number < -arrival:
                return
            # The other rank has given up at this arrival, or before.
            if number < 0:
                # The list has no line of this rank, so for later ranks the index is one less than the rank.
                index = self._lines[arrival & 1][1].index(line)
                raise GaveUpError(index + (index >= self.mine))
            self._progress()
            if patience.rest_then_is_check_due():
                scope.check("rank(s) of this node did not come")


class SharedSync(Sync):
    """Lets the ranks of one node wait for one another at a `ShmBarrier`.

    After an error, `messages` finds out which call each rank made.
    """

    def __init__(self, barrier: ShmBarrier, messages: MessageSync) -> None:
        self.barrier = barrier
        self._messages = messages

    def compare(self, call: Call, place_key: int = NOWHERE) -> bool:
        """See `Sync.compare`."""
        try:
            is_same, is_common = self.barrier.arrive(call.scope, call.digest(), place_key)
        except Exception as error:  # noqa: BLE001 - raised again
            raise self._explained(error, call) from None
        if not is_same:
            raise self._messages.disagreement(call)
        return is_common

    def wait(self, call: Call) -> None:
        """See `Sync.wait`."""
        try:
            self.barrier.arrive(call.scope)
        except Exception as error:  # noqa: BLE001 - raised again
            raise self._explained(error, call) from None

    def _explained(self, error: Exception, call: Call) -> Exception:
        if isinstance(error, GaveUpError):
            return TransportError(
                f"rank {error.rank} of this node gave up on a collective of this group; its own error says why"
            )
        if isinstance(error, MPI.Exception):
            return mapped(error)
        if isinstance(error, TimeoutError):
            return self._messages.timeout(call)
        return error
