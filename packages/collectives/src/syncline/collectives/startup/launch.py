"""Who am I: what the launcher has put into the environment, and what the caller said about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import InvalidArgumentError, LaunchError

INIT_METHODS = {
    "mpi": "the ranks of the MPI job, without a port or a file; the same as backend 'mpi'",
    "env": "MASTER_ADDR and MASTER_PORT in the environment",
    "file": "a folder on a file system that all ranks see",
    "tcp": "rank 0's host and port, and a secret",
}


@dataclass(frozen=True)
class Launch:
    """The place of this process in its job, as its launcher tells it.

    Attributes:
        launcher: in words, such as "Open MPI".
        is_mpi: whether the launcher starts MPI programs (mpiexec, mpirun, srun), so that MPI can carry the job.
        rank: 0 to world_size - 1.
        world_size: number of processes of the job, or None if the launcher does not say (PMIx alone); MPI knows it.
        local_rank: rank among the processes of this node, or None if the launcher does not say. Only to be shown: see
            `placement` for what the communicator knows.
        local_world_size: number of processes on this node, or None. Only to be shown, too.
    """

    launcher: str
    is_mpi: bool
    rank: int
    world_size: int | None
    local_rank: int | None = None
    local_world_size: int | None = None

    def least_world_size(self) -> int:
        """The number of processes, or as many as there must at least be."""
        return self.rank + 1 if self.world_size is None else self.world_size


@dataclass(frozen=True)
class _LauncherEnv:
    """The variables in which one launcher speaks. It is recognised when `rank` and `also` (and `world_size`) are set."""

    launcher: str
    is_mpi: bool
    rank: str
    world_size: str | None
    local_rank: str
    local_world_size: str
    also: str | None = None


# Note [Order of launchers]
# ~~~~~~~~~~~~~~~~~~~~~~~~~
# Launchers nest, and the variables of the outer ones stay visible inside: sbatch starts mpirun, which starts torchrun, which
# starts Python. The innermost speaks for this process. From the inside outwards:
#
# 1. torchrun. TORCHELASTIC_RUN_ID is its signature. It may run under anything, as one process per node of an MPI job whose
#    own numbers count nodes: no contradiction.
# 2. Open MPI and PMI (MPICH's Hydra, Intel MPI, Cray). If both speak, one is inside the other and nothing says which.
# 3. Slurm, where srun started the process (it has a step id that is a number); a batch script sees SLURM_PROCID=0 and all
#    of SLURM_NTASKS, but is alone. An mpirun of Open MPI starts its daemons by srun, so inside 2 Slurm's numbers are theirs.
# 4. PMIx alone (prterun, and other launchers that only speak PMIx), which says a rank but no size. Where it comes with Open
#    MPI or srun it says the same as they do.
# 5. RANK, WORLD_SIZE and MASTER_ADDR without torchrun's signature: written by hand, by a batch script or by Kubernetes.
#
# A contradiction is two sources that both mean *this* process and differ: Open MPI and PMI, or one of 2, 3, 4 and the pair
# RANK and WORLD_SIZE by hand, which many scripts copy from MPI's or Slurm's variables and which then agree. A stale pair,
# from a shell profile or a container image, would give the wrong rank to half of a program; so it is an error, not a
# preference.
_TORCHRUN = _LauncherEnv("torchrun", False, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", also="TORCHELASTIC_RUN_ID")
_OPEN_MPI = _LauncherEnv(
    "Open MPI",
    True,
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_PMI = _LauncherEnv("PMI (MPICH, Intel MPI)", True, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_SLURM = _LauncherEnv(
    "Slurm", True, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", also="SLURM_STEP_ID"
)
_PMIX = _LauncherEnv("PMIx", True, "PMIX_RANK", None, "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE", also="PMIX_NAMESPACE")
_BY_HAND = _LauncherEnv(
    "RANK and WORLD_SIZE", False, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", also="MASTER_ADDR"
)


def detect_launch(environ: Mapping[str, str]) -> Launch | None:
    """Read what the launcher put into the environment; None if nothing launched this process.

    See Note [Order of launchers].

    Raises:
        LaunchError: a variable that should hold a number does not, the rank is not below the world size, or two launchers
            both claim this process and differ.
    """
    if _is_set(_TORCHRUN, environ):
        return _read(_TORCHRUN, environ)
    spoken = [launcher_env for launcher_env in (_OPEN_MPI, _PMI) if _is_set(launcher_env, environ)]
    if not spoken:
        spoken = [launcher_env for launcher_env in (_SLURM, _PMIX) if _is_set(launcher_env, environ)][:1]
    if not spoken:
        return _read(_BY_HAND, environ) if _is_set(_BY_HAND, environ) else None
    if "RANK" in environ and "WORLD_SIZE" in environ:
        spoken.append(_BY_HAND)
    launches = [_read(launcher_env, environ) for launcher_env in spoken]
    for launcher_env, launch in zip(spoken[1:], launches[1:], strict=True):
        _check_agreement(spoken[0], launches[0], launcher_env, launch)
    return launches[0]


def tolerates_faults(environ: Mapping[str, str]) -> bool:
    """Whether Open MPI's mpirun was told to go on when a rank is lost (`--with-ft ulfm`). A pure function."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "0").lower() in ("1", "true", "yes")


