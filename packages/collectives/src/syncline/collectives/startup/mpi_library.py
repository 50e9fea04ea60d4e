"""Find out whether mpi4py has an MPI library that this launcher can start, start the library, and abort the MPI job.

`syncline run` uses this module, so it must not import torch.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..errors import BackendUnavailableError, LaunchError
from ..health.connecting import Connecting
from .launch import HYDRA, OPEN_MPI, SRUN_PMI2, SRUN_PMIX, process_manager
from .uncaught_errors import say

# mpiexec reads the output of the ranks with a delay. If the job is aborted, output that is not read yet is lost (MPICH 5.0).
_FORWARDING_S = 0.3
_NO_MPI4PY = (
    "mpi4py is not installed: load the site's MPI module and `pip install mpi4py`\n"
    "On a machine without an MPI, `pip install mpi4py mpich` brings one along"
)
_NO_LIBRARY = (
    "mpi4py finds no MPI library: load the site's module (`module load openmpi`), or set MPI4PY_LIBMPI to its libmpi.so\n"
    "On a machine without an MPI, `pip install mpi4py mpich` brings one along"
)


def missing_library() -> str | None:
    """Load mpi4py's MPI library without starting MPI. Return None, or a text that says why the library cannot be loaded."""
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
    """Return a text that says why the launcher cannot start mpi4py's MPI library; None if it can, or if MPI has started."""
    from mpi4py import MPI

    if MPI.Is_initialized():
        return None
    vendor, version = MPI.get_vendor()
    if launcher_conflict(os.environ, vendor, version, is_from_pypi=True) is None:
        return None  # no build has a conflict, so do not ask whether pip installed the library: `is_from_pypi` is slow
    return launcher_conflict(os.environ, vendor, version, is_from_pypi(vendor))


def _load() -> None:
    """Import mpi4py.MPI, which loads the library, without starting MPI. `start` starts MPI later."""
    if "mpi4py.MPI" in sys.modules:
        return
    import mpi4py

    # By default mpi4py starts MPI at the import. If the launcher belongs to another MPI, the library would then end the
    # process, before the checks of this module can run.
    asked = mpi4py.rc.initialize, mpi4py.rc.finalize
    if mpi4py.rc.initialize in (True, "yes"):
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = True if asked[1] is None else asked[1]  # None would mean the value of `initialize`, now False
    try:
        import mpi4py.MPI
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = asked


def start_mpi(timeout_s: float) -> None:
    """Start MPI if MPI does not run yet. Call this function before you use mpi4py directly, and not through a `ProcessGroup`.

    This function does not check whether MPI fits the launcher; see `conflict_with_launcher`.
    """
    with Connecting(timeout_s, 0) as connecting:
        start(connecting)


