"""`Agreement` checks that all ranks of a group make the same calls, because different calls may succeed with wrong results.

Note [Comparison of calls]
~~~~~~~~~~~~~~~~~~~~~~~~~~
`Comparison` says who compares the calls of a group, and `Comparison.of` decides it::

    comparison     who compares, when                               cost
    NONE           nobody: the group has one rank                   nothing
    BY_TRANSPORT   the transport, before each call runs             nothing in shared memory, where the ranks meet anyway
    BEFORE         the group, before each call (`Agreement.same`)   one `Carrier.maximum` of 16 bytes for each call
    LATER          the group, now and then                          a digest for each call; one `Carrier.maximum` of 48 bytes
                   (`Agreement.same_history`)                       for each comparison

With `LATER`, each rank keeps a digest of all its calls in their order. The ranks compare their digests and their numbers of
calls at these times:

- at a barrier,
- when the group is closed,
- after every 1000 calls,
- at the end of each backward in which a reducer sums gradients; see Note [Comparison over NCCL] in `transports.nccl.group`.

Over MPI on several nodes or without shared memory, the transport also compares each call of 32 KiB or more before it runs: see
Note [Presync] in `transports.mpi.transport`.

`Signature.digest` says what the digest covers. Sends and receives are left out: for them, the transport compares the sizes of
the tensors.
"""

from __future__ import annotations

import enum
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple
from zlib import crc32

import torch

from ..engine.call import DONE, CallRecord
from ..engine.cancel_scope import CancelScope
from ..engine.tags import CONTROL
from ..engine.transport import Transport
from ..errors import CollectiveTimeout, DisagreementError, TransportError, with_details
from .recorder import Recorder, find_divergence
from .statements import MOST_TOLD, Statements, different_calls

COMPARE_EVERY_CALLS = 1000
# How long the ranks that have found a difference wait for each other's texts.
_TELL_S = 60.0
# How many of its last calls, and how many bytes, a rank sends to the others when the calls differ.
_LAST_CALLS = 12
_MOST_BYTES = 8192
# The multiplier is odd, and has the well mixed bits of the golden ratio. The mask keeps results small enough to be sent.
_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 62) - 1


class Comparison(enum.Enum):
    """Who compares the calls of a group's ranks, and when. See Note [Comparison of calls]."""

    NONE = enum.auto()
    BY_TRANSPORT = enum.auto()
    BEFORE = enum.auto()
    LATER = enum.auto()

    @classmethod
    def of(cls, size: int, *, check_calls: bool, transport_compares: bool) -> Comparison:
        """Return the comparison for a group of `size` ranks. All ranks get the same result. A pure function.

        Args:
            size: the number of ranks.
            check_calls: the option of the group.
            transport_compares: whether the transport compares every call; see `Transport.compares_every_call`.
        """
        if size == 1:
            return cls.NONE
        # The option comes first: the group also compares the shapes, and a transport may compare only the digests.
        if check_calls:
            return cls.BEFORE
        return cls.BY_TRANSPORT if transport_compares else cls.LATER


class Carrier(ABC):
    """Exchanges numbers and texts between the ranks of a group, separately from the messages of collectives.

    All ranks call the carrier's methods in the same order.
    """

    @abstractmethod
    def maximum(self, numbers: Sequence[int], scope: CancelScope) -> list[int]:
        """Return the elementwise maximum over all ranks, after all ranks have called this method.

        Raises:
            TimeoutError: another rank did not call this method in time.
            TransportError: a message could not be sent or received.
        """

    @abstractmethod
    def statements(self, text: str, scope: CancelScope, *, most_told: int | None = MOST_TOLD) -> Statements:
        """Return the texts of all ranks, for error messages. The method raises the same errors as `maximum`.

        The result may lack some texts if there are more than `most_told` different texts (see `Statements.untold`). None: no
        limit.
        """


class MessageCarrier(Carrier):
    """A carrier that sends messages of a transport, with a reserved tag.

    Cost of `maximum`: each rank sends ceil(log2(size)) messages, one after the other. `statements` costs twice as many.
    """

    def __init__(self, transport: Transport, rank: int, size: int) -> None:
        self._transport = transport
        self._rank = rank
        self._size = size

    def maximum(self, numbers: Sequence[int], scope: CancelScope) -> list[int]:
        """See `Carrier.maximum`."""
        mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        for before, after in rounds(self._rank, self._size):
            theirs = torch.empty_like(mine)
            self._exchange(mine, after, theirs, before, scope)
            mine = torch.maximum(mine, theirs)
        return [int(number) for number in mine.tolist()]

    def statements(self, text: str, scope: CancelScope, *, most_told: int | None = MOST_TOLD) -> Statements:
        """See `Carrier.statements`. Each message contains all texts that the sender knows; see `Statements.packed`."""
        said = Statements()
        said.add(text, [self._rank])
        for before, after in rounds(self._rank, self._size):
            mine = torch.frombuffer(bytearray(said.packed(most_told).encode()), dtype=torch.uint8)
            length = torch.empty(1, dtype=torch.int64, device="cpu")
            self._exchange(torch.tensor([mine.numel()], device="cpu"), after, length, before, scope)
            theirs = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
            self._exchange(mine, after, theirs, before, scope)
            said.add_packed(bytes(theirs.tolist()).decode())
        return said

    def _exchange(self, mine: torch.Tensor, after: int, theirs: torch.Tensor, before: int, scope: CancelScope) -> None:
        # The receive starts first, so that a message that comes at once finds its tensor.
        receiving = self._transport.start_recv(theirs, before, CONTROL)
        sending = self._transport.start_send(mine, after, CONTROL)
        try:
            receiving.wait(scope)
            sending.wait(scope)
        except TimeoutError as error:
            raise TimeoutError(f"rank {before} did not come, or waits itself ({error})") from error


