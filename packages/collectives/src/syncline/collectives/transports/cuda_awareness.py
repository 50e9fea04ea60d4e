"""Find out whether this MPI takes CUDA memory. A child process tries it: an MPI that cannot take CUDA memory may crash."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

TIMEOUT_S = 120.0

# The launcher's variables begin with these prefixes. The child does not get them: with them it would join the job.
_LAUNCHER_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "PMI2_", "PRTE_", "SLURM_", "HYDRA_", "HYDI_", "MPI_LOCAL", "TORCHELASTIC_")
# Users choose MPI's transport with variables of this prefix, so the child must get them, except those that the launcher sets.
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
    """Whether MPI takes CUDA memory, and a sentence that says how it was found out."""

    is_aware: bool
    in_words: str


def try_cuda_awareness(
    environ: Mapping[str, str] = os.environ, child: str = _CHILD, timeout_s: float = TIMEOUT_S
) -> CudaAwareness:
    """Find out whether MPI takes CUDA memory: a child process of one rank transfers and reduces such memory by MPI."""
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
