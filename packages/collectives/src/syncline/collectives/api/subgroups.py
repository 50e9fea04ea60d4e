"""Make groups of some ranks. Every rank of the parent group calls these functions, even a rank that will be in no new group."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from datetime import timedelta

from ..engine.cancel_scope import seconds
from ..errors import DisagreementError, InvalidArgumentError
from ..group import ProcessGroup
from ..health.statements import Statements
from ..tensors.checks import is_integer
from .default_group import NonMember, get_default_group, resolve_group
from .object_exchange import all_gather_bytes, are_same_on_all_ranks

_LONGEST_REQUEST_BYTES = 1024


def new_group(ranks: Sequence[int] | None = None, timeout: timedelta | float | None = None) -> ProcessGroup | NonMember:
    """Make a group of some ranks of the default group. Every rank of the default group calls this function.

    Args:
        ranks: ranks of the default group, each once; None takes all. As in torch, their order has no effect: the new group
            has its ranks in ascending order.
        timeout: the time limit of a collective, in seconds or as a timedelta; None takes the default group's limit.

    Returns:
        The new group. A rank that is not in the new group gets a `NonMember`.

    Raises:
        InvalidArgumentError: `ranks` is empty, has a rank twice, or has a number that is no rank of the default group.
        DisagreementError: the ranks name different members. All ranks raise this error, and no group is made.
    """
    world = get_default_group()
    chosen = _sorted(range(world.size) if ranks is None else ranks)
    _check_ranks(chosen, world.size)
    timeout_s = seconds(timeout, world.timeout_s)
    # Compare before the split, so that no rank gets a group that other ranks have not asked for.
    verify_request(world, f"new_group({chosen})")
    made = world.split(0 if world.rank in chosen else None, timeout_s=timeout_s)
    return NonMember(f"new_group({chosen})", chosen, world.rank) if made is None else made


def new_subgroups(
    group_size: int, group: ProcessGroup | None = None, timeout: timedelta | float | None = None
) -> tuple[ProcessGroup, list[list[int]]]:
    """Divide a group into groups of `group_size` consecutive ranks. Every rank of the group calls this function.

    Returns:
        A pair: the new group that contains this rank; and for each new group, the list of its ranks in the default group.
            (torch returns handles of all new groups instead of the lists.)

    Raises:
        InvalidArgumentError: the size does not divide the number of ranks.
        DisagreementError: the ranks give different sizes. All ranks raise this error, and no group is made.
    """
    parent = resolve_group(group)
    if not is_integer(group_size) or group_size < 1 or parent.size % group_size != 0:
        raise InvalidArgumentError(
            f"expected a group_size that divides the {parent.size} ranks of group '{parent.name}', found {group_size!r}"
        )
    group_size = int(group_size)
    timeout_s = seconds(timeout, parent.timeout_s)
    verify_request(parent, f"new_subgroups({group_size})")
    made = parent.split(parent.rank // group_size, timeout_s=timeout_s)
    assert made is not None
    ranks = list(parent.ranks)
    return made, [ranks[start : start + group_size] for start in range(0, parent.size, group_size)]


def new_subgroups_by_enumeration(
    ranks_per_subgroup_list: Sequence[Sequence[int]], timeout: timedelta | float | None = None
) -> tuple[ProcessGroup | NonMember, list[list[int]]]:
    """Make one new group for each list of ranks of the default group. Every rank of the default group calls this function.

    Returns:
        A pair: the new group that contains this rank, or a `NonMember` if this rank is in no list; and the lists, each sorted.

    Raises:
        InvalidArgumentError: the lists contain no rank, contain a rank twice, or contain a number that is no rank of the
            default group.
        DisagreementError: the ranks give different lists. All ranks raise this error, and no group is made.
    """
    world = get_default_group()
    try:
        lists = [_sorted(entry) for entry in ranks_per_subgroup_list]
    except TypeError as error:
        raise InvalidArgumentError(f"expected a list of lists of ranks, found {ranks_per_subgroup_list!r}") from error
    _check_ranks([rank for entry in lists for rank in entry], world.size)
    timeout_s = seconds(timeout, world.timeout_s)
    verify_request(world, f"new_subgroups_by_enumeration({lists})")
    color = next((number for number, entry in enumerate(lists) if world.rank in entry), None)
    made = world.split(color, timeout_s=timeout_s)
    everyone = [rank for entry in lists for rank in entry]
    return NonMember("new_subgroups_by_enumeration", everyone, world.rank) if made is None else made, lists


def verify_request(group: ProcessGroup, request: str) -> None:
    """Check that all ranks of a group ask for the same new groups. Every rank of the group calls this function.

    Cost: an all_reduce of 16 bytes. If the requests differ, also two all-gathers of at most 1024 bytes from each rank.

    Raises:
        DisagreementError: the requests differ. All ranks raise this error.
    """
    if are_same_on_all_ranks(request.encode(), group=group):
        return
    said = all_gather_bytes(request.encode()[:_LONGEST_REQUEST_BYTES], group=group)
    raise DisagreementError(different_requests([text.decode(errors="replace") for text in said], group.place()))


def different_requests(requests: Sequence[str], place: str) -> str:
    """The error message for requests that differ. `requests` has one entry for each rank. A pure function."""
    said = Statements.of(requests).in_words()
    return f"{place}: the ranks ask for different groups ({said}); let every rank make the same calls with the same arguments"


def _sorted(ranks: Iterable[int]) -> list[int]:
    try:
        return sorted(int(operator.index(rank)) for rank in ranks)  # ranks compare texts, and a bool has another text
    except TypeError as error:
        raise InvalidArgumentError(f"expected a list of ranks, found {ranks!r}") from error


def _check_ranks(ranks: Sequence[int], world_size: int) -> None:
    if not ranks:
        raise InvalidArgumentError("expected at least one rank, found none")
    if len(set(ranks)) < len(ranks):
        raise InvalidArgumentError(f"expected each rank once, found {list(ranks)}")
    if not all(0 <= rank < world_size for rank in ranks):
        raise InvalidArgumentError(f"expected ranks in 0..{world_size - 1}, found {list(ranks)}")
