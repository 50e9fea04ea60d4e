"""Which MPI libraries srun can start: the process management interface that it offers, against those that a library speaks."""

from __future__ import annotations

from collections.abc import Mapping

PMIX, PMI2 = "pmix", "pmi2"

# Only builds that are known for certain: those on PyPI. A site builds its own for its Slurm.
_REFUSED = {
    ("MPICH", PMIX): "PMI-1 and PMI-2, not PMIx; start it with `srun --mpi=pmi2`",
    ("Open MPI", PMI2): "PMIx only; start it with `srun --mpi=pmix`",
}


def interface_of_srun(environ: Mapping[str, str]) -> str | None:
    """The interface that Slurm itself offers to this process, `PMIX` or `PMI2`; None where it offers none.

    A pure function. An mpirun inside a step, or one that starts its daemons by srun, offers an interface of its own, while
    Slurm's variables stay visible.
    """
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return None
    if environ.get("PMIX_NAMESPACE", "").startswith("slurm.pmix."):
        return None if "PMI_RANK" in environ else PMIX
    step = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    return PMI2 if environ.get("PMI_JOBID") == step else None


def srun_conflict(interface: str | None, vendor: str, is_from_pypi: bool) -> str | None:
    """Why srun cannot start that MPI library, with the remedy; None if nothing is known to keep it. A pure function.

    Args:
        interface: see `interface_of_srun`.
        vendor: the library's name, as `MPI.get_vendor` says it, such as "Open MPI".
        is_from_pypi: whether pip installed it, and not the site.
    """
    speaks = _REFUSED.get((vendor, interface or ""))
    if speaks is None or not is_from_pypi:
        return None
    return (
        f"srun --mpi={interface} started this process, but {vendor} from PyPI speaks {speaks}, or use the site's MPI (load its "
        "module, or set MPI4PY_LIBMPI to its libmpi.so), or call `mpirun` in the batch script instead of srun"
    )


# Note [Addresses through Slurm's PMI-2]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# Ranks of several nodes tell one another their addresses through Slurm. Over UCX, which MPICH from PyPI takes by itself, each
# rank tells nine pieces of some 700 characters: its address, and then whatever its memory holds, in a notation that is shorter
# the more of that is zeros. So the length differs from run to run. Slurm cuts requests that are too long ("value not properly
# terminated in client request"), and MPICH hangs, aborts, or goes on. Over OFI a rank tells 86 characters. Seen with MPICH
# 5.0.2 (the requests by `mpiexec -verbose`) and Slurm 22.05.8.
NETMOD = "MPIR_CVAR_CH4_NETMOD"


def pmi2_conflict(interface: str | None, vendor: str, nodes: int, netmod: str | None) -> str | None:
    """Why the addresses of MPICH's ranks might not get through Slurm, with the remedy, or None. A pure function.

    See Note [Addresses through Slurm's PMI-2].

    Args:
        interface: see `interface_of_srun`.
        vendor: the library's name, as `MPI.get_vendor` says it.
        nodes: the number of nodes of the step.
        netmod: the value of MPIR_CVAR_CH4_NETMOD, or None.
    """
    if interface != PMI2 or vendor != "MPICH" or nodes < 2 or netmod == "ofi":
        return None
    return (
        f"srun --mpi=pmi2 started {vendor} from PyPI on {nodes} nodes: what its ranks tell one another over UCX can be longer "
        "than Slurm's PMI-2 lets through, and MPICH then hangs or aborts, in some runs and not in others. Let it communicate "
        f"over OFI: `export {NETMOD}=ofi` before srun"
    )


def srun_hint(launcher: str) -> str:
    """What to add where ranks that srun started do not find one another. A pure function."""
    if launcher != "Slurm":
        return ""
    return "; srun connects MPI's ranks with --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH, Intel MPI), and not with --mpi=none"
