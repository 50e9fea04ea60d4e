"""Who am I: what the launcher has put into the environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .errors import LaunchError


@dataclass(frozen=True)
class Launch:
    """The place of this process in its job, as its launcher tells it.

    Attributes:
        launcher: in words, such as "Open MPI".
        is_mpi: whether the launcher starts MPI programs (mpiexec, mpirun, srun), so that MPI can carry the job.
        rank: 0 to world_size - 1.
        world_size: number of processes of the job.
        local_rank: rank among the processes of this node, or None if the launcher does not say.
        local_world_size: number of processes on this node, or None.
    """

    launcher: str
    is_mpi: bool
    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None


@dataclass(frozen=True)
class _Dialect:
    """The variables in which one launcher speaks. A launcher is recognised when the first two are set."""

    launcher: str
    is_mpi: bool
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    also: str | None = None


# Note [Order of launchers]
# ~~~~~~~~~~~~~~~~~~~~~~~~~
# A process started by an mpiexec inside a Slurm allocation sees Slurm's variables too, so the innermost launcher comes
# first: torchrun starts processes under anything, then the MPI launchers, then Slurm. Slurm counts only where srun started
# the process (it has a step id that is a number); a batch script sees SLURM_PROCID=0 and all of SLURM_NTASKS, but is alone.
_DIALECTS = (
    _Dialect("torchrun", False, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", also="MASTER_ADDR"),
    _Dialect(
        "Open MPI",
        True,
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Dialect("PMI (MPICH, Intel MPI)", True, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    _Dialect("Slurm", True, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", also="SLURM_STEP_ID"),
)


def detect_launch(environ: Mapping[str, str]) -> Launch | None:
    """Read what the launcher put into the environment; None if nothing launched this process.

    Raises:
        LaunchError: a variable that should hold a number does not, or the rank is not below the world size.
    """
    for dialect in _DIALECTS:
        if dialect.rank in environ and dialect.world_size in environ and _is_spoken(dialect, environ):
            return _read(dialect, environ)
    return None


def _is_spoken(dialect: _Dialect, environ: Mapping[str, str]) -> bool:
    if dialect.launcher == "Slurm":
        return environ.get("SLURM_STEP_ID", "").isdigit()
    return dialect.also is None or dialect.also in environ


def _read(dialect: _Dialect, environ: Mapping[str, str]) -> Launch:
    rank = _number(dialect.rank, environ)
    world_size = _number(dialect.world_size, environ)
    if not 0 <= rank < world_size:
        raise LaunchError(
            f"{dialect.launcher} set {dialect.rank}={rank} and {dialect.world_size}={world_size}; expected a rank below the "
            "world size. Are these variables left over from another job? Unset them, or launch anew"
        )
    return Launch(
        dialect.launcher,
        dialect.is_mpi,
        rank,
        world_size,
        _number(dialect.local_rank, environ) if dialect.local_rank in environ else None,
        _number(dialect.local_world_size, environ) if dialect.local_world_size in environ else None,
    )


def _number(variable: str, environ: Mapping[str, str]) -> int:
    try:
        return int(environ[variable])
    except ValueError:
        raise LaunchError(f"expected a whole number in {variable}, found {environ[variable]!r}") from None
