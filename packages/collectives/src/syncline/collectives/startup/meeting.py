"""The ranks of a group wait for one another in a store, and say there which processes they are and where to reach them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from ..api.object_exchange import exchange_objects
from ..engine.cancel_scope import CancelScope
from ..errors import DisagreementError, LaunchError, StoreError, StoreTimeout
from ..group import ProcessGroup
from ..health.liveness import ProcessIdentity, own_identity
from ..stores import Store
from ..version import __version__
from .addresses import LOOPBACK, Doors, Tried, addresses_for_others, agreed_addresses, loopback_domain, try_doors

_SLICE_S = 0.25
# Rank 0 often serves the store, which ends with its process. So long it waits for others to read what is wrong.
_READ_S = 2.0
_ALL = "all came"
_IN_ORDER = "in order"
T = TypeVar("T")


@dataclass(frozen=True)
class Met:
    """What a rank learns at the meeting.

    Attributes:
        processes: which processes the ranks of this node are, as far as the system tells.
        share_loopback: all ranks certainly reach one another at the loopback address.
    """

    processes: Mapping[int, ProcessIdentity]
    share_loopback: bool


def meet(store: Store, rank: int, size: int, scope: CancelScope) -> Met:
    """Return when all ranks have come.

    Nobody can look after a process of another node, so nobody asks which it is.

    Cost for L ranks on this node: L + 8 requests of fixed size, however many ranks there are, and some while it waits. Only if
    not all come, some for each rank that did not: see `_absent`.

    Args:
        store: of these ranks alone, for this meeting alone.
        rank: this one.
        size: how many there are.
        scope: for all of it.

    Raises:
        TimeoutError: not all came; it says which did not.
        DisagreementError: the ranks were told different sizes, or run different versions; on all ranks.
        StoreError: the store failed.
    """
    mine = own_identity()
    node = None if mine is None else f"node/{mine.node}"
    _compare(store, rank, size)
    if mine is not None:
        place = store.add(f"{node}/count", 1)
        store.set(f"{node}/{place}", json.dumps([rank, loopback_domain(), mine.to_text()]))
    store.set(_key(rank), "")
    came = store.add("came", 1)
    if came == size:
        store.compare_set(_ALL, "", _IN_ORDER)  # if nobody has told of something else
    elif came > size:
        raise DisagreementError(
            f"all {size} ranks have met in this store before rank {rank} came: it belongs to another job. Is its port, or its "
            "folder, in use? Give this job another one"
        )
    while not _have_come(store, scope):
        if scope.is_over():
            absent = _absent(store, range(size))
            raise TimeoutError(f"rank(s) {', '.join(map(str, absent)) or 'that came late'} did not come to the rendezvous")
    said = store.get(_ALL, _SLICE_S).decode()
    if said != _IN_ORDER:
        _disagree(said, store, rank, size)
    return Met({}, False) if node is None else _on_node(store, node, size)


def _compare(store: Store, rank: int, size: int) -> None:
    """Find out whether the first rank that came was told the same; if not, let all know."""
    first, told, version = json.loads(store.compare_set("told", "", json.dumps([rank, size, __version__])))
    problem = None
    if told != size:
        problem = (
            f"rank {first} was told that there are {told} ranks, and rank {rank} that there are {size}: pass the same "
            "world_size to all, or start all with the same launcher"
        )
    elif version != __version__:
        problem = (
            f"the ranks run different versions of Syncline: rank {first} {version}, rank {rank} {__version__}. Install the "
            "same on every node"
        )
    if problem is not None:
        store.set(_ALL, problem)
        _disagree(problem, store, rank, size)


def _disagree(problem: str, store: Store, rank: int, size: int) -> NoReturn:
    _let_all_read(store, rank, size)
    raise DisagreementError(problem)


def _let_all_read(store: Store, rank: int, size: int) -> None:
    """This rank knows what is wrong, and is about to fail. Rank 0 returns once the others have read it, too, or are late."""
    with suppress(StoreError):  # they are late, or rank 0 has waited long enough for this rank
        store.set(f"read/{rank}", "")
        if rank == 0:
            store.wait([f"read/{other}" for other in range(1, size)], _READ_S)


def _absent(store: Store, ranks: Sequence[int]) -> list[int]:
    """Which of these ranks have not come. Cost: about 2 (1 + log2(n / m)) requests for each of m that have not, of n."""
    if store.check([_key(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    middle = len(ranks) // 2
    return _absent(store, ranks[:middle]) + _absent(store, ranks[middle:])


def _have_come(store: Store, scope: CancelScope) -> bool:
    try:
        store.wait([_ALL], min(max(scope.remaining_s(), 1e-3), _SLICE_S))
    except StoreTimeout:
        return False
    return True


def _on_node(store: Store, node: str, size: int) -> Met:
    found: dict[int, ProcessIdentity] = {}
    domains = set()
    for place in range(1, store.add(f"{node}/count", 0) + 1):
        rank, domain, text = json.loads(store.get(f"{node}/{place}", _SLICE_S))
        process = ProcessIdentity.parse(text)
        domains.add(domain)
        if process is not None:
            found[rank] = process
    return Met(found, len(found) == size and len(domains) == 1)


def _key(rank: int) -> str:
    return f"met/{rank}"


# ---- at which addresses; see `addresses` ----


def address_by_store(store: Store, rank: int, size: int, interfaces: Sequence[str], scope: CancelScope) -> str:
    """At which address this rank is to be reached by ranks on other hosts, once all have met in the store.

    Cost: three requests of each rank, and N more of rank 0, for N ranks.

    Raises:
        LaunchError: a host reaches rank 0 at none of its addresses (on all ranks), or has none itself.
        TimeoutError: a rank did not take part.
    """
    if rank == 0:
        return _as_rank_0(store, size, interfaces, scope)
    places, word = json.loads(_get(store, "doors", scope))
    try:
        addresses_for_others(interfaces)
        tried: object = try_doors([(address, port) for address, port in places], word, scope).as_json()
    except LaunchError as error:  # all ranks shall fail; else rank 0 would wait for this one
        tried = str(error)
    store.set(f"tried/{rank}", json.dumps(tried))
    said = json.loads(_get(store, "addresses", scope))
    if isinstance(said, str):
        _let_all_read(store, rank, size)
        raise LaunchError(said)
    return str(dict(said)[rank])


def _as_rank_0(store: Store, size: int, interfaces: Sequence[str], scope: CancelScope) -> str:
    try:
        with Doors(addresses_for_others(interfaces)) as doors:
            store.set("doors", json.dumps([doors.places, doors.word]))
            tried = {rank: _tried(_get(store, f"tried/{rank}", scope)) for rank in range(1, size)}
        found = agreed_addresses(doors.places, tried)
    except LaunchError as error:
        store.set("doors", json.dumps([[], ""]))  # nobody shall wait for them
        store.set("addresses", json.dumps(str(error)))
        _let_all_read(store, 0, size)
        raise
    store.set("addresses", json.dumps(sorted(found.items())))
    return found[0]


def _tried(answer: bytes) -> Tried:
    said = json.loads(answer)
    if isinstance(said, str):
        raise LaunchError(said)
    return Tried.parse(said)


def _get(store: Store, key: str, scope: CancelScope) -> bytes:
    try:
        return store.get(key, max(scope.remaining_s(), 1e-3))
    except StoreTimeout:
        raise TimeoutError(f"all have come, but not all said at which address they reach rank 0 (no '{key}')") from None


def address_by_group(group: ProcessGroup, interfaces: Sequence[str], timeout_s: float) -> str:
    """`address_by_store` for ranks that a group connects. On one host it is the loopback address, without an attempt.

    Raises:
        LaunchError: as `address_by_store`; on all ranks.
    """
    if len(set(exchange_objects(loopback_domain(), group=group))) == 1:
        return LOOPBACK
    mine = _on_all(lambda: addresses_for_others(interfaces), group)
    with Doors(mine if group.rank == 0 else []) as doors:
        places, word = exchange_objects((doors.places, doors.word), group=group)[0]
        tried = None if group.rank == 0 else try_doors(places, word, CancelScope(timeout_s))
        said = exchange_objects(tried, group=group)
    return agreed_addresses(places, {rank: one for rank, one in enumerate(said) if one is not None})[group.rank]


def _on_all(attempt: Callable[[], T], group: ProcessGroup) -> T:
    """What it gives, or the first problem that any rank had with it."""
    found, problem = None, None
    try:
        found = attempt()
    except LaunchError as error:
        problem = str(error)
    problems = [one for one in exchange_objects(problem, group=group) if one is not None]
    if found is None or problems:
        raise LaunchError(problems[0])
    return found
