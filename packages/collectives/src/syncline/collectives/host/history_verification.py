"""HistoryVerification: whether the ranks of a group have made the same calls, found out now and then."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from ..contract.deadline import Deadline
from ..contract.statements import Statements
from ..errors import DisagreementError, TransportError
from ..failures.call_digest import CallDigest
from ..failures.call_record import DONE, CallRecord
from ..failures.divergence import find_divergence
from ..failures.flight_recorder import FlightRecorder
from .control_messages import ControlMessages, statements_for_error

#: The ranks verify after every so many calls, if nothing else made them.
VERIFY_EVERY_CALLS = 1000
_LAST_CALLS = 12
_MOST_BYTES = 8192


class CallsSoFar(NamedTuple):
    """What is compared: the digest of the calls that were begun until a moment, and how many they were."""

    value: int
    calls: int


class HistoryVerification:
    """The digest of the calls that this rank has begun, and its comparison with those of the others.

    Note [Verification of calls]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Where a transport does not compare each call before it runs, ranks that make different calls may succeed, with wrong
    results. So each rank keeps a digest of all calls in their total order, and the ranks compare digest and count at a barrier,
    when the group is closed, after every `VERIFY_EVERY_CALLS` calls, and at the end of each backward that a reducer reduces.
    What is compared of a call is in `Collective.digest`. Not seen: two calls of one signature in swapped order, for nothing
    tells one from the other. Sends and receives have no place in the order; their transports compare sizes.

    Args:
        messages: carry what is compared.
        rank: this rank.
        recorder: of the group; says what the last calls were.
    """

    def __init__(self, messages: ControlMessages, rank: int, recorder: FlightRecorder) -> None:
        self._messages = messages
        self._rank = rank
        self._recorder = recorder
        self._digest = CallDigest()

    def add(self, call: int) -> None:
        """The call of that digest begins."""
        self._digest.add(call)

    @property
    def is_due(self) -> bool:
        """Whether the ranks verify after the call that was added last."""
        return self._digest.count % VERIFY_EVERY_CALLS == 0

    def so_far(self) -> CallsSoFar:
        """The calls until now, for a verification that runs later."""
        return CallsSoFar(self._digest.value, self._digest.count)

    def verify(self, deadline: Deadline, calls: CallsSoFar | None = None) -> None:
        """Compare with the other ranks. A collective, with a place in the total order.

        Args:
            deadline: until when the others shall have come.
            calls: what to compare; by default all until now.

        Cost: of a `TransportMessages` ceil(log2(size)) messages of 32 bytes, one after the other.

        Raises:
            DisagreementError: they have made different calls; on all ranks.
            TimeoutError: another rank did not come.
        """
        value, count = self.so_far() if calls is None else calls
        numbers = self._messages.maximum((value, -value, count, -count), deadline)
        if numbers[0] != -numbers[1] or numbers[2] != -numbers[3]:
            raise DisagreementError(self._explain(numbers, count, deadline))

    def _explain(self, numbers: Sequence[int], count: int, deadline: Deadline) -> str:
        records = self._recorder.records()
        last = [record for record in records if record.position is not None and record.position < count][-_LAST_CALLS:]
        while len(_as_text(last).encode()) > _MOST_BYTES:
            last = last[1:]
        histories: dict[int, Sequence[CallRecord]] = {self._rank: last}
        untold: Collection[int] = ()
        with suppress(TimeoutError, TransportError):  # what is known is said, whatever becomes of the others
            said = statements_for_error(self._messages, _as_text(last), deadline)
            histories = {rank: calls for text, ranks in said.ranks.items() for calls in [_from_text(text)] for rank in ranks}
            untold = said.untold
        return different_sequences(histories, untold, -numbers[3], numbers[2])


def _as_text(records: Sequence[CallRecord]) -> str:
    """The same of all ranks that made the same calls."""
    return json.dumps([replace(record, number=None, state=DONE, issued_at=0.0).as_dict() for record in records])


def _from_text(text: str) -> list[CallRecord]:
    return [CallRecord.from_dict(entry) for entry in json.loads(text)]


def different_sequences(histories: Mapping[int, Sequence[CallRecord]], untold: Collection[int], fewest: int, most: int) -> str:
    """What is wrong, in words. A pure function.

    Args:
        histories: for each rank that has told them its last calls.
        untold: ranks that have made others, of which nobody has heard.
        fewest: how many calls the rank made that made the fewest.
        most: the same for the most.
    """
    counts = f"{fewest} calls each" if fewest == most else f"between {fewest} and {most} calls"
    divergence = find_divergence(histories)
    where = "they parted before the calls that are remembered" if divergence is None else divergence.sentence
    lists = Statements()
    lists.untold.update(untold)
    for rank, calls in histories.items():
        lists.add(", ".join(map(str, calls[-4:])) or "none", [rank])
    return (
        f"the ranks called different collectives, and results since then are wrong ({counts}). {where}. Make every rank issue "
        f"the same calls in the same order. The last calls: {lists.in_words()}"
    )
