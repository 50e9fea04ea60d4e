"""What the ranks of a group tell one another beside its collectives: by messages between two ranks.

Collectives of ranks that have made different calls may meet one another, and garble both. Messages with a tag of their own
meet their like whatever else the ranks do.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch

from ..contract.deadline import Deadline
from ..contract.reserved_tags import CONTROL
from ..errors import TransportError
from .transport import Transport


class ControlMessages(Protocol):
    """What the ranks of a group tell one another, beside its collectives. All ranks ask the same, in the same order."""

    def maximum(self, numbers: Sequence[int], deadline: Deadline) -> list[int]:
        """For each place the largest number of any rank.

        Raises:
            TimeoutError: another rank did not come; a `TransportError` where the messages fail with one.
        """

    def texts(self, text: str, nbytes: int, deadline: Deadline) -> list[str]:
        """What each rank says, by rank: of each the first `nbytes` bytes. For errors; raises the same."""


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

    def texts(self, text: str, nbytes: int, deadline: Deadline) -> list[str]:
        """As `texts_of_ranks`."""
        return texts_of_ranks(self._transport, self._rank, self._size, text, nbytes, deadline)


def texts_for_error(messages: ControlMessages, text: str, nbytes: int, deadline: Deadline) -> list[str]:
    """`messages.texts` for an error that all ranks are about to raise.

    Nobody returns, and ends the connections of all by leaving, before everybody has heard. Whether everybody has may stay
    unknown; what the ranks said is known nevertheless.
    """
    said = messages.texts(text, nbytes, deadline)
    with suppress(TimeoutError, TransportError):
        messages.maximum((0,), deadline)
    return said


def maximum_over_ranks(transport: Transport, rank: int, size: int, numbers: Sequence[int], deadline: Deadline) -> list[int]:
    """For each place the largest number of any rank. A collective of all ranks; none returns before all have called.

    Dissemination: in round k each rank tells the one that is 2**k after it the largest that it knows. The maximum is the same
    however often a number is told, so any number of ranks is served.

    Cost: ceil(log2(size)) messages from each rank, one after the other.

    Raises:
        TimeoutError: another rank did not come.
    """
    mine = torch.tensor(numbers, dtype=torch.int64, device="cpu")
    step = 1
    while step < size:
        theirs = torch.empty_like(mine)
        before, after = (rank - step) % size, (rank + step) % size
        receiving = transport.start_recv(theirs, before, CONTROL)
        sending = transport.start_send(mine, after, CONTROL)
        try:
            receiving.wait(deadline)
            sending.wait(deadline)
        except TimeoutError as error:
            raise TimeoutError(f"rank {before} did not come, or waits itself ({error})") from error
        mine = torch.maximum(mine, theirs)
        step *= 2
    return [int(number) for number in mine.tolist()]


def texts_of_ranks(transport: Transport, rank: int, size: int, text: str, nbytes: int, deadline: Deadline) -> list[str]:
    """What each rank says, by rank: of each the first `nbytes` bytes. A collective; each rank tells each other. For errors.

    Raises:
        TimeoutError: another rank did not come.
    """
    padded = text.encode()[:nbytes].ljust(nbytes)
    mine = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
    rows = [torch.empty_like(mine) for _ in range(size)]
    rows[rank] = mine
    others = [(rank + step) % size for step in range(1, size)]
    requests = [transport.start_recv(rows[peer], peer, CONTROL) for peer in others]
    requests += [transport.start_send(mine, peer, CONTROL) for peer in others]
    for request in requests:
        request.wait(deadline)
    return [bytes(row.tolist()).decode(errors="replace").strip() for row in rows]
