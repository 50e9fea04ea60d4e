"""MPI as a backend: whether it can be loaded, and what can be wrong before that; see `connection`."""

from __future__ import annotations

import faulthandler
import functools
import os
import sys
from importlib.util import find_spec

from ...errors import BackendUnavailableError, LaunchError
from ...forks import in_forks, is_fork_of_rank
from ...host.host_group import HostGroup
from ...startup.backend import Backend, ConnectRequest
from ...startup.launch import detect_launch
from ...startup.srun_check import srun_problem

_START_S = 300.0

_NO_MPI4PY = (
    "mpi4py is not installed; on a cluster that has an MPI, load its module and run `pip install 'syncline-collectives[mpi]'`; "
    "elsewhere `pip install 'syncline-collectives[mpich]'` brings an MPI along"
)
_NO_LIBRARY = (
    "mpi4py finds no MPI library; on a cluster, load the site's module first (such as `module load openmpi`) or set "
    "MPI4PY_LIBMPI to its libmpi.so; elsewhere `pip install 'syncline-collectives[mpich]'` brings one along"
)

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
    """Ranks are the processes of MPI_COMM_WORLD."""

    def missing(self) -> str | None:
        """Whether mpi4py is there and finds an MPI library, which it must load to know."""
        if _parent_has_mpi or is_fork_of_rank():
            return _IN_FORK
        if find_spec("mpi4py") is None:
            return _NO_MPI4PY
        return srun_problem() or _library_problem()

    def connect(self, request: ConnectRequest) -> HostGroup:
        """Start MPI if nobody has, and make a group of a duplicate of MPI_COMM_WORLD."""
        lack = self.missing()
        if lack is not None:
            kind = BackendUnavailableError if srun_problem() is None else LaunchError
            raise kind(f"backend 'mpi': {lack}")
        _check_init_method(request)
        from .connection import connect  # now that an MPI library is known to be there

        return connect(request)


@functools.cache
def _library_problem() -> str | None:
    """Why mpi4py cannot load an MPI library, or None. Loading it starts MPI, unless the caller has told mpi4py not to."""
    try:
        _start_mpi_together_with_all_ranks()
    except (ImportError, RuntimeError) as error:
        return f"{_NO_LIBRARY} (the loader said: {' '.join(str(error).split())})"
    return None


def _start_mpi_together_with_all_ranks() -> None:
    """Import mpi4py.MPI, which waits for all ranks of the job.

    A rank that died before it came here would be waited for without end (MPICH's mpiexec does not end the job), and no Python
    code runs meanwhile. So after `_START_S` seconds faulthandler prints this stack, whose names say what it waits for, and ends
    this process, which ends the job.
    """
    waits_for_others = _was_launched()
    if waits_for_others:
        faulthandler.dump_traceback_later(_START_S, exit=True)
    try:
        import mpi4py.MPI  # noqa: F401
    finally:
        if waits_for_others:
            faulthandler.cancel_dump_traceback_later()


def _was_launched() -> bool:
    try:
        return detect_launch(os.environ) is not None
    except LaunchError:  # a launcher or two; `connect` is never reached then
        return True


def _check_init_method(request: ConnectRequest) -> None:
    if request.init_method not in (None, "mpi://", "env://"):
        raise LaunchError(
            f"init_method {request.init_method!r} says where the ranks meet, but the ranks of backend 'mpi' were connected by "
            "their launcher; leave init_method out, or choose backend 'gloo'"
        )
    if request.store is not None:
        raise LaunchError("a store was given, but the ranks of backend 'mpi' need none; leave it out, or choose backend 'gloo'")


backend = MPIBackend()
