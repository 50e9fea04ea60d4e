"""MPI as a backend: whether it can be loaded, what can be wrong before it starts, and its start; see `connection`."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from importlib.util import find_spec
from typing import Any

from ...errors import BackendUnavailableError, LaunchError
from ...failures.connecting import Connecting, logger
from ...forks import in_forks, is_fork_of_rank
from ...host.host_group import HostGroup
from ...startup.backend import Backend, ConnectRequest
from ...startup.launch import child_of_rank, parent_rank
from ...startup.library_check import is_from_pypi, launcher_conflict, little_shared_memory

_NO_MPI4PY = (
    "mpi4py is not installed: load the site's MPI module and `pip install 'syncline-collectives[mpi]'`\n"
    "On a machine without an MPI, `pip install 'syncline-collectives[mpich]'` brings one along"
)
_NO_LIBRARY = (
    "mpi4py finds no MPI library: load the site's module (`module load openmpi`), or set MPI4PY_LIBMPI to its libmpi.so\n"
    "On a machine without an MPI, `pip install 'syncline-collectives[mpich]'` brings one along"
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
    """Ranks are the processes of MPI_COMM_WORLD, or of the communicator that the caller gives."""

    def missing(self) -> str | None:
        """Whether mpi4py is there, finds an MPI library, which it must load to know, and the launcher can start it."""
        if _parent_has_mpi or is_fork_of_rank():
            return _IN_FORK
        if find_spec("mpi4py") is None:
            return _NO_MPI4PY
        return _library_problem() or _conflict()

    def connect(self, request: ConnectRequest) -> HostGroup:
        """Start MPI if nobody has, and make a group of a duplicate of MPI_COMM_WORLD, or of the given communicator."""
        lack = self.missing()
        if lack is not None:
            kind = BackendUnavailableError if find_spec("mpi4py") is None or _library_problem() else LaunchError
            raise kind(f"backend 'mpi': {lack}")
        _check_init_method(request)
        parent = parent_rank(os.environ)
        if parent is not None:
            raise LaunchError(child_of_rank(None, parent))
        launch = request.launch
        with Connecting(request.timeout_s, request.stall_warning_s) as connecting:
            if launch is not None:
                connecting.set_place(launch.rank, launch.world_size)
            if launch is not None and launch.local_rank == 0:
                _warn_of_little_memory(launch.local_world_size or 1)
            _start(connecting)
            from .connection import connect  # now that an MPI library is known to be there

            return connect(request, connecting)


@functools.cache
def _library_problem() -> str | None:
    """Why mpi4py cannot load an MPI library, or None."""
    try:
        _load()
    except (ImportError, RuntimeError) as error:
        return f"{_NO_LIBRARY}. The loader said: {' '.join(str(error).split())}"
    return None


@functools.cache
def _conflict() -> str | None:
    """Why the launcher cannot start the library, or None; not asked once MPI runs."""
    from mpi4py import MPI

    if MPI.Is_initialized():
        return None
    vendor, version = MPI.get_vendor()
    return launcher_conflict(os.environ, vendor, version, is_from_pypi(vendor))


def _load() -> None:
    """Import mpi4py.MPI, which loads the library.

    By itself mpi4py starts MPI at the import. A library whose launcher is another MPI's ends the process there. So the library
    is asked first who it is, and started by `_start`. What the caller has told mpi4py (`mpi4py.rc`) holds all the same.
    """
    if "mpi4py.MPI" in sys.modules:
        return
    import mpi4py

    asked = mpi4py.rc.initialize, mpi4py.rc.finalize
    if mpi4py.rc.initialize in (True, "yes"):
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True if asked[1] is None else asked[1]  # None would be: as `initialize`
    try:
        import mpi4py.MPI
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = asked


def start_mpi(timeout_s: float) -> None:
    """Start MPI if nobody has, for those who use mpi4py without a group; `MPIBackend.missing` has found nothing missing."""
    with Connecting(timeout_s, 0) as connecting:
        _start(connecting)


def _warn_of_little_memory(local_size: int) -> None:
    from mpi4py import MPI

    warning = None if MPI.Is_initialized() else little_shared_memory(MPI.get_vendor()[0], local_size)
    if warning is not None:
        logger.warning("%s", warning)


def _start(connecting: Connecting) -> None:
    """Start MPI, which waits for all processes of the job, but not longer than `connecting` allows.

    mpi4py holds the interpreter's lock meanwhile, so that no other thread can say who waits, or end the wait. Called by ctypes,
    the library is waited for without that lock. What mpi4py does after the call is done here: MPI's errors are returned.
    """
    import mpi4py
    from mpi4py import MPI

    if MPI.Is_finalized():
        raise LaunchError(
            "MPI was finalized, and a process cannot start it again: call init_process_group before MPI.Finalize()"
        )
    if MPI.Is_initialized():
        return
    level = getattr(MPI, f"THREAD_{mpi4py.rc.thread_level.upper()}") if mpi4py.rc.threads else MPI.THREAD_SINGLE
    start = _function(MPI, "MPI_Init_thread")
    with connecting.step("MPI_Init: a process of the job has not started MPI"):
        if start is None or mpi4py.rc.errors != "exception":
            MPI.Init_thread(level)
            return
        status = start(None, None, level, ctypes.byref(ctypes.c_int()))
    if status != 0:
        raise BackendUnavailableError(f"backend 'mpi': MPI_Init_thread failed with the error code {status}")
    for communicator in (MPI.COMM_SELF, MPI.COMM_WORLD):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)


def _function(MPI: Any, name: str) -> Any:  # noqa: N803 - the module's name
    """A function of the library that mpi4py has loaded; None where the system does not find it."""
    try:
        return getattr(ctypes.CDLL(MPI.__file__), name)
    except (OSError, AttributeError):
        return None


def _check_init_method(request: ConnectRequest) -> None:
    if request.init_method not in (None, "mpi://", "env://"):
        raise LaunchError(
            f"init_method {request.init_method!r} says where the ranks meet, but the ranks of backend 'mpi' were connected by "
            "their launcher; leave init_method out, or choose backend 'gloo'"
        )
    if request.store is not None:
        raise LaunchError("a store was given, but the ranks of backend 'mpi' need none; leave it out, or choose backend 'gloo'")


backend = MPIBackend()
