"""Changes torch.distributed, so that `init_process_group("gloo")` in the script makes a group of Syncline.

When the script has imported torch, this module changes four things in torch:

1. For the URLs `env://` and `tcp://`, the ranks meet in a store on rank 0, by MPI messages. So rank 0 opens no port.
2. A subclass of torch's `BackendConfig` names a backend of Syncline instead of the script's backend. The script and torch still
   see the script's name.
3. torch makes every group with `_new_process_group_helper`. A replacement of this function decides whether point 2 applies to
   the group. For the default group, rank 0 logs this decision.
4. If the command line says so, `DistributedDataParallel` and the default time limit are replaced.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from .ranks import Job

logger = logging.getLogger("syncline.collectives")

BACKENDS = {
    "auto": "groups gloo and mpi are Syncline's if there is an MPI, nccl is torch's",
    "mpi": "groups gloo, mpi and nccl are Syncline's, CPU tensors go over MPI",
    "keep": "groups are as the script names them, the ranks still meet without an open port",
}
DDP_ENTRY_POINTS = "syncline.ddp"
# Private names of torch. If a later torch lacks one of them, the script runs with torch's own groups.
_OF_C10D = ("BackendConfig", "_new_process_group_helper", "_get_default_timeout", "_MPI_AVAILABLE")
_OF_RENDEZVOUS = ("_rendezvous_handlers",)
_MPI, _BY_DEVICE = "syncline-mpi", "syncline"


class Answers:
    """Changes torch.distributed in this process.

    Args:
        job: this process's rank, and the other ranks of its job.
        backend: a key of `BACKENDS`.
        ddp: returns the class that replaces torch's `DistributedDataParallel`; called when torch is loaded. None: do not
            replace the class.
        timeout_s: the default time limit of groups. None: torch's default.
    """

    def __init__(self, job: Job, backend: str, ddp: Callable[[], type] | None, timeout_s: float | None) -> None:
        self._job = job
        self._backend = backend
        self._ddp = ddp
        self._timeout_s = timeout_s
        # Our backend for the group that is being made, and for the group of all ranks. None: torch's own.
        self._carrier: str | None = None
        self._carrier_of_all: str | None = None
        self._groups_of_all = 0  # how many default groups were made so far
        self._store: Any = None

    def prepare(self) -> None:
        """Change torch now, if torch is imported already. Otherwise change torch when the script imports torch."""
        if "torch" in sys.modules:
            self._change_torch()
        else:
            sys.meta_path.insert(0, _WhenLoaded("torch", self._change_torch))

    def _change_torch(self) -> None:
        import torch

        if torch.distributed.is_available():
            c10d: Any = torch.distributed.distributed_c10d
            rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # a function has this name too
            unknown = unknown_names(c10d, rendezvous)
            if unknown:
                logger.warning("torch %s has no %s: the script gets torch's own groups", torch.__version__, ", ".join(unknown))
            else:
                self._change_distributed(c10d, rendezvous)
        if self._ddp is not None:
            parallel: Any = torch.nn.parallel
            parallel.DistributedDataParallel = parallel.distributed.DistributedDataParallel = self._ddp()

    def _change_distributed(self, c10d: Any, rendezvous: Any) -> None:
        if self._timeout_s is not None:
            limit = timedelta(seconds=self._timeout_s)
            c10d._get_default_timeout = lambda _: limit
        if self._job.world is not None:
            for scheme in ("env", "tcp"):
                rendezvous._rendezvous_handlers[scheme] = self._meeting(rendezvous._rendezvous_handlers[scheme])
            self._change_groups(c10d)

    # ---- where the ranks meet ----

    def _meeting(self, torchs: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """Return the function that replaces torch's rendezvous `torchs`.

        If the group has as many ranks as the job, the ranks meet through MPI. Otherwise, and in a forked child, the function
        calls `torchs`.
        """

        def meet(url: str, timeout: timedelta | None = None, **kwargs: Any) -> Iterator[Any]:
            asked = dict(parse_qsl(urlsplit(url).query))
            rank, size = (int(asked.get(key, os.environ.get(key.upper(), -1))) for key in ("rank", "world_size"))
            if size != self._job.size or os.getpid() != self._job.pid:
                yield from torchs(url, **({} if timeout is None else {"timeout": timeout}), **kwargs)
                return
            yield self._store_of_all(timeout), rank, size

        return meet

    def _store_of_all(self, timeout: timedelta | None) -> Any:
        """Return the store in which the ranks of a default group meet. The first call is a collective."""
        import torch.distributed as dist

        from ...torch_bridge.rendezvous import rendezvous

        if self._store is None:
            self._store = next(rendezvous("mpi://", timeout))[0]
        # Each default group gets its own prefix, so that no group sees keys of an earlier group.
        return dist.PrefixStore(f"run/{self._groups_of_all}", self._store)

    # ---- which group ----

    def _change_groups(self, c10d: Any) -> None:
        answers, torchs_helper, torchs_config = self, c10d._new_process_group_helper, c10d.BackendConfig

        class BackendConfig(torchs_config):  # type: ignore[misc, valid-type]
            def get_device_backend_map(self) -> dict[str, str]:
                named: dict[str, str] = super().get_device_backend_map()
                return named if answers._carrier is None else dict.fromkeys(named, answers._carrier)

        def new_process_group_helper(
            size: int, rank: int, members: list[int], backend: str, store: Any, *rest: Any, **options: Any
        ) -> Any:
            if os.getpid() != answers._job.pid:
                return torchs_helper(size, rank, members, backend, store, *rest, **options)
            carrier = answers._choose(torchs_config(backend).get_device_backend_map(), size, rank, members)
            if size == -1 and carrier is not None:  # torch gives backend "mpi" no store and no rank; ours needs both
                size, rank = answers._job.size, answers._job.rank
                store = c10d.PrefixStore("default_pg", answers._store_of_all(options["timeout"]))
            if carrier is not None:
                options["backend_options"] = None  # these options are for torch's backend, which is not used
            answers._carrier = carrier
            try:
                made = torchs_helper(size, rank, members, backend, store, *rest, **options)
            finally:
                answers._carrier = None
            answers._note(made[0], backend, carrier, members)
            return made

        c10d.BackendConfig = BackendConfig
        c10d._new_process_group_helper = new_process_group_helper
        if self._backend != "keep":
            c10d._MPI_AVAILABLE = True

    def _choose(self, named: Mapping[str, str], size: int, rank: int, members: list[int]) -> str | None:
        """Return Syncline's backend for a group, or None if the group stays torch's own. For `named`, see `carrier_for`."""
        carrier = carrier_for(named, self._backend)
        if carrier is None:
            return None
        import syncline.collectives.torch_backend  # noqa: F401 - registers ours

        if not members:
            return carrier if self._are_the_jobs_ranks(size, rank) else None
        # A group of some ranks is split from the default group, so both groups must have the same backend of Syncline.
        import torch.distributed as dist

        is_of_all = len(members) == self._job.size == dist.get_world_size()
        return carrier if carrier == self._carrier_of_all or is_of_all else None

    def _are_the_jobs_ranks(self, size: int, rank: int) -> bool:
        """Return whether a new default group has the job's ranks. A collective if `size` is the job's number of ranks."""
        # -1 means MPI's world size.
        if size == -1:
            return True
        return size == self._job.size and all(self._job.exchange(rank == self._job.rank))

    def _note(self, group: Any, backend: str, carrier: str | None, members: list[int]) -> None:
        if carrier is not None and hasattr(group, "syncline_group"):  # other objects mean that this rank is no member
            group.go_by(str(backend))
        if members:
            return
        self._groups_of_all += 1
        self._carrier_of_all = carrier
        if self._job.rank == 0:
            over = "torch's own" if carrier is None else group.syncline_group.describe()
            logger.info(
                "init_process_group(%r): %d rank(s) over %s (--backend %s)", str(backend), self._job.size, over, self._backend
            )


def unknown_names(c10d: object, rendezvous: object) -> list[str]:
    """Return the names that this module must replace and that torch.distributed does not have."""
    asked = [(c10d, name) for name in _OF_C10D] + [(rendezvous, name) for name in _OF_RENDEZVOUS]
    return [name for module, name in asked if not hasattr(module, name)]


def carrier_for(named: Mapping[str, str], backend: str) -> str | None:
    """Return the name of Syncline's backend for a group, or None if the group keeps torch's own backend.

    `named` is the script's backend for each type of device. `backend` is a key of `BACKENDS`.
    """
    names = set(named.values())
    if backend == "keep" or not names <= {"gloo", "mpi", "nccl"}:
        return None
    if "nccl" not in names:
        return _MPI
    # One group of ours serves all devices of a torch group, so our group cannot be combined with torch's own NCCL.
    return _BY_DEVICE if backend == "mpi" else None


class _WhenLoaded(MetaPathFinder):
    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """Return the spec from the other finders, with a loader that runs the module and then calls `act`."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # remove our override: the class's method is visible again
            execute(module)
            self._act()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
