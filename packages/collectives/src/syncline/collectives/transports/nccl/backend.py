"""The backend "nccl", which connects the ranks of a job over NCCL."""

from __future__ import annotations

from ...engine.engine_group import EngineGroup
from ...errors import BackendUnavailableError
from ...startup.backend import Backend, ConnectRequest
from ...startup.registry import load_backend
from ...startup.rendezvous import keys_of_connection, rendezvous
from ..cuda import CudaRuntime
from . import library
from .connections import Connector
from .group import NcclGroup
from .rendezvous import GroupRendezvous, Rendezvous, StoreRendezvous


class NcclBackend(Backend):
    """The backend "nccl", for ranks with one GPU each. NCCL starts at the first collective of a group."""

    @property
    def meets_in_store(self) -> bool:
        """True, because the ranks may meet in a store."""
        return True

    def missing(self) -> str | None:
        """Return an error text if the backend cannot be used, for example because CuPy is missing. Otherwise return None."""
        return library.problem()

    def connect(self, request: ConnectRequest) -> NcclGroup:
        """Make a group. First the ranks find each other through `request.host_group`, through MPI, or through a store."""
        lack = self.missing()
        if lack is not None:
            raise BackendUnavailableError(f"backend 'nccl': {lack}")
        meeting, rank, size = _meeting(request)
        connector = Connector(library.load(), CudaRuntime(), meeting, range(size), rank, request.group_name)
        group = NcclGroup(
            connector, timeout_s=request.timeout_s, reproducible=request.reproducible, check_calls=request.check_calls
        )
        host = meeting.group
        # The ranks met in a store, so nobody has compared their options yet.
        if host is None:
            group.start({"check_calls": request.check_calls, "reproducible": request.reproducible})
        elif isinstance(host, EngineGroup):
            group.report_to(host.reporter)  # the host group has compared the options already
        return group


def _meeting(request: ConnectRequest) -> tuple[Rendezvous, int, int]:
    host = request.host_group
    # The caller owns this group and closes it.
    if host is not None:
        return GroupRendezvous(host, owned=False), host.rank, host.size
    launched = request.launch is not None and request.launch.is_mpi
    # MPI needs no address and no store. But if the user names a place, the ranks meet there.
    if launched and request.init_method is None and request.store is None and load_backend("mpi").missing() is None:
        host = load_backend("mpi").connect(request)
        return GroupRendezvous(host, owned=True), host.rank, host.size
    store, rank, size = rendezvous(request)
    return StoreRendezvous(keys_of_connection(store, "nccl", rank)), rank, size


backend = NcclBackend()