def start(connecting: Connecting) -> None:
    """Start MPI, and wait until all processes of the job have started MPI. Other Python threads run while this thread waits.

    Args:
        connecting: logs a long wait. If the wait exceeds its time limit, the monitor ends this process.

    Raises:
        LaunchError: MPI has been finalized in this process.
        BackendUnavailableError: MPI returned an error.
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
    with connecting.step("MPI_Init: a process of the job has not started MPI"), _sighup_kept():
        # mpi4py starts MPI if the function was not found, or if the user wants other error handlers than those set below.
        if init is None or mpi4py.rc.errors != "exception":
            MPI.Init_thread(level)
            return
        # mpi4py would hold the GIL while MPI starts, so no other thread could log the wait or end it. ctypes releases the GIL.
        status = init(None, None, level, ctypes.byref(ctypes.c_int()))
    # A call with ctypes raises no exception, so look at the status.
    if status != 0:
        raise BackendUnavailableError(f"backend 'mpi': MPI_Init_thread failed with the error code {status}")
    # Set the same error handlers as mpi4py, so that MPI returns its errors.
    for communicator in (MPI.COMM_SELF, MPI.COMM_WORLD):
        communicator.Set_errhandler(MPI.ERRORS_RETURN)


@contextmanager
def _sighup_kept() -> Iterator[None]:
    """A context: at its end, restore the handler of SIGHUP. UCX, which many MPI libraries use, replaces this handler."""
    yield
    # Only the main thread can set handlers. If the user has named a signal for UCX, keep the handler of UCX.
    if threading.current_thread() is threading.main_thread() and "UCX_DEBUG_SIGNO" not in os.environ:
        handler = signal.getsignal(signal.SIGHUP)
        if handler is not None:
            signal.signal(signal.SIGHUP, handler)


def _function(MPI: Any, name: str) -> Any:  # noqa: N803 - the module's name
    try:
        return getattr(ctypes.CDLL(MPI.__file__), name)
    except (OSError, AttributeError):
        return None


# The conflicts in `_REFUSED` are certain only for builds from PyPI, and for Open MPI from version 5 on. A site may build its
# own MPI to match its launcher.
_DISTRIBUTIONS = {"MPICH": "mpich", "Open MPI": "openmpi", "Intel MPI": "impi-rt"}
_USE_ITS_OWN = "start the job with {vendor}'s mpiexec, or set MPI4PY_LIBMPI to the launcher's libmpi.so"
_REFUSED = {
    ("MPICH", SRUN_PMIX): "start it with `srun --mpi=pmi2`",
    ("Open MPI", SRUN_PMI2): "start it with `srun --mpi=pmix`",
    ("MPICH", OPEN_MPI): _USE_ITS_OWN,
    ("Intel MPI", OPEN_MPI): _USE_ITS_OWN,
    ("Open MPI", HYDRA): _USE_ITS_OWN,
}

# Note [Addresses through Slurm's PMI-2]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Ranks of several nodes exchange their addresses through Slurm. Over UCX (the default of MPICH from PyPI), each rank sends nine
# pieces of about 700 characters. The pieces contain its address, then random contents of its memory. The encoding shortens
# zeros, so the length differs from run to run. Slurm truncates requests that are too long ("value not properly terminated in
# client request"), and MPICH hangs, aborts, or goes on. Over OFI a rank sends 86 characters. We saw this with MPICH 5.0.2 and
# Slurm 22.05.8; `mpiexec -verbose` shows the requests.
NETMOD = "MPIR_CVAR_CH4_NETMOD"
# MPICH 5.0.2 with 2 ranks ends with SIGBUS if /dev/shm has 2 MiB, and with SIGSEGV if it has 16 MiB. With 32 MiB it runs.
LEAST_SHM_BYTES = 64 << 20


def launcher_conflict(environ: Mapping[str, str], vendor: str, version: tuple[int, ...], is_from_pypi: bool) -> str | None:
    """Return a text that says why the launcher cannot start this MPI library, and the remedy; else None. A pure function.

    `vendor` and `version` are from `MPI.get_vendor`. `is_from_pypi` says whether pip installed the library.
    """
    manager = process_manager(environ)
    is_certain = is_from_pypi or (vendor == "Open MPI" and version >= (5,))  # every build of Open MPI 5 has only PMIx
    # A site may have built its MPI for this launcher, so only certain conflicts are errors.
    if manager is None or not is_certain:
        return None
    remedy = _REFUSED.get((vendor, manager))
    if remedy is not None:
        library = f"{vendor} from PyPI" if is_from_pypi else f"{vendor} {'.'.join(map(str, version))}"
        return (
            f"{manager} started this process, but does not work with {library}: {remedy.format(vendor=vendor)}\n"
            "Or use the site's MPI: load its module, or set MPI4PY_LIBMPI to its libmpi.so. In a batch script its own mpirun "
            "can take the place of srun"
        )
    nodes = environ.get("SLURM_STEP_NUM_NODES", "")
    # Only MPICH over UCX on several nodes has the problem; see Note [Addresses through Slurm's PMI-2].
    if manager != SRUN_PMI2 or vendor != "MPICH" or nodes in ("", "1") or environ.get(NETMOD) == "ofi":
        return None
    return (
        f"{manager} started {vendor} from PyPI on {nodes} nodes: the ranks' addresses can be too long for Slurm. "
        f"`export {NETMOD}=ofi` before srun\n"
        "Over UCX, the address of a rank can be longer than Slurm's PMI-2 allows. MPICH then hangs or aborts in some runs. "
        "Over OFI the addresses are short"
    )


def is_from_pypi(vendor: str) -> bool:
    """Return whether pip installed the MPI library that this process has loaded."""
    from importlib.metadata import PackageNotFoundError, distribution  # here, because this import is slow

    try:
        distribution(_DISTRIBUTIONS.get(vendor, ""))
        maps = Path("/proc/self/maps").read_text()
    except (PackageNotFoundError, ValueError, OSError):
        return False
    library = next((line.split()[-1] for line in maps.splitlines() if "/libmpi" in line), "")
    if not library:  # no MPI library is loaded
        return False
    return "/site-packages/" in library or Path(library).resolve().is_relative_to(Path(sys.prefix).resolve())


def other_mpi(launcher: str, told: int, library: str, found: int) -> str:
    """Return the error message for a launcher and a library that see different numbers of processes. A pure function."""
    unset = "-u SLURM_STEP_ID" if launcher == "Slurm" else "-u PMI_SIZE -u OMPI_COMM_WORLD_SIZE"
    lines = [
        f"{launcher} started {told} rank(s), but {library} sees {found}: launcher and library belong to different MPIs, or "
        "this process was started by hand inside a job",
        "- Different MPIs: use that library's mpiexec, or set MPI4PY_LIBMPI to the launcher's libmpi.so.",
        "- By hand, in a shell that srun --pty or mpiexec has opened: start all ranks with srun or mpiexec. For a process that "
        f"is alone unset what makes it one of several: `env {unset} python ...`",
    ]
    if launcher == "Slurm":
        lines.append(
            "- srun connects MPI's ranks with --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH, Intel MPI), not with --mpi=none"
        )
    return "\n".join(lines)


def little_shared_memory(vendor: str, local_size: int, folder: str = "/dev/shm") -> str | None:
    """Return a warning if /dev/shm may be too small for MPICH to start; else None."""
    try:
        total_bytes = shutil.disk_usage(folder)[0]
    except OSError:
        # If there is no such folder, nothing is known, so do not warn.
        return None
    if vendor not in ("MPICH", "Intel MPI") or local_size < 2 or total_bytes >= LEAST_SHM_BYTES:
        return None
    return (
        f"/dev/shm has {total_bytes >> 20} MiB; with less than {LEAST_SHM_BYTES >> 20} MiB {vendor} may crash while it starts "
        "(signal 7 or 11): give the container more, such as `docker run --shm-size=1g`"
    )


def abort_job(status: int) -> None:
    """Wait 0.3 seconds, so that mpiexec can read the output of this rank. Then end all ranks of the MPI job."""
    from mpi4py import MPI

    try:
        time.sleep(_FORWARDING_S)
    # End the job also if a second Ctrl-C interrupts the wait: the other ranks would hang.
    finally:
        MPI.COMM_WORLD.Abort(status)


@contextmanager
def ending_job_if_interrupted(who: Callable[[], str]) -> Iterator[None]:
    """Return a context manager that ends the job if Ctrl-C interrupts its body.

    The body waits for the other ranks at exit. Python and MPI ignore errors of the functions that they call at exit. So after
    Ctrl-C, this rank would end MPI without the other ranks. They would wait for ever, or the launcher would kill them, and end
    with status 0.

    Args:
        who: describes this rank, for the message.
    """
    try:
        yield
    except Exception:  # such as an error of MPI: the rank has lost another rank, and those that are left may go on (ULFM)
        raise
    # Ctrl-C, or `sys.exit` in a signal handler of the program.
    except BaseException as error:  # noqa: BLE001 - the job ends
        try:
            say(f"{who()} was interrupted while it waited for the other ranks at exit, and ends the job: {error!r}")
        finally:  # also after a second Ctrl-C
            abort_job(130 if isinstance(error, KeyboardInterrupt) else 1)


_CUDA_TRIAL_S = 120.0

# The launcher's variables begin with these prefixes. The child must not get these variables: with them it would join the job.
_LAUNCHER_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "PMI2_", "PRTE_", "SLURM_", "HYDRA_", "HYDI_", "MPI_LOCAL", "TORCHELASTIC_")
# Users choose MPI's transport with variables of this prefix, so the child must get these variables. But the launcher sets some
# variables of this prefix, too. The child must not get the launcher's variables.
_SETTINGS_PREFIX = "OMPI_MCA_"
_LAUNCHER_SETTINGS = ("ess", "orte_", "pmix", "plm", "rmaps", "ras", "initial_wdir")

_CHILD = """
import torch
from mpi4py import MPI
sent = torch.arange(4096, dtype=torch.float32, device="cuda")
received = torch.zeros_like(sent)
torch.cuda.synchronize()
there, here = (MPI.buffer.fromaddress(t.data_ptr(), t.nbytes) for t in (sent, received))
MPI.COMM_SELF.Sendrecv((there, MPI.BYTE), 0, 0, (here, MPI.BYTE), 0, 0)
torch.cuda.synchronize()
assert torch.equal(sent, received), "the data did not arrive"
MPI.COMM_SELF.Allreduce(MPI.IN_PLACE, (here, 4096, MPI.FLOAT))
torch.cuda.synchronize()
assert torch.equal(sent, received), "the reduction is wrong"
print("aware")
"""


@dataclass(frozen=True)
class CudaAwareness:
    """Whether MPI accepts CUDA memory, and a sentence that gives the reason for this answer."""

    is_aware: bool
    in_words: str


def try_cuda_awareness(
    environ: Mapping[str, str] = os.environ, child: str = _CHILD, timeout_s: float = _CUDA_TRIAL_S
) -> CudaAwareness:
    """Find out whether MPI accepts CUDA memory. A child process (an MPI job of one rank) tries this, because MPI may crash."""
    own = {name: value for name, value in environ.items() if not _is_the_launchers(name)}
    try:
        done = subprocess.run([sys.executable, "-c", child], env=own, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return CudaAwareness(False, f"no: a transfer of CUDA memory by MPI did not end within {timeout_s:g} s")
    if done.returncode == 0 and "aware" in done.stdout:
        return CudaAwareness(True, "yes: MPI moved and reduced CUDA memory correctly")
    if done.returncode < 0:
        return CudaAwareness(False, f"no: MPI crashed on CUDA memory (signal {-done.returncode})")
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return CudaAwareness(False, f"no: MPI did not move CUDA memory ({last})")


def _is_the_launchers(name: str) -> bool:
    if name.startswith(_SETTINGS_PREFIX):
        return name.removeprefix(_SETTINGS_PREFIX).startswith(_LAUNCHER_SETTINGS)
    return name.startswith(_LAUNCHER_PREFIXES)
