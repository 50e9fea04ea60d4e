"""Whether all ranks are about to make the same groups."""

from __future__ import annotations

from collections.abc import Sequence

from ..contract.object_exchange import all_gather_bytes
from ..contract.process_group import ProcessGroup
from ..errors import DisagreementError


def check_agreement(group: ProcessGroup, request: str) -> None:
    """Compare what the ranks of a group ask for. A collective of the group; costs two small all-gathers.

    Args:
        group: whose ranks compare.
        request: the same text on every rank, such as "new_group([0, 1])".

    Raises:
        DisagreementError: the texts differ; on all ranks.
    """
    requests = [said.decode() for said in all_gather_bytes(request.encode(), group=group)]
    if len(set(requests)) > 1:
        raise DisagreementError(different_requests(requests, group.place()))


def different_requests(requests: Sequence[str], place: str) -> str:
    """What is wrong, in words. A pure function.

    Args:
        requests: of each rank, by rank.
        place: this rank and the group.
    """
    said = "; ".join(f"rank {rank}: {request}" for rank, request in enumerate(requests))
    return f"{place}: the ranks ask for different groups ({said}); let every rank name the same members, in the same order"
