"""What the ranks of a group tell one another beside its collectives: by messages between two ranks.

Collectives of ranks that have made different calls may meet one another, and garble both. Messages with a tag of their own
meet their like whatever else the ranks do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import torch

from ..contract.deadline import Deadline
from ..contract.reserved_tags import CONTROL
from ..contract.statements import Statements
from ..errors import TransportError
from .transport import Transport


class ControlMessages(Protocol):
    """What the ranks of a group tell one another, beside its collectives. All ranks ask the same, in the same order."""

    def maximum(self, numbers: Sequence[int], deadline: Deadline) -> list[int]:
        """For each place the largest number of any rank.

        Raises:
            TimeoutError: another rank did not come; a `TransportError` where the messages fail with one.
        """

    def statements(self, text: str, deadline: Deadline) -> Statements:
        """What the ranks say. For errors; raises the same."""


class TransportMessages:
    """By messages of a transport.

    Args:
        transport: carries the messages.
        rank: this rank.
        size: of the group.
    """

    def __init__(self, transport: Transport, rank: int, size: int) -> None:
        self._transport = transport
        self._rank = rank
        self._size = size

    def maximum(self, numbers: Sequence[int], deadline: Deadline) -> list[int]:
        """As `maximum_over_ranks`."""
        return maximum_over_ranks(self._transport, self._rank, self._size, numbers, deadline)

    def statements(self, text: str, deadline: Deadline) -> Statements:
        """As `statements_of_ranks`."""
        return statements_of_ranks(self._transport, self._rank, self._size, text, deadline)


def statements_for_error(messages: ControlMessages, text: str, deadline: Deadline) -> Statements:
    """`messages.statements` for an error that all ranks are about to raise.

    Nobody returns, and ends the connections of all by leaving, before everybody has heard. Whether everybody has may stay
    unknown; what the ranks said is known nevertheless.
    """
    said = messages.statements(text, deadline)
    with suppress(TimeoutError, TransportError):
        messages.maximum((0,), deadline)
    return said


def maximum_over_ranks(transport: Transport, rank: int, size: int, numbers: Sequence[int], deadline: Deadline) -> list[int]:
    """For each place the largest number of any rank. A collective of all ranks; none returns before all have called.

    Cost: ceil(log2(size)) messages from each rank, one after the other.

    Raises:
        TimeoutError: another rank did not come.
    """
    mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    for before, after in rounds(rank, size):
        theirs = torch.empty_like(mine)
        _exchange(transport, mine, after, theirs, before, deadline)
        mine = torch.maximum(mine, theirs)
    return [int(number) for number in mine.tolist()]


def statements_of_ranks(transport: Transport, rank: int, size: int, text: str, deadline: Deadline) -> Statements:
    """What the ranks say. A collective of all ranks; for errors.

    Cost: 2 ceil(log2(size)) messages from each rank, one after the other: lengths, and what was heard so far, see
    `Statements.packed`.

    Raises:
        TimeoutError: another rank did not come.
    """
    said = Statements()
    said.add(text, [rank])
    for before, after in rounds(rank, size):
        mine = torch.frombuffer(bytearray(said.packed().encode()), dtype=torch.uint8)
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        _exchange(transport, torch.tensor([mine.numel()], device="cpu"), after, length, before, deadline)
        theirs = torch.empty(int(length.item()), dtype=torch.uint8, device="cpu")
        _exchange(transport, mine, after, theirs, before, deadline)
        said.add_packed(bytes(theirs.tolist()).decode())
    return said


def rounds(rank: int, size: int) -> Iterator[tuple[int, int]]:
    """Who tells this rank what it knows, and whom this rank tells, round by round. A pure function.

    Dissemination: in round k each rank tells the one that is 2**k after it. What is told twice must do no harm; then any
    number of ranks is served.
    """
    step = 1
    while step < size:
        yield (rank - step) % size, (rank + step) % size
        step *= 2


def _exchange(
    transport: Transport, mine: torch.Tensor, after: int, theirs: torch.Tensor, before: int, deadline: Deadline
) -> None:
    receiving = transport.start_recv(theirs, before, CONTROL)
    sending = transport.start_send(mine, after, CONTROL)
    try:
        receiving.wait(deadline)
        sending.wait(deadline)
    except TimeoutError as error:
        raise TimeoutError(f"rank {before} did not come, or waits itself ({error})") from error
