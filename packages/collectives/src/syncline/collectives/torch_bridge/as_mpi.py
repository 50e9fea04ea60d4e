"""Syncline's MPI backend under torch's name "mpi", for libraries that accept only the names of torch's own backends."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..engine.cancel_scope import seconds
from ..errors import MisuseError
from ..torch_internals import set_group_store
from . import group_factory
from .registration import SCHEME
from .rendezvous import rendezvous
from .torch_process_group import TorchProcessGroup

NAME = "mpi"


def init_as_mpi(timeout: timedelta | float | None = None) -> None:
    """Initialise torch.distributed with Syncline's MPI backend, under the name of torch's own backend "mpi".

    Start the ranks with mpirun or srun. All ranks call this function. Without a launcher, the group has one rank. After this
    call, torch's `is_mpi_available()` is true, and torch's `new_group` also makes groups of Syncline's MPI backend.

    Args:
        timeout: the time limit of each collective, in seconds or as a timedelta; None takes torch's 30 minutes.

    Raises:
        MisuseError: this torch was built with its own MPI backend.
        LaunchError: a launcher that does not start MPI, such as torchrun, started this process.
    """
    if dist.is_mpi_available() and getattr(distributed_c10d, "ProcessGroupMPI", None) is not ProcessGroupMPI:
        raise MisuseError(
            "this torch was built with MPI, and has a backend 'mpi' of its own; use the name 'syncline-mpi' for ours"
        )
    torchs: Any = distributed_c10d
    torchs.ProcessGroupMPI, torchs._MPI_AVAILABLE = ProcessGroupMPI, True
    dist.init_process_group(NAME)
    group: Any = dist.group.WORLD
    # torch registers no store for backend "mpi". But later groups of another backend, such as "gloo", meet in the store of the
    # default group, so register the store here.
    set_group_store(group, NAME, group.get_group_store())
    if timeout is not None:  # torch does not pass its time limit to backend "mpi"
        group.set_timeout(timedelta(seconds=seconds(timeout)))


class ProcessGroupMPI:
    """The class that torch calls to make a group of backend "mpi"."""

    # For each list of ranks, counts the groups of these ranks. The ranks make these groups in the same order, so a
    # group gets the same number on all its ranks.
    _numbers: ClassVar[defaultdict[tuple[int, ...], itertools.count[int]]] = defaultdict(itertools.count)

    @classmethod
    def create(cls, ranks: Sequence[int]) -> TorchProcessGroup:
        """Make a group of `ranks`, which include this rank. An empty list means all ranks: torch's default group."""
        if ranks:
            ours: Any = dist.group.WORLD
            store, rank, size = ours.get_group_store(), list(ranks).index(dist.get_rank()), len(ranks)
            timeout = timedelta(seconds=ours.syncline_group.timeout_s)
        else:
            store, rank, size = next(rendezvous(f"{SCHEME}://"))
            timeout = dist.default_pg_timeout
        name = f"{NAME}-{'.'.join(map(str, ranks))}-{next(cls._numbers[tuple(ranks)])}"
        options = SimpleNamespace(
            store=dist.PrefixStore(name, store),
            group_rank=rank,
            group_size=size,
            global_ranks_in_group=list(ranks),
            group_id=name,
            timeout=timeout,
        )
        return group_factory.create(NAME, "mpi", ["cpu", "cuda"], options, None)
