"""Connecting the ranks of a job over NCCL."""

from __future__ import annotations

import itertools
import time

import torch.distributed as dist

from ...engine.cancel_scope import CancelScope
from ...errors import BackendUnavailableError, DisagreementError
from ...group import ProcessGroup
from ...health.agreement import different_options, name_of_run, options_in_words
from ...health.report import Reporter
from ...health.report_signal import report_on_signal
from ...health.statements import Statements
from ...startup.backend import Backend, ConnectRequest
from ...startup.registry import load_backend
from ..gloo import rendezvous as gloo_rendezvous
from . import library
from .connector import Connector
from .cuda import CudaAccelerator
from .process_group import NcclGroup
from .rendezvous import GroupRendezvous, Payload, Rendezvous, StoreRendezvous

# A store may outlive a group (torchrun's does), so every connection writes under a number of its own.
_generations = itertools.count()


class NcclBackend(Backend):
    """Each rank has a GPU. Connecting costs nothing; NCCL itself connects at the first collective, when the GPU is chosen."""

    @property
    def meets_in_store(self) -> bool:
        """Yes."""
        return True

    def missing(self) -> str | None:
        """A GPU, CuPy or NCCL."""
        return library.problem()

    def connect(self, request: ConnectRequest) -> NcclGroup:
        """Make sure that there is a place to meet: a host group that exists already, else MPI, else a store."""
        lack = self.missing()
        if lack is not None:
            raise BackendUnavailableError(f"backend 'nccl': {lack}")
        rendezvous, rank, size = _rendezvous(request)
        connector = Connector(library.load(), CudaAccelerator(), rendezvous, range(size), rank, request.group_name)
        group = NcclGroup(connector, timeout_s=request.timeout_s, reproducible=request.reproducible)
        group.report_to(_reporter(rendezvous, rank, size, request))
        return group


def _rendezvous(request: ConnectRequest) -> tuple[Rendezvous, int, int]:
    """Where the ranks meet, this process's rank, and the number of ranks."""
    if request.host_group is not None:
        return _in_group(request.host_group, owned=False)
    if _is_launched_by_mpi(request):
        return _in_group(load_backend("mpi").connect(request), owned=True)
    store, rank, size = gloo_rendezvous(request)
    return StoreRendezvous(dist.PrefixStore(f"syncline/nccl/{next(_generations)}", store)), rank, size


def _reporter(rendezvous: Rendezvous, rank: int, size: int, request: ConnectRequest) -> Reporter | None:
    """That of the host group in which the ranks meet; where they meet in a store, one of their own."""
    if isinstance(rendezvous, GroupRendezvous):
        return rendezvous.reporter
    reporter = Reporter(agree_on_start(rendezvous, rank, size, request), rank, size)
    report_on_signal(reporter)
    return reporter


def agree_on_start(rendezvous: Rendezvous, rank: int, size: int, request: ConnectRequest) -> str:
    """Compare the options that change what the ranks communicate. A collective.

    Returns:
        A name for the run, the same on all ranks, and another one in another run: the time.

    Raises:
        DisagreementError: the ranks were given different options; on all ranks.
        TransportError: a rank did not come.
    """
    mine = {"options": options_in_words({"reproducible": request.reproducible}), "started_ns": time.time_ns()}
    decided = rendezvous.agree("start", range(size), rank, mine, _start, CancelScope(request.timeout_s))
    if "different" in decided:
        raise DisagreementError(decided["different"])
    return name_of_run(decided["started_ns"])


def _start(said: list[Payload]) -> Payload:
    options = [entry["options"] for entry in said]
    if len(set(options)) > 1:
        return {"different": different_options(Statements.of(options))}
    return {"started_ns": max(entry["started_ns"] for entry in said)}


def _in_group(group: ProcessGroup, *, owned: bool) -> tuple[Rendezvous, int, int]:
    return GroupRendezvous(group, owned=owned), group.rank, group.size


def _is_launched_by_mpi(request: ConnectRequest) -> bool:
    launched = request.launch is not None and request.launch.is_mpi
    return launched and request.init_method is None and request.store is None and load_backend("mpi").missing() is None


backend = NcclBackend()
