"""`file_rendezvous`: the processes of one run find each other in a folder that may contain files of earlier runs.

Note [Rendezvous among leftovers]
------------------------------
A process cannot see whether a file belongs to this run. So the process draws a random number, and trusts a file only if the
file repeats this number. The folder has a store, the *rendezvous store*, which is never deleted. The records of this store may
be out of date, but must have the form that a rendezvous writes::

    rank r > 0                                   rank 0
    1. draws a number, sets join/r to the number
                                                 2. draws the id of a new run (once)
                                                 3. reads every join/r (also of r that are not ranks of this
                                                    run), sets offer to (run, size, {r: number})
    4. reads offer until offer has the number:
       then a live rank 0 has seen this rank;
       sets here/<run>/r to its `world_size`
                                                 5. done when here/<run>/r exists for every r, else back to 3

If ranks were given different values of `world_size`, an error comes in step 4 or 5. If another process replaces this process's
number or offer, two processes have one rank: the next look raises an error.

The rendezvous store counts the processes that use the store of the run. Rank 0 counts itself in step 2. Each other rank counts
itself in step 4, before it sets here/<run>/r. `leave_run` takes a process out of the count. The last process removes the count
and the run's store. No process may join a run that has no count. A process that was killed stays in the count, so the store of
its run is never removed.

Each run has a new store, named by the random id of step 2. Two runs that meet at the same time need different values of
`rendezvous_id`. Otherwise ranks of one run could meet ranks of the other run, or one of the runs ends with an error.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from operator import index
from pathlib import Path
from typing import NamedTuple

from ...engine.cancel_scope import CancelScope
from ...errors import DisagreementError, InvalidArgumentError, StoreError, StoreTimeout
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
    """Make a new file store for this run. Unlike `FileStore`, this function needs no id of the run from the caller.

    All processes of the run call this function with the same `path`, `world_size` and `rendezvous_id`. Rank 0 waits for all
    ranks. Another rank waits only for the answer of rank 0.

    Args:
        path: a folder that all processes reach under this name; it may contain files of earlier runs.
        rank: this process's rank.
        world_size: the number of processes.
        rendezvous_id: a name of letters, digits, dot, dash and underscore. Runs that meet in one folder at the same time need
            different names.
        timeout: the time limit of the rendezvous, and of the new store; seconds or a timedelta.

    Raises:
        StoreTimeout: some ranks did not come in time. On rank 0, the message names them.
        StoreUnavailableError: the folder cannot be written, or other users can write it.
        StoreError: a record in the folder was not written by a rendezvous; or rank 0 failed after it had answered this rank.
        DisagreementError: the ranks were given different values of `world_size`, or two processes were given one rank.
        InvalidArgumentError: `rank` is not below `world_size`.
    """
    rank, world_size = index(rank), index(world_size)  # JSON cannot encode NumPy's integers
    if not 0 <= rank < world_size:
        raise InvalidArgumentError(f"rank={rank}: expected a rank from 0 to {world_size - 1}, as world_size is {world_size}")
    store = FileStore(path, rendezvous_id, timeout)
    if rank == 0:
        run = f"run-{secrets.token_hex(16)}"
        store.add(_users(run), 1)
        with _used(store, path, run, timeout) as own:
            _host(store, run, world_size)
            return own
    offer = _join(store, rank)
    disagrees = offer.size not in (0, world_size)
    # Count this rank before `set`: after `set`, rank 0 may go on, and leave the run.
    if not store.change(_users(offer.run), _one_more):
        raise _other_size(store, rank, world_size, offer.size) if disagrees else _gave_up(store, rank)
    with _used(store, path, offer.run, timeout) as own:
        store.set(f"here/{offer.run}/{rank}", str(world_size))
        # Raise only after this rank has written its `world_size`, so that rank 0 sees the difference, too.
        if disagrees:
            raise _other_size(store, rank, world_size, offer.size)
        return own


def leave_run(store: FileStore, rendezvous_id: str = "rendezvous") -> None:
    """Remove this process from the users of `store`, the store of a run. If no user is left, also remove the store.

    `rendezvous_id` is the value that was passed to `file_rendezvous` or `join_latest_run`. Errors of the store are ignored.
    """
    # The program may have removed the folder, for example a temporary one. Then nothing is left to do. Do not open a
    # `FileStore`, because it would make the folder again.
    if not os.path.isdir(store.folder.parent / rendezvous_id):
        return
    with suppress(StoreError):
        _leave(FileStore(store.folder.parent, rendezvous_id), store.folder)


def join_latest_run(
    path: str | os.PathLike[str], *, rendezvous_id: str = "rendezvous", timeout: timedelta | float | None = None
) -> FileStore:
    """Return the store of the latest run in this folder, for a process that joins the run later.

    If there is no run, or all processes of the latest run have called `leave_run`, the function waits for the next run. A
    killed process never calls `leave_run`, so the caller must check whether the processes of the run are alive. The arguments
    are as in `file_rendezvous`.

    Raises:
        StoreTimeout: there was no run that this process could join, and no such run came in time.
        StoreError: a record in the folder was not written by a rendezvous.
    """
    store = FileStore(path, rendezvous_id, timeout)
    run = ""

    def is_counted() -> bool:
        nonlocal run
        run = _read_offer(store).run
        # `check` costs less than `change`, and this process may wait for long.
        return store.check([_users(run)]) and store.change(_users(run), _one_more)

    if not poll(is_counted, CancelScope(store.timeout.total_seconds())):
        lack = "the latest job that met here has ended, and no other has come" if run else "no job has met here"
        raise StoreTimeout(
            f"{store.describe()}: {lack} within {store.timeout.total_seconds():g} s (timeout); was it given "
            "another folder, or does this process not see that file system?"
        )
    with _used(store, path, run, timeout) as own:
        return own


# ---- the users of a run ----


@contextmanager
def _used(common: FileStore, path: str | os.PathLike[str], run: str, timeout: timedelta | float | None) -> Iterator[FileStore]:
    try:
        yield FileStore(path, run, timeout)
    except BaseException:
        with suppress(StoreError):
            _leave(common, Path(path) / run)
        raise


def _leave(common: FileStore, folder: Path) -> None:
    if common.change(_users(folder.name), _one_less):
        shutil.rmtree(folder, ignore_errors=True)


def _users(run: str) -> str:
    return f"users/{run}"


def _one_more(count: bytes | None) -> tuple[bytes | None, bool]:
    """A change (see the module `table`) that adds one user to the count. The answer is false if the run has no count."""
    return (None, False) if count is None else (str(int(count) + 1).encode(), True)


def _one_less(count: bytes | None) -> tuple[bytes | None, bool]:
    """A change (see the module `table`) that counts one user less. For the last user, it removes the count and answers true."""
    left = int(count or 0) - 1
    return (str(left).encode(), False) if left > 0 else (None, count is not None)


# ---- the rendezvous ----


def _host(store: FileStore, run: str, world_size: int) -> None:
    here = {f"here/{run}/{rank}": rank for rank in range(1, world_size)}
    answered: dict[str, str] | None = None

    def all_here() -> bool:
        nonlocal answered
        joined = _read_joined(store)
        # Read the offer before the next lines replace it, to raise for a bad record, or if another rank 0 has replaced mine.
        is_replaced = _read_offer(store).run != run and answered is not None
        # Write the offer only if it has changed, because the log never shrinks. Or write it so that the other rank 0 sees it.
        if joined != answered or is_replaced:
            store.set("offer", json.dumps({"run": run, "size": world_size, "joined": joined}))
            answered = joined
        if is_replaced:
            raise _came_twice(store, 0)
        came = [key for key in store.list_keys() if key.startswith(f"here/{run}/")]
        for key in came:
            told = int(store.get(key) or world_size)  # an earlier version of Syncline writes no size here
            if told != world_size:
                raise _other_size(store, int(key.rpartition("/")[2]), told, world_size)
        return here.keys() <= set(came)

    if not poll(all_here, CancelScope(store.timeout.total_seconds())):
        absent = [rank for key, rank in here.items() if not store.check([key])]
        raise StoreTimeout(
            f"{store.describe()}: of {world_size} ranks, {absent} did not come within {store.timeout.total_seconds():g} s "
            "(timeout); either they failed or never started, or they were given another path, or they do not see "
            "this file system"
        )
    for key in here:
        store.delete_key(key)


def _join(store: FileStore, rank: int) -> _Offer:
    _read_joined(store)  # raises for a bad record before this rank overwrites the record, so that all ranks raise
    number = secrets.token_hex(16)
    store.set(f"join/{rank}", number)
    offer = _Offer("", 0, {})

    def answered() -> bool:
        nonlocal offer
        offer = _read_offer(store)
        if store.get(f"join/{rank}").decode() != number:
            raise _came_twice(store, rank)
        return offer.joined.get(str(rank)) == number

    if not poll(answered, CancelScope(store.timeout.total_seconds())):
        raise StoreTimeout(
            f"{store.describe()}: rank 0 did not answer rank {rank} within {store.timeout.total_seconds():g} s "
            "(timeout); either it failed or never started, or it was given another path, or it does not see this file system"
        )
    return offer


def _other_size(store: FileStore, rank: int, told: int, of_rank_0: int) -> DisagreementError:
    return DisagreementError(
        f"rank {rank} was told that there are {told} ranks, and rank 0 that there are {of_rank_0}: pass the same world_size to "
        f"all ranks that meet in {store.describe()}"
    )


def _came_twice(store: FileStore, rank: int) -> DisagreementError:
    return DisagreementError(
        f"two processes came to this store as rank {rank}: give each process its own rank. If this job has only one rank "
        f"{rank}, another job meets here, too: give each job another folder ({store.describe()})"
    )


def _gave_up(store: FileStore, rank: int) -> StoreError:
    return StoreError(
        f"{store.describe()}: rank 0 answered rank {rank}, and then gave up; look at rank 0's error, and start all ranks again"
    )


class _Offer(NamedTuple):
    """The record with which rank 0 answers the other ranks: the run's id, `world_size`, and each other rank's random number.

    `size` is `world_size`, or 0 if an earlier version of Syncline wrote the record.
    """

    run: str
    size: int
    joined: dict[str, str]


def _read_joined(store: FileStore) -> dict[str, str]:
    # Some numbers may be from ranks of earlier runs.
    numbers = {key.removeprefix("join/"): store.get(key) for key in store.list_keys() if key.startswith("join/")}
    for rank, number in numbers.items():
        if not _NUMBER.fullmatch(number):
            raise _bad_record(store, f"join/{rank}")
    return {rank: number.decode() for rank, number in numbers.items()}


def _read_offer(store: FileStore) -> _Offer:
    if not store.check(["offer"]):
        return _Offer("", 0, {})
    try:
        offer = json.loads(store.get("offer"))
        run, size, joined = offer["run"], offer.get("size", 0), offer["joined"]
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:  # no JSON, no UTF-8, not these fields
        raise _bad_record(store, "offer") from error
    if not (isinstance(run, str) and _RUN.fullmatch(run) and type(size) is int and isinstance(joined, dict)):
        raise _bad_record(store, "offer")
    return _Offer(run, size, joined)


def _bad_record(store: FileStore, key: str) -> StoreError:
    return StoreError(
        f"{store.describe()}: the record {key!r} in its log is not what Syncline writes there; it was damaged, or written by "
        "something else. Remove that folder if no job uses it, or meet in another"
    )
