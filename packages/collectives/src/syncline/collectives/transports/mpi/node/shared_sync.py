"""SharedSync: ranks of a node come together in memory that they share. It compares calls, and carries small tensors."""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch
from mpi4py import MPI

from ....engine.call import Call
from ....engine.cancel_scope import CancelScope
from ....errors import TransportError
from ...shared_memory.segment import Segment
from ..library import mapped
from ..sync import NOWHERE, MessageSync, Sync
from ..waiting import ARRIVAL_NAP_S, Patience

_GAVE_UP = -1  # as an arrival

# A rank's part: two lines of numbers, for arrivals in turn, then two eager slots.
_LINE_BYTES = 128  # two cache lines: some processors fetch them in pairs
_HEAD_BYTES = 2 * _LINE_BYTES
LEAST_SLOT_BYTES = 64

# A look costs 0.06 us. Ranks that come at about the same time find each other without yielding the core, and without calling
# the library, which takes as long as a small collective. Where ranks share cores, the core may be what another one waits for.
_LOOKS_ON_OWN_CORE = 1000
_LOOKS_ON_SHARED_CORE = 100


def has_total_store_order() -> bool:
    """Whether this processor shows one core's writes to the others in the order in which they were made, and reads in order.

    A `ShmBarrier` needs this: whoever reads a number there sees what was written before it. Processors other than x86 need
    instructions for that which Python does not have.
    """
    return platform.machine().lower() in ("x86_64", "amd64")


def barrier_bytes(slot_bytes: int) -> int:
    """The size of each rank's part of a barrier's segment."""
    return _HEAD_BYTES + 2 * slot_bytes


class GaveUpError(Exception):
    """A rank said that it will not arrive any more."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class ShmBarrier:
    """The ranks of a node arrive at points in a common order, and say for which call; eager slots carry a few bytes of each.

    Note [Arrivals in turn]
    ~~~~~~~~~~~~~~~~~~~~~~~
    Each rank writes in its own part only. For arrival k it writes its data into slot k mod 2, the digest of its call into line
    k mod 2, and last of all k itself; then it waits until all others have written k there, and reads their slots. Nobody needs
    to say when it has read: a rank writes to the same slot and line again for arrival k + 2, after all have arrived at k + 1,
    that is, after they have read everything of arrival k.

    Args:
        segment: with a part of `barrier_bytes(slot_bytes)` for each rank of the node.
        slot_bytes: the size of an eager slot; a multiple of 64.
        progress: called while waiting, so that the library underneath makes progress: another rank may come only when a
            message of this one has reached it.
        has_own_core: whether every rank of the job on this node can have a core of its own.
    """

    def __init__(
        self, segment: Segment, slot_bytes: int, progress: Callable[[], object], *, has_own_core: bool = False
    ) -> None:
        self.size = segment.parts
        self.mine = segment.mine
        self.slot_bytes = slot_bytes
        self._segment = segment
        self._progress = progress
        self._numbers = segment.contents().cast("q")
        self._lines = [self._lines_of(turn) for turn in (0, 1)]
        self._looks_before_yielding = _LOOKS_ON_OWN_CORE if has_own_core else _LOOKS_ON_SHARED_CORE
        self.arrivals = 0  # of this rank, so far; the turn of an arrival is its number mod 2
        self._complete = 0  # the latest arrival at which all others were seen

    def slots(self, turn: int, numel: int, dtype: torch.dtype, offset_bytes: int = 0) -> list[torch.Tensor]:
        """Every rank's eager slot for arrivals of that turn, from an offset on, as flat tensors of one element or more.

        Write this rank's slot before `arrive`, read the others' after it.
        """
        with torch.inference_mode(False):  # they serve calls outside that mode, too
            return self._segment.rows(_HEAD_BYTES + turn * self.slot_bytes + offset_bytes, numel, dtype)

    def arrive(self, scope: CancelScope, digest: int = 0, place: int = NOWHERE) -> tuple[bool, bool]:
        """Return when all ranks have arrived.

        Returns:
            Whether `digest` is the same on all ranks; and whether `place` is, and is not `NOWHERE`. Both have 64 bits.

        Raises:
            GaveUpError: a rank will not come.
            TimeoutError: the time limit was reached; or the scope's reason.
        """
        self.arrivals = arrival = self.arrivals + 1
        numbers, (own, others) = self._numbers, self._lines[arrival & 1]
        numbers[own + 1] = digest
        numbers[own + 2] = place
        numbers[own] = arrival
        is_same, is_common = True, place != NOWHERE
        for line in others:
            if numbers[line] != arrival:
                self._wait(line, arrival, scope)
            if numbers[line + 1] != digest:
                is_same = False
            if numbers[line + 2] != place:
                is_common = False
        self._complete = arrival
        return is_same, is_common

    def give_up(self) -> None:
        """Tell all who wait for this rank, or will, that it does not come.

        Those, too, for whom it had arrived, for it has not seen all others and so does not do what was to follow. But an
        arrival that is complete stays: another rank may not have looked yet, and shall end as this one did.
        """
        self._numbers[self._lines[(self.arrivals + 1) & 1][0]] = _GAVE_UP
        if self._complete != self.arrivals:
            self._numbers[self._lines[self.arrivals & 1][0]] = _GAVE_UP

    def _lines_of(self, turn: int) -> tuple[int, list[int]]:
        """Where this rank writes its numbers, and where the others write theirs."""
        lines = [(self._segment.offset_of(rank) + turn * _LINE_BYTES) // 8 for rank in range(self.size)]
        return lines[self.mine], lines[: self.mine] + lines[self.mine + 1 :]

    def _wait(self, line: int, arrival: int, scope: CancelScope) -> None:
        numbers = self._numbers
        for _ in range(self._looks_before_yielding):
            if numbers[line] == arrival:
                return
        patience = Patience(scope, ARRIVAL_NAP_S)
        while (number := numbers[line]) != arrival:
            if number == _GAVE_UP:
                index = self._lines[arrival & 1][1].index(line)
                raise GaveUpError(index + (index >= self.mine))
            self._progress()
            patience.rest("rank(s) of this node did not come")


class SharedSync(Sync):
    """The ranks of one node come together by a `ShmBarrier`.

    Args:
        barrier: of these ranks.
        messages: of all ranks of the group; find out who did what when something is wrong.
    """

    def __init__(self, barrier: ShmBarrier, messages: MessageSync) -> None:
        self.barrier = barrier
        self._messages = messages

    def same(self, call: Call, place: int = NOWHERE) -> bool:
        """As `Sync.same`."""
        try:
            is_same, is_common = self.barrier.arrive(call.scope, call.digest(), place)
        except Exception as error:  # noqa: BLE001 - raised again
            raise self._explained(error, call) from None
        if not is_same:
            raise self._messages.disagreement(call)
        return is_common

    def wait(self, call: Call) -> None:
        """As `Sync.wait`."""
        try:
            self.barrier.arrive(call.scope)
        except Exception as error:  # noqa: BLE001 - raised again
            raise self._explained(error, call) from None

    def give_up(self) -> None:
        """Tell the others that this rank will not come any more."""
        self.barrier.give_up()

    def _explained(self, error: Exception, call: Call) -> Exception:
        """What the barrier raised, in the words of a group."""
        if isinstance(error, GaveUpError):
            return TransportError(
                f"rank {error.rank} of this node gave up on a collective of this group; its own error says why"
            )
        if isinstance(error, MPI.Exception):
            return mapped(error)
        if isinstance(error, TimeoutError):
            return self._messages.timeout(call)
        return error
