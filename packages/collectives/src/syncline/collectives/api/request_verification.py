"""Check that all ranks ask for the same new groups."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import DisagreementError
from ..group import ProcessGroup
from ..health.statements import Statements
from .object_exchange import all_gather_bytes, are_same_on_all_ranks

_MOST_BYTES = 1024


def verify_request(group: ProcessGroup, request: str) -> None:
    """Compare the requests of the ranks of a group. Every rank of the group calls this.

    Cost: an all_reduce of 16 bytes. Only if the requests differ, also two all-gathers of the first 1024 bytes of each. (A
    request may name all ranks. Without a limit, the gathered bytes would grow with the square of the number of ranks.)

    Args:
        group: the group.
        request: the same text on every rank, such as "new_group([0, 1])".

    Raises:
        DisagreementError: the requests differ. All ranks raise it.
    """
    if are_same_on_all_ranks(request.encode(), group=group):
        return
    said = all_gather_bytes(request.encode()[:_MOST_BYTES], group=group)
    raise DisagreementError(different_requests([text.decode(errors="replace") for text in said], group.place()))


def different_requests(requests: Sequence[str], place: str) -> str:
    """The message for requests that differ. A pure function.

    Args:
        requests: the request of each rank, by rank.
        place: this rank and the group in words.
    """
    said = Statements.of(requests).in_words()
    return f"{place}: the ranks ask for different groups ({said}); let every rank name the same members, in the same order"
