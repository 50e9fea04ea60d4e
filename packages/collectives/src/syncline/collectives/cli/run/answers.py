"""What torch.distributed answers the script with: which group `init_process_group("gloo")` makes, and where its ranks meet.

torch is changed when the script has imported it, in four places:

1. `env://` and `tcp://` lead to a store on rank 0 that the others reach by MPI messages. No port is opened.
2. `BackendConfig`, from which torch takes who serves each device of a group, names ours in place of the backend that the script
   has named. The script, and torch, still see the name that the script gave.
3. The function that makes every group, of all ranks or of some, decides whether 2 applies, and says what was chosen.
4. `DistributedDataParallel`, and the default time limit, where the command line says so.

A collective passes none of this.
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
    "auto": "gloo and mpi are ours where MPI is there, nccl is torch's",
    "mpi": "gloo, mpi and nccl are ours: CPU tensors go over MPI",
    "keep": "what the script names; its ranks still meet without an open port",
}
DDP_ENTRY_POINTS = "syncline.ddp"
# What torch does not promise. Without one of them, in a torch to come, the script runs with torch's own groups.
_OF_C10D = ("BackendConfig", "_new_process_group_helper", "_get_default_timeout", "_MPI_AVAILABLE")
_OF_RENDEZVOUS = ("_rendezvous_handlers",)
_MPI, _BY_DEVICE = "syncline-mpi", "syncline"


class Answers:
    """What is answered in this process.

    Args:
        job: its ranks.
        backend: a key of `BACKENDS`.
        ddp: the class that takes the place of torch's, loaded when torch is; None: torch's.
        timeout_s: the time limit of groups for which the script gives none; None: torch's.
    """

    def __init__(self, job: Job, backend: str, ddp: Callable[[], type] | None, timeout_s: float | None) -> None:
        self._job = job
        self._backend = backend
        self._ddp = ddp
        self._timeout_s = timeout_s
        # The one of ours that carries the group that is being made, and the group of all ranks; None: torch's own do.
        self._carrier: str | None = None
        self._carrier_of_all: str | None = None
        self._groups_of_all = 0  # how many default groups there have been
        self._store: Any = None

    def prepare(self) -> None:
        """Answer from the moment on at which torch is imported."""
        if "torch" in sys.modules:
            self._change_torch()
        else:
            sys.meta_path.insert(0, _WhenLoaded("torch", self._change_torch))

    def _change_torch(self) -> None:
        import torch

        if torch.distributed.is_available():
            c10d: Any = torch.distributed.distributed_c10d
            rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")  # a function has its name there
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
        """A rendezvous of all ranks through MPI; others, such as those of a forked child, meet as torch has it."""

        def meet(url: str, timeout: timedelta | None = None, **kwargs: Any) -> Iterator[Any]:
            asked = dict(parse_qsl(urlsplit(url).query))
            rank, size = (int(asked.get(key, os.environ.get(key.upper(), -1))) for key in ("rank", "world_size"))
            if size != self._job.size or os.getpid() != self._job.pid:
                yield from torchs(url, **({} if timeout is None else {"timeout": timeout}), **kwargs)
                return
            yield self._store_of_all(timeout), rank, size

        return meet

    def _store_of_all(self, timeout: timedelta | None) -> Any:
        """A store for the default group that is to be made. A collective when it is called first.

        One store serves them all, as a server of torch's would; a later group must not find what an earlier one has left.
        """
        import torch.distributed as dist

        from ...torch_bridge.rendezvous import rendezvous

        if self._store is None:
            self._store = next(rendezvous("mpi://", timeout))[0]
        return dist.PrefixStore(f"run/{self._groups_of_all}", self._store)

    # ---- which group ----

    def _change_groups(self, c10d: Any) -> None:
        answers, torchs_helper, torchs_config = self, c10d._new_process_group_helper, c10d.BackendConfig

        class BackendConfig(torchs_config):  # type: ignore[misc, valid-type]
            """Names the one of ours that carries the group that is being made."""

            def get_device_backend_map(self) -> dict[str, str]:
                named: dict[str, str] = super().get_device_backend_map()
                return named if answers._carrier is None else dict.fromkeys(named, answers._carrier)

        def new_process_group_helper(
            size: int, rank: int, members: list[int], backend: str, store: Any, *rest: Any, **options: Any
        ) -> Any:
            if os.getpid() != answers._job.pid:
                return torchs_helper(size, rank, members, backend, store, *rest, **options)
            carrier = answers._choose(torchs_config(backend).get_device_backend_map(), size, rank, members)
            if size == -1 and carrier is not None:  # torch's MPI needs neither a store nor a rank
                size, rank = answers._job.size, answers._job.rank
                store = c10d.PrefixStore("default_pg", answers._store_of_all(options["timeout"]))
            if carrier is not None:
                options["backend_options"] = None  # torch's, for another group
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
        """Our backend that carries a group for which the script has named these backends; None: torch's do."""
        carrier = carrier_for(named, self._backend)
        if carrier is None:
            return None
        import syncline.collectives.torch_backend  # noqa: F401 - registers ours

        if not members:
            return carrier if self._are_the_jobs_ranks(size, rank) else None
        # A group of some is made from one of all, which must be of the same backend of ours.
        import torch.distributed as dist

        is_of_all = len(members) == self._job.size == dist.get_world_size()
        return carrier if carrier == self._carrier_of_all or is_of_all else None

    def _are_the_jobs_ranks(self, size: int, rank: int) -> bool:
        """Whether the script counts all ranks, as MPI does. A collective, if it counts as many."""
        if size == -1:
            return True
        return size == self._job.size and all(self._job.exchange(rank == self._job.rank))

    def _note(self, group: Any, backend: str, carrier: str | None, members: list[int]) -> None:
        if carrier is not None and hasattr(group, "syncline_group"):  # else this rank is no member
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
    """Which of the names that are changed these modules of torch.distributed do not have."""
    asked = [(c10d, name) for name in _OF_C10D] + [(rendezvous, name) for name in _OF_RENDEZVOUS]
    return [name for module, name in asked if not hasattr(module, name)]


def carrier_for(named: Mapping[str, str], backend: str) -> str | None:
    """The backend of ours that carries a group, or None for torch's own. A pure function.

    Args:
        named: for each type of device the backend of torch's that the script has named.
        backend: a key of `BACKENDS`.
    """
    names = set(named.values())
    if backend == "keep" or not names <= {"gloo", "mpi", "nccl"}:
        return None
    if "nccl" not in names:
        return _MPI
    # One group of ours serves all devices of a group of torch's: with torch's own NCCL it cannot be combined.
    return _BY_DEVICE if backend == "mpi" else None


class _WhenLoaded(MetaPathFinder):
    """Calls a function when a module has been loaded, once."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """The spec that others find, with a loader that acts afterwards."""
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # that of its class again
            execute(module)
            self._act()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