def rounds(rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield, for each round, the rank from which this rank receives, and the rank to which it sends. A pure function.

    This is the dissemination algorithm: in round k, rank r sends all values that it knows to rank r + 2**k (modulo the size). A
    rank may receive a value twice, so use the algorithm only for operations such as a maximum.
    """
    step = 1
    while step < size:
        yield (rank - step) % size, (rank + step) % size
        step *= 2


class History(NamedTuple):
    """A digest of all calls that a rank had made at some moment, and the number of these calls."""

    digest: int
    calls: int


class Agreement:
    """Compares the calls that the ranks of one group make. Error messages show the last calls of the group's `recorder`."""

    def __init__(self, carrier: Carrier, rank: int, recorder: Recorder) -> None:
        self._carrier = carrier
        self._rank = rank
        self._recorder = recorder
        self._history = History(0, 0)

    # ---- one text ----

    def same(self, text: str, scope: CancelScope) -> Statements | None:
        """Find out whether all ranks pass the same text. All ranks call this method between the same two calls of the group.

        Return None if all texts are equal. Otherwise return the texts of the ranks, or only this rank's text if the exchange
        failed.

        Cost: one `Carrier.maximum` of 16 bytes. If the texts differ, also one `Carrier.statements`.

        Raises:
            TimeoutError: another rank did not call this method in time.
        """
        # The smallest number is the negative of the largest negated number, so one exchange finds the smallest and the largest.
        mine = crc32(text.encode())
        largest, negative_smallest = self._carrier.maximum((mine, -mine), scope)
        return None if largest == -negative_smallest else self._statements(text, scope)

    def on_start(self, options: Mapping[str, object], scope: CancelScope) -> str:
        """Compare the options of the ranks. All ranks call this method before the group's first call.

        Return a name for the run. The name is the same on all ranks, and different in each run.

        Raises:
            DisagreementError: the ranks were given different options. All ranks raise this error.
            CollectiveTimeout: a rank did not call this method in time.
        """
        text = options_in_words(options)
        try:
            mine = crc32(text.encode())
            largest, negative_smallest, started_ns = self._carrier.maximum((mine, -mine, time.time_ns()), scope)
            if largest != -negative_smallest:
                raise DisagreementError(different_options(self._statements(text, scope)))
        # For a call, the group turns a TimeoutError into a `CollectiveTimeout`. This comparison is not a call: convert it here.
        except TimeoutError as error:
            raise CollectiveTimeout(
                f"rank {self._rank} has connected, but not all ranks compared their options: {error}"
            ) from error
        return name_of_run(started_ns)

    # ---- all calls so far ----

    def add(self, call: int) -> None:
        """Add a call to the history of this rank, before the call runs. `call` is the digest of the call."""
        digest, calls = self._history
        mixed = ((digest ^ call) + calls + 1) * _MULTIPLIER
        self._history = History((mixed ^ (mixed >> 31)) & _MASK, calls + 1)

    @property
    def is_due(self) -> bool:
        """Whether the ranks must compare their histories now, after the latest call."""
        # All ranks count the same calls, so all ranks compare after the same call.
        return self._history.calls % COMPARE_EVERY_CALLS == 0

    @property
    def history(self) -> History:
        """The digest and the number of this rank's calls until now."""
        return self._history

    def same_history(self, scope: CancelScope, until: History | None = None, *, closes: bool = False) -> None:
        """Compare all calls so far with the other ranks. All ranks call this method between the same two calls of the group.

        With a probability of 1 in 2**62, the comparison misses a difference. Cost: one `Carrier.maximum` of 48 bytes.

        Args:
            scope: ends the wait for the other ranks.
            until: the history to compare. None: all calls until now.
            closes: whether this rank closes the group.

        Raises:
            DisagreementError: the ranks have made different calls, or only some ranks close the group. All ranks raise this
                error.
            TimeoutError: another rank did not call this method in time.
        """
        digest, calls = self._history if until is None else until
        numbers = self._carrier.maximum((digest, -digest, calls, -calls, closes, -closes), scope)
        if numbers[0] != -numbers[1] or numbers[2] != -numbers[3]:
            raise DisagreementError(self._who_did_what(calls, -numbers[3], numbers[2], scope))
        # A rank that goes on may soon need the ranks that close, although all have made the same calls so far.
        if numbers[4] != -numbers[5]:
            raise different_calls(
                self._statements("close()" if closes else "a comparison of calls, as after a backward", scope)
            )

    def meet(self, scope: CancelScope) -> None:
        """Wait until all ranks have called this method, between the same two calls of the group.

        Raises:
            TimeoutError: another rank did not call this method in time.
        """
        self._carrier.maximum((0,), scope)

    # ---- for errors ----

    def _statements(self, text: str, scope: CancelScope) -> Statements:
        """Return the texts of all ranks, for an error text. If the other ranks do not answer, return only this rank's text."""
        # All ranks have begun the comparison that has found a difference, so their texts come soon.
        scope = scope.within(_TELL_S)
        said = Statements()
        said.add(text, [self._rank])
        with suppress(TimeoutError, TransportError):
            said = self._carrier.statements(text, scope)
            # A rank that returns from here may leave the job, and break the other ranks' connections. So wait until all ranks
            # have the texts.
            self.meet(scope)
        return said

    def _who_did_what(self, calls: int, fewest: int, most: int, scope: CancelScope) -> str:
        records = self._recorder.records()
        last = [record for record in records if record.position is not None and record.position < calls][-_LAST_CALLS:]
        # Leave out the oldest calls first: the ranks compare often, so they diverged not long ago.
        while len(_as_text(calls, last).encode()) > _MOST_BYTES:
            last = last[1:]
        said = self._statements(_as_text(calls, last), scope)
        # Each distinct text is parsed once, because most ranks have the same text.
        told = {rank: parsed for text, ranks in said.ranks.items() for parsed in [_from_text(text)] for rank in ranks}
        begun = {rank: count for rank, (count, _) in told.items()}
        return different_histories({rank: last for rank, (_, last) in told.items()}, begun, said.untold, fewest, most)


def _as_text(calls: int, records: Sequence[CallRecord]) -> str:
    # Ranks with the same calls must get the same text, so leave out what differs between ranks.
    return json.dumps([calls, [replace(record, number=None, state=DONE, issued_at=0.0).as_dict() for record in records]])


def _from_text(text: str) -> tuple[int, list[CallRecord]]:
    calls, records = json.loads(text)
    return calls, [CallRecord.from_dict(entry) for entry in records]


# ---- texts of errors: pure functions ----


def different_histories(
    histories: Mapping[int, Sequence[CallRecord]], begun: Mapping[int, int], untold: Collection[int], fewest: int, most: int
) -> str:
    """Return the error text for ranks with different calls. `untold` are ranks whose last calls are not known.

    `histories` and `begun` are as for `find_divergence`. `fewest` and `most` are the smallest and the largest number of calls
    of any rank.
    """
    counts = f"{fewest} calls each" if fewest == most else f"between {fewest} and {most} calls"
    divergence = find_divergence(histories, begun)
    where = "they diverged before the calls that are remembered" if divergence is None else divergence.sentence
    lists = Statements()
    lists.untold.update(untold)
    for rank, calls in histories.items():
        lists.add(", ".join(map(str, calls[-4:])) or "none", [rank])
    return with_details(
        "the ranks called different collectives, and results since then are wrong; make all issue the same calls in one order",
        f"{where} ({counts})",
        "The last calls:",
        *lists.lines(),
    )


def options_in_words(options: Mapping[str, object]) -> str:
    """Return the options as text, in the order of their names."""
    return ", ".join(f"{name}={value!r}" for name, value in sorted(options.items()))


def different_options(said: Statements) -> str:
    """Return the error text for ranks with different options. `said` has the options of each rank."""
    return with_details(
        "the ranks were given different options; pass the same to init_process_group on all, and in the site file",
        *said.lines(),
    )


def name_of_run(started_ns: int) -> str:
    """Return the name of a run that began at `started_ns`, in nanoseconds since the epoch. The name contains the UTC time."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(started_ns // 10**9))}-{started_ns % 10**9 // 1000:06d}"


def different_splits(counts: Sequence[Sequence[Sequence[int]]]) -> str | None:
    """Return the error text for an all-to-all whose splits do not match, or None if the splits match.

    `counts` has two lists for each rank: how many elements the rank expects from each rank, and how many it sends to each rank.
    """
    for receiver, (expected, _) in enumerate(counts):
        for sender, (_, sent) in enumerate(counts):
            if sent[receiver] != expected[sender]:
                return (
                    f"rank {sender} sends {sent[receiver]} elements to rank {receiver}, which expects {expected[sender]}; make "
                    "the input splits of the senders equal the output splits of the receiver"
                )
    return None
