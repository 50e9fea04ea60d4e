"""The ranks of a group wait for each other in a store, and exchange their process identities and addresses."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from ..api.object_exchange import exchange_objects
from ..engine.cancel_scope import CancelScope
from ..errors import DisagreementError, LaunchError, RankLostError, StoreError, StoreTimeout
from ..group import ProcessGroup
from ..health.liveness import ProcessIdentity, own_identity
from ..stores import Store
from ..version import __version__
from .addresses import LOOPBACK, Doors, Tried, addresses_for_others, agreed_addresses, loopback_domain, try_doors

_SLICE_S = 0.25
# How long rank 0 waits for the others to read an error. Rank 0 often serves the store, so the store ends with rank 0.
_READ_S = 2.0
_ALL = "all came"
_IN_ORDER = "in order"
_GAVE_UP = "time-out: "  # the text of a rank that waits no longer (time limit, Ctrl-C) begins with these words
T = TypeVar("T")


@dataclass(frozen=True)
class Met:
    """The information that a rank has about other ranks after all ranks have met in the store.

    Attributes:
        processes: for each rank of this node, the identity of its process. Ranks without an identity are missing, as
            on systems without /proc.
        share_loopback: whether all ranks certainly reach each other at the loopback address.
    """

    processes: Mapping[int, ProcessIdentity]
    share_loopback: bool


def meet(store: Store, rank: int, size: int, scope: CancelScope) -> Met:
    """Wait in the store until all ranks have called this function. Compare `size` and the version of Syncline on all ranks.

    Only these ranks may use `store`, and only for this call. `scope` is the time limit of the whole call.

    Cost: with L ranks on this node, each rank sends L + 8 requests of fixed size to the store. The number of ranks on other
    nodes does not matter. A rank that waits sends more requests.

    Raises:
        TimeoutError: some ranks did not call this function in time; the error names them. When the first rank gives up, or is
            interrupted, all ranks that wait raise the error, too. Ranks that come later raise the error at once.
        DisagreementError: the ranks were given different sizes, or run different versions, or two processes were given one
            rank (all ranks raise the error). Or `size` ranks have met in the store before this rank came (only this rank raises
            the error).
        StoreError: the store failed.
        BaseException: `scope` was cancelled with this error, or its `ask` returned this error.
    """
    mine = own_identity()
    node = None if mine is None else f"node/{mine.node}"
    _compare(store, rank, size)
    # Without an identity, other ranks could not watch this process. So do not list the process.
    if mine is not None:
        place = store.add(f"{node}/count", 1)
        store.set(f"{node}/{place}", json.dumps([rank, loopback_domain(), mine.to_text()]))
    if store.add(_key(rank), 1) > 1:
        problem = (
            f"two processes came to this store as rank {rank}: give each process its own rank. If this job has only one rank "
            f"{rank}, the store belongs to another job: give this job another port or folder"
        )
        store.compare_set(_ALL, "", problem)  # unless all have met, or a rank has reported another problem
    # The count comes last: once it is complete, all entries are in the store.
    came = store.add("came", 1)
    if came == size:
        store.compare_set(_ALL, "", _IN_ORDER)  # unless a rank has reported a problem
    while not _have_come(store, rank, scope):
        try:
            scope.check()
        except TimeoutError:
            # Tell the other ranks only of the scope's own time limit, and not of a `TimeoutError` with which it was cancelled.
            if scope.reason is not None:
                raise
            absent = f"rank(s) {', '.join(map(str, _absent(store, range(size)))) or 'that came late'}"
            # Tell the ranks that wait or come later: they would wait for this rank in vain.
            told = f"{_GAVE_UP}rank {rank} gave up after {scope.timeout_s:g} s, when {absent} had not come"
            if store.compare_set(_ALL, "", told).decode() == told:
                raise TimeoutError(f"{absent} did not come to the rendezvous") from None
            break  # the last rank came at this moment, or another rank has reported a problem
    said = store.get(_ALL, _SLICE_S).decode()
    if said.startswith(_GAVE_UP):
        raise TimeoutError(said.removeprefix(_GAVE_UP))
    if said != _IN_ORDER:
        _disagree(said, store, rank, size)
    if came > size:
        raise DisagreementError(
            f"all {size} ranks have met in this store before rank {rank} came: the store belongs to another job. Is its "
            "port, or its folder, in use? Give this job another one"
        )
    return Met({}, False) if node is None else _on_node(store, node, size)


def _compare(store: Store, rank: int, size: int) -> None:
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
    """On rank 0, wait until all ranks have read the error, but at most `_READ_S` seconds."""
    with suppress(StoreError):  # some ranks did not read in time, or rank 0 and its store have ended
        store.set(f"read/{rank}", "")
        if rank == 0:
            store.wait([f"read/{other}" for other in range(1, size)], _READ_S)


def _absent(store: Store, ranks: Sequence[int]) -> list[int]:
    """Return which of `ranks` have not come to the store.

    Cost if m of n ranks are missing: about 2 m (1 + log2(n / m)) requests.
    """
    # One request asks for all ranks. Only if some are missing, ask for each half.
    if store.check([_key(rank) for rank in ranks]):
        return []
    if len(ranks) == 1:
        return list(ranks)
    middle = len(ranks) // 2
    return _absent(store, ranks[:middle]) + _absent(store, ranks[middle:])


def _have_come(store: Store, rank: int, scope: CancelScope) -> bool:
    try:
        store.wait([_ALL], min(max(scope.remaining_s(), 1e-3), _SLICE_S))
    except StoreTimeout:
        return False
    except StoreError:
        raise
    except BaseException:  # Ctrl-C, or another signal whose handler raises
        # The program may go on and call `meet` again, as a cell of a notebook does. Ranks that come later would wait for this
        # rank in vain. If the store does not answer, a second Ctrl-C ends this request, too.
        with suppress(StoreError):
            told = f"{_GAVE_UP}rank {rank} was interrupted before all had come; call again on all ranks, or start them again"
            store.compare_set(_ALL, "", told)
        raise
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


# ---- the addresses of the ranks; see `addresses` ----


def address_by_store(store: Store, rank: int, size: int, interfaces: Sequence[str], scope: CancelScope) -> str:
    """Return the address at which ranks on other hosts reach this rank. All ranks call this function after `meet`.

    Cost, for N ranks: three requests from each rank, and N more from rank 0.

    Raises:
        LaunchError: a host cannot reach rank 0 at any address, or has no usable address itself. All ranks raise this error.
        RankLostError: the `ask` of a rank's scope returned this error. The rank tells rank 0, and rank 0 tells all ranks.
        TimeoutError: a rank did not take part.
        BaseException: `scope` was cancelled with this error, or its `ask` returned this error.
    """
    if rank == 0:
        return _as_rank_0(store, size, interfaces, scope)
    try:
        places, word = json.loads(_get(store, "doors", scope))
        try:
            addresses_for_others(interfaces)
            tried: object = try_doors([(address, port) for address, port in places], word, scope).as_json()
        except LaunchError as error:  # send the error, so that all ranks fail and rank 0 does not wait
            tried = _in_json(error)
        store.set(f"tried/{rank}", json.dumps(tried))
        said = json.loads(_get(store, "addresses", scope))
    except RankLostError as error:
        # A rank 0 on another host does not see the loss, and waits for the answer of this rank or of a lost rank.
        if 0 not in error.ranks:
            with suppress(StoreError):  # rank 0 and its store have ended
                for other in {rank, *error.ranks}:
                    store.set(f"tried/{other}", json.dumps(_in_json(error)))
        raise
    try:
        return str(dict(_checked(said))[rank])
    except (LaunchError, RankLostError):
        _let_all_read(store, rank, size)
        raise


def _as_rank_0(store: Store, size: int, interfaces: Sequence[str], scope: CancelScope) -> str:
    try:
        with Doors(addresses_for_others(interfaces)) as doors:
            store.set("doors", json.dumps([doors.places, doors.word]))
            tried = {rank: Tried.parse(_checked(json.loads(_get(store, f"tried/{rank}", scope)))) for rank in range(1, size)}
        found = agreed_addresses(doors.places, tried)
    except (LaunchError, RankLostError) as error:
        store.set("doors", json.dumps([[], ""]))  # so that no rank waits for the doors
        store.set("addresses", json.dumps(_in_json(error)))
        _let_all_read(store, 0, size)
        raise
    store.set("addresses", json.dumps(sorted(found.items())))
    return found[0]


def _in_json(error: LaunchError | RankLostError) -> dict[str, Any]:
    """Return an error as values that JSON can hold. `_checked` raises the error on another rank."""
    return {"problem": str(error), "lost_ranks": error.ranks if isinstance(error, RankLostError) else None}


def _checked(said: Any) -> Any:
    """Return the answer of another rank. If the answer is an error, raise the error."""
    if not isinstance(said, dict) or "problem" not in said:
        return said
    lost, problem = said["lost_ranks"], said["problem"]
    raise LaunchError(problem) if lost is None else RankLostError(problem, lost)


def _get(store: Store, key: str, scope: CancelScope) -> bytes:
    while True:
        with suppress(StoreTimeout):
            return store.get(key, min(max(scope.remaining_s(), 1e-3), _SLICE_S))
        scope.check(f"all have come, but not all said at which address they reach rank 0 (no '{key}')")


def address_by_group(group: ProcessGroup, interfaces: Sequence[str], timeout_s: float) -> str:
    """Return the address at which ranks on other hosts reach this rank. All ranks of `group` call this function.

    If all ranks are on one host, the result is the loopback address.

    Raises:
        LaunchError: a host cannot reach rank 0 at any address, or has no usable address itself. All ranks raise this error.
    """
    if len(set(exchange_objects(loopback_domain(), group=group))) == 1:
        return LOOPBACK
    # All ranks exchange their errors here: if a rank raised alone, the others would wait for it in the next exchange.
    mine = _on_all(lambda: addresses_for_others(interfaces), group)
    with Doors(mine if group.rank == 0 else []) as doors:
        places, word = exchange_objects((doors.places, doors.word), group=group)[0]
        tried = None if group.rank == 0 else try_doors(places, word, CancelScope(timeout_s))
        said = exchange_objects(tried, group=group)
    return agreed_addresses(places, {rank: one for rank, one in enumerate(said) if one is not None})[group.rank]


def _on_all(attempt: Callable[[], T], group: ProcessGroup) -> T:
    """Call `attempt`. If any rank gets a `LaunchError`, all ranks raise a `LaunchError`. All ranks call this function."""
    found, problem = None, None
    try:
        found = attempt()
    except LaunchError as error:
        problem = str(error)
    problems = [one for one in exchange_objects(problem, group=group) if one is not None]
    if problems:
        raise LaunchError(problems[0])
    assert found is not None
    return found
