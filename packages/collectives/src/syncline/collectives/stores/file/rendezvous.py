"""file_rendezvous: the processes of one run find each other in a folder, whatever earlier runs have left there.

Note [Rendezvous among leftovers]
------------------------------
A process cannot see whether a file belongs to this run. So it trusts a file only if the file repeats a random number that
this process has just drawn. The folder has a store, the *rendezvous store*, which is never deleted. Nothing in it needs to be
true; it only must have the form of what a rendezvous writes::

    rank r > 0                                   rank 0
    1. draws a number, sets join/r to it
                                                 2. draws the id of a new run, reads every join/r,
                                                    sets offer to (run, {r: number})
    3. reads offer until it holds his number:
       a live rank 0 has seen him; sets
       here/<run>/r
                                                 4. done when here/<run>/r is there for every r, else back to 2:
                                                    a join/r of an earlier run is answered too, which does no harm

The store of the run is a fresh one, named by the random id of step 2. Two runs at the same time in the same rendezvous
store could mix their ranks; `rendezvous_id` keeps them apart.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from datetime import timedelta
from typing import NamedTuple

from ...engine.cancel_scope import CancelScope
from ...errors import InvalidArgumentError, StoreError, StoreTimeout
from ..store import poll
from .store import FileStore

_NUMBER = re.compile(rb"[0-9a-f]{32}")
_RUN = re.compile(r"run-[0-9a-f]{32}")


def file_rendezvous(
    path: str | os.PathLike[str],
    rank: int,
    world_size: int,
    *,
    rendezvous_id: str = "rendezvous",
    timeout: timedelta | float | None = None,
) -> FileStore:
    """A new file store for this run, without an id that names the run; see Note [Rendezvous among leftovers].

    All processes of the run call it, with the same `path`, `world_size` and `rendezvous_id`. Rank 0 returns when all are there.

    Args:
        path: a folder that all processes reach under this name; it may hold the remains of earlier runs.
        rank: this process's number.
        world_size: how many processes there are.
        rendezvous_id: tells runs apart that meet in the same folder at the same time; named like a `run_id`.
        timeout: seconds or a timedelta; for the rendezvous, and for the store that it gives.

    Raises:
        StoreTimeout: not all came in time; on rank 0, the message names the missing ranks.
        StoreUnavailableError: the folder cannot be written, or others can write it.
        StoreError: a record there is not one that a rendezvous writes; all ranks are told so at once.
        InvalidArgumentError: `rank` is not below `world_size`.
    """
    if not 0 <= rank < world_size:
        raise InvalidArgumentError(f"rank={rank}: expected a rank from 0 to {world_size - 1}, as world_size is {world_size}")
    store = FileStore(path, rendezvous_id, timeout)
    run = _host(store, world_size) if rank == 0 else _join(store, rank, world_size)
    return FileStore(path, run, timeout)


def join_latest_run(
    path: str | os.PathLike[str], *, rendezvous_id: str = "rendezvous", timeout: timedelta | float | None = None
) -> FileStore:
    """The store of the run that met last in this folder, for a process that comes later; waits until there is one.

    The folder may hold the remains of earlier runs, and this may be one of them: whether its processes still live is for those
    who read its store to find out.

    Args:
        path: as for `file_rendezvous`.
        rendezvous_id: as for `file_rendezvous`.
        timeout: seconds or a timedelta; for the wait, and for the store that it gives.

    Raises:
        StoreTimeout: no run has met there in time.
        StoreError: a record there is not one that a rendezvous writes.
    """
    store = FileStore(path, rendezvous_id, timeout)
    if not poll(lambda: store.check(["offer"]), CancelScope(store.timeout.total_seconds())):
        raise StoreTimeout(
            f"{store.describe()}: no job has met here within {store.timeout.total_seconds():g} s (timeout); was it given "
            "another folder, or does this process not see that file system?"
        )
    return FileStore(path, _read_offer(store).run, timeout)


def _host(store: FileStore, world_size: int) -> str:
    run = f"run-{secrets.token_hex(16)}"
    here = {f"here/{run}/{rank}": rank for rank in range(1, world_size)}
    answered: dict[str, str] | None = None

    def all_here() -> bool:
        nonlocal answered
        joined = _read_joined(store, world_size)
        _read_offer(store)
        if joined != answered:
            store.set("offer", json.dumps({"run": run, "joined": joined}))
            answered = joined
        return store.check(list(here))

    if not poll(all_here, CancelScope(store.timeout.total_seconds())):
        absent = [rank for key, rank in here.items() if not store.check([key])]
        raise StoreTimeout(
            f"{store.describe()}: of {world_size} ranks, {absent} did not come within {store.timeout.total_seconds():g} s "
            "(timeout); either they failed or never started, or they were given another path, or they do not see "
            "this file system"
        )
    for key in here:
        store.delete_key(key)
    return run


def _join(store: FileStore, rank: int, world_size: int) -> str:
    _read_joined(store, world_size)  # what is bad there ends all ranks, before one of them writes over it
    number = secrets.token_hex(16)
    store.set(f"join/{rank}", number)
    offer = _Offer("", {})

    def answered() -> bool:
        nonlocal offer
        offer = _read_offer(store)
        return offer.joined.get(str(rank)) == number

    if not poll(answered, CancelScope(store.timeout.total_seconds())):
        raise StoreTimeout(
            f"{store.describe()}: rank 0 did not answer rank {rank} within {store.timeout.total_seconds():g} s "
            "(timeout); either it failed or never started, or it was given another path, or it does not see this file system"
        )
    store.set(f"here/{offer.run}/{rank}", b"")
    return offer.run


class _Offer(NamedTuple):
    """The id of a run, and the numbers of the ranks that rank 0 has seen."""

    run: str
    joined: dict[str, str]


def _read_joined(store: FileStore, world_size: int) -> dict[str, str]:
    """The numbers of the ranks above 0 that have come, by rank."""
    numbers = {str(rank): store.get(f"join/{rank}") for rank in range(1, world_size) if store.check([f"join/{rank}"])}
    for rank, number in numbers.items():
        if not _NUMBER.fullmatch(number):
            raise _bad_record(store, f"join/{rank}")
    return {rank: number.decode() for rank, number in numbers.items()}


def _read_offer(store: FileStore) -> _Offer:
    """What rank 0 has offered; nothing to nobody if it has not."""
    if not store.check(["offer"]):
        return _Offer("", {})
    try:
        offer = json.loads(store.get("offer"))
        run, joined = offer["run"], offer["joined"]
    except (ValueError, TypeError, LookupError, RecursionError) as error:  # no JSON, no UTF-8, not these fields
        raise _bad_record(store, "offer") from error
    if not (isinstance(run, str) and _RUN.fullmatch(run) and isinstance(joined, dict)):
        raise _bad_record(store, "offer")
    return _Offer(run, joined)


def _bad_record(store: FileStore, key: str) -> StoreError:
    return StoreError(
        f"{store.describe()}: the record {key!r} in its log is not what Syncline writes there; it was damaged, or written by "
        "something else. Remove that folder if no job uses it, or meet in another"
    )