def check_init_method(init_method: str | None) -> str | None:
    """The scheme of an `init_method` such as "tcp://host:1234", or None without one. A pure function.

    Raises:
        InvalidArgumentError: the scheme is not among `INIT_METHODS`; the message lists them.
    """
    if init_method is None:
        return None
    scheme, separator, _ = init_method.partition("://")
    if not separator or scheme not in INIT_METHODS:
        known = "; ".join(f"{name}:// ({meaning})" for name, meaning in INIT_METHODS.items())
        raise InvalidArgumentError(f"unknown init_method {init_method!r}; known are {known}")
    return scheme


def _is_srun_step(step_id: str) -> bool:
    """Whether srun started a step of that id; the ids from 0xfffffff0 on stand for batch scripts and interactive shells."""
    return step_id.isdigit() and int(step_id) < 0xFFFFFFF0


def _is_set(launcher_env: _LauncherEnv, environ: Mapping[str, str]) -> bool:
    if launcher_env is _SLURM and not _is_srun_step(environ.get("SLURM_STEP_ID", "")):
        return False
    needed = (launcher_env.rank, launcher_env.world_size, launcher_env.also)
    return all(variable in environ for variable in needed if variable is not None)


def _read(launcher_env: _LauncherEnv, environ: Mapping[str, str]) -> Launch:
    rank = _number(launcher_env.rank, environ)
    world_size = None if launcher_env.world_size is None else _number(launcher_env.world_size, environ)
    if rank < 0 or (world_size is not None and rank >= world_size):
        raise LaunchError(
            f"{launcher_env.launcher} set {_said(launcher_env, rank, world_size)}; expected a rank below the "
            "world size. Are these variables left over from another job? Unset them, or launch anew"
        )
    return Launch(
        launcher_env.launcher,
        launcher_env.is_mpi,
        rank,
        world_size,
        _number_if_plain(launcher_env.local_rank, environ),
        _number_if_plain(launcher_env.local_world_size, environ),
    )


def _check_agreement(first: _LauncherEnv, launch: Launch, second: _LauncherEnv, other: Launch) -> None:
    same_size = launch.world_size is None or launch.world_size == other.world_size
    if launch.rank == other.rank and same_size:
        return
    raise LaunchError(
        f"{first.launcher} says {_said(first, launch.rank, launch.world_size)}, but the environment also holds "
        f"{_said(second, other.rank, other.world_size)}: both claim to be about this process. Unset the variables that are "
        "left over from another launcher, a shell profile or a container image"
    )


def _said(launcher_env: _LauncherEnv, rank: int, world_size: int | None) -> str:
    size = "" if launcher_env.world_size is None else f" and {launcher_env.world_size}={world_size}"
    return f"{launcher_env.rank}={rank}{size}"


def _number(variable: str, environ: Mapping[str, str]) -> int:
    try:
        return int(environ[variable])
    except ValueError:
        raise LaunchError(f"expected a whole number in {variable}, found {environ[variable]!r}") from None


def _number_if_plain(variable: str, environ: Mapping[str, str]) -> int | None:
    """A number that is only shown: Slurm writes patterns such as "4(x2),3" where nodes differ."""
    text = environ.get(variable, "")
    return int(text) if text.isdigit() else None
