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


def srun_hint(launcher: str) -> str:
    """What to add where ranks that srun started do not find one another. A pure function."""
    if launcher != "Slurm":
        return ""
    return "; srun connects MPI's ranks with --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH, Intel MPI), and not with --mpi=none"
