"""The rendezvous scheme mpi://: ranks meet through MPI, without an open port."""

from __future__ import annotations

import atexit
import itertools
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..engine.cancel_scope import DEFAULT_TIMEOUT_S, seconds
from ..errors import InvalidArgumentError, LaunchError
from ..forks import in_forks
from ..group import ProcessGroup
from ..startup.backend import ConnectRequest
from ..startup.launch import Launch, take_launch
from ..startup.registry import load_backend
from ..stores import AsTorchStore
from ..stores.over_group import GroupStore

_open: list[GroupStore] = []
in_forks(_open.clear)
# Count the stores of each group separately. All ranks of a group call `store_over` in the same order, so they get the same
# numbers. A single count for all groups would differ on a newcomer, which has been in fewer groups.
_numbers: WeakKeyDictionary[ProcessGroup, Iterator[int]] = WeakKeyDictionary()


def rendezvous(url: str, timeout: timedelta | None = None, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """Yield a store, this process's rank and the number of ranks. torch calls this function for ``init_method="mpi://"``.

    Without a launcher, this process is the only rank.

    Raises:
        InvalidArgumentError: the URL has a host or a path after "mpi://".
        LaunchError: torchrun, or another launcher that does not start MPI programs, started this process. Or the `rank` or
            `world_size` in the URL contradicts the launcher. Without a launcher, only rank 0 and world size 1 are allowed.
    """
    rank, world_size = _asked_for(url)
    launch = take_launch(os.environ)
    if launch is None:
        yield _alone(rank, world_size)
        return
    if not launch.is_mpi:
        raise LaunchError(
            f"init_method 'mpi://' needs mpirun, mpiexec or srun, but {launch.launcher} started this process; use 'env://'"
        )
    yield _over_mpi(launch, rank, world_size, seconds(timeout, DEFAULT_TIMEOUT_S))


def _asked_for(url: str) -> tuple[int, int]:
    """Return the rank and the world size in a URL such as "mpi:?rank=0&world_size=2". A missing number is -1."""
    parts = urlsplit(url)
    if parts.netloc or parts.path.strip("/"):
        raise InvalidArgumentError(f"expected 'mpi://' and nothing after it (MPI knows where the ranks are), found {url!r}")
    asked = dict(parse_qsl(parts.query))
    return int(asked.get("rank", -1)), int(asked.get("world_size", -1))


def _alone(rank: int, world_size: int) -> tuple[dist.Store, int, int]:
    if world_size not in (-1, 1) or rank not in (-1, 0):
        raise LaunchError(
            f"init_method 'mpi://' with rank={rank} and world_size={world_size}, but nothing launched this process, so it is "
            "alone; start it with mpirun, mpiexec or srun"
        )
    return dist.HashStore(), 0, 1


def _over_mpi(launch: Launch, rank: int, world_size: int, timeout_s: float) -> tuple[dist.Store, int, int]:
    request = ConnectRequest(
        launch,
        None if rank == -1 else rank,
        None if world_size == -1 else world_size,
        "mpi://",
        timeout_s,
        group_name="mpi://",
    )
    group = load_backend("mpi").connect(request)
    return _store_of(group, timeout_s), group.rank, group.size


def store_over(group: ProcessGroup) -> dist.Store:
    """Make a store for the ranks of a group. All ranks call this function. The program can still use the group."""
    if group.size == 1:
        return dist.HashStore()
    met_in = group.meeting_store()
    # If the ranks met in a store, take a part of that store. Otherwise make a `GroupStore`, which needs a separate group.
    if met_in is not None:
        number = next(_numbers.setdefault(group, itertools.count()))
        return dist.PrefixStore(f"torch/{number}", met_in)
    part = group.split(0)
    assert part is not None
    return _store_of(part, group.timeout_s)


def _store_of(group: ProcessGroup, timeout_s: float) -> dist.Store:
    """Make a `GroupStore` over a group that nothing else may use. All ranks call this function right after they have met."""
    # Each store has a thread and MPI communicators, so all ranks close the stores of earlier calls here, together. But if torch
    # has groups now, because our default group has changed (`_renew`), these groups may still use the earlier stores.
    if not dist.is_initialized():
        close_stores()
    # `atexit` calls the function that was registered last first. MPI's function is registered already, so `close_stores` runs
    # before MPI ends.
    if not _open:
        atexit.register(close_stores)
    store = GroupStore(group, timeout_s)
    _open.append(store)
    return AsTorchStore(store)


def close_stores() -> None:
    """Close each `GroupStore` that this module has made. All ranks call this function."""
    while _open:
        _open.pop().close()
