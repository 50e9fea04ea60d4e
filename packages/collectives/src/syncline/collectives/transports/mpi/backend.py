"""The backend "mpi". `MPIBackend` checks the process, starts MPI, and then connects the ranks by the module `connection`."""

from __future__ import annotations

import os
import sys

from ...engine.host_group import HostGroup
from ...errors import BackendUnavailableError, LaunchError
from ...forks import in_forks, is_fork_of_rank
from ...health.connecting import Connecting, logger
from ...startup.backend import Backend, ConnectRequest
from ...startup.launch import child_of_rank, parent_rank
from ...startup.mpi_library import conflict_with_launcher, little_shared_memory, missing_library, start

_IN_FORK = (
    "this process is a fork of a rank, and MPI is that rank's alone; start it by 'spawn', or choose backend 'gloo' with a "
    "rank, a world_size and an init_method"
)
_parent_has_mpi = False


def _note_mpi_of_parent() -> None:
    global _parent_has_mpi
    mpi = sys.modules.get("mpi4py.MPI")
    _parent_has_mpi = _parent_has_mpi or (mpi is not None and bool(mpi.Is_initialized()))


in_forks(_note_mpi_of_parent)


class MPIBackend(Backend):
    """The backend "mpi". The ranks are the processes of MPI_COMM_WORLD, or of a communicator that the caller passes."""

    def missing(self) -> str | None:
        """Return an error text if this process cannot use MPI; else None. The method loads the MPI library to find out."""
        # A fork shares the parent's connections but not its threads, so MPI would hang in a fork.
        if _parent_has_mpi or is_fork_of_rank():
            return _IN_FORK
        return missing_library() or conflict_with_launcher()

    def connect(self, request: ConnectRequest) -> HostGroup:
        """Start MPI if necessary, and make a group over a duplicate of MPI_COMM_WORLD or of the caller's communicator."""
        lack = self.missing()
        if lack is not None:
            # Only an installation can mend a missing library; the other problems need another start of the job.
            kind = BackendUnavailableError if missing_library() else LaunchError
            raise kind(f"backend 'mpi': {lack}")
        _check_init_method(request)
        # A child process of a rank has the rank's environment, but MPI knows only the rank.
        parent = parent_rank(os.environ)
        if parent is not None:
            raise LaunchError(child_of_rank(None, parent))
        launch = request.launch
        with Connecting(request.timeout_s, request.stall_warning_s) as connecting:
            if launch is not None:
                connecting.set_place(launch.rank, launch.world_size)
            # Warn once for each node, not once for each rank.
            if launch is not None and launch.local_rank == 0:
                _warn_of_little_memory(launch.local_world_size or 1)
            # From here on, `connecting` watches the wait for the other ranks, and ends the wait if a rank does not come.
            start(connecting)
            from .connection import connect  # imports mpi4py.MPI, which needs the MPI library that `missing` has found

            return connect(request, connecting)


def _warn_of_little_memory(local_size: int) -> None:
    from mpi4py import MPI

    # If MPI runs already, it has its memory already, so there is nothing to warn of.
    warning = None if MPI.Is_initialized() else little_shared_memory(MPI.get_vendor()[0], local_size)
    if warning is not None:
        logger.warning("%s", warning)


def _check_init_method(request: ConnectRequest) -> None:
    # "mpi://" and "env://" say that the launcher connects the ranks. This is true for MPI.
    if request.init_method not in (None, "mpi://", "env://"):
        raise LaunchError(
            f"init_method {request.init_method!r} says where the ranks meet, but the ranks of backend 'mpi' were connected by "
            "their launcher; leave init_method out, or choose backend 'gloo'"
        )
    if request.store is not None:
        raise LaunchError("a store was given, but the ranks of backend 'mpi' need none; leave it out, or choose backend 'gloo'")


backend = MPIBackend()
