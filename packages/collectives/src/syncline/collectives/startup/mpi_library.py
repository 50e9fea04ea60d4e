"""Find out whether mpi4py has an MPI library that this launcher can start, and start it. Needs no torch: see `cli.run`."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from importlib.util import find_spec
from typing import Any

from ..errors import BackendUnavailableError, LaunchError
from ..health.connecting import Connecting
from .library_check import is_from_pypi, launcher_conflict

_NO_MPI4PY = (
    "mpi4py is not installed: load the site's MPI module and `pip install mpi4py`\n"
    "On a machine without an MPI, `pip install mpi4py mpich` brings one along"
)
_NO_LIBRARY = (
    "mpi4py finds no MPI library: load the site's module (`module load openmpi`), or set MPI4PY_LIBMPI to its libmpi.so\n"
    "On a machine without an MPI, `pip install mpi4py mpich` brings one along"
)


def missing_library() -> str | None:
    """Why mpi4py cannot load an MPI library; None if it can. Loads the library, but does not start it."""
    return _NO_MPI4PY if find_spec("mpi4py") is None else _library_problem()


@functools.cache
def _library_problem() -> str | None:
    try:
        _load()
    except (ImportError, RuntimeError) as error:
        return f"{_NO_LIBRARY}. The loader said: {' '.join(str(error).split())}"
    return None


@functools.cache
def conflict_with_launcher() -> str | None:
    """Why the launcher cannot start the library; None if it can, or if MPI runs already."""
    from mpi4py import MPI

    if MPI.Is_initialized():
        return None
    vendor, version = MPI.get_vendor()
    if launcher_conflict(os.environ, vendor, version, is_from_pypi=True) is None:
        return None  # no conflict for any build. Asking whether pip installed it takes longer than starting MPI on one node
    return launcher_conflict(os.environ, vendor, version, is_from_pypi(vendor))


def _load() -> None:
    """Import mpi4py.MPI, which loads the library, without starting MPI.

    By default mpi4py starts MPI at the import. If the launcher belongs to another MPI, the library then ends the process. So we
    first find out which library it is. `start` starts it later. The caller's own settings in `mpi4py.rc` are respected.
    """
    if "mpi4py.MPI" in sys.modules:
        return
    import mpi4py

    asked = mpi4py.rc.initialize, mpi4py.rc.finalize
    if mpi4py.rc.initialize in (True, "yes"):
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True if asked[1] is None else asked[1]  # None means: as `initialize`, which is False now
    try:
        import mpi4py.MPI
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = asked


def start_mpi(timeout_s: float) -> None:
    """Start MPI if it does not run, for code that uses mpi4py without a group. First check that MPI fits the launcher."""
    with Connecting(timeout_s, 0) as connecting:
        start(connecting)


def start(connecting: Connecting) -> None:
    """Start MPI, which waits for all processes of the job, but not longer than `connecting` allows.

    mpi4py would hold the GIL during the call, so no other thread could log the wait or end it. A call with ctypes releases the
    GIL. Then, as mpi4py does after its own call, set the error handlers so that MPI returns its errors.
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
    init = _function(MPI, "MPI_Init_thread")
    with connecting.step("MPI_Init: a process of the job has not started MPI"):
        # Without the function, or with other error handlers than those set below, mpi4py must do it.
        if init is None or mpi4py.rc.errors != "exception":
            MPI.Init_thread(level)
            return
        status = init(None, None, level, ctypes.byref(ctypes.c_int()))
    # A call with ctypes raises nothing, so look at the status.
    if status != 0:
        raise BackendUnavailableError(f"backend 'mpi': MPI_Init_thread failed with the error code {status}")
    for communicator in (MPI.COMM_SELF, MPI.COMM_WORLD):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)


def _function(MPI: Any, name: str) -> Any:  # noqa: N803 - the module's name
    """A function of the MPI library that mpi4py has loaded; None if the system does not find it."""
    try:
        return getattr(ctypes.CDLL(MPI.__file__), name)
    except (OSError, AttributeError):
        return None
