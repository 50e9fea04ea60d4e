"""Find out this process's rank and the number of ranks, from the launcher's variables and the caller's arguments."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

from ..errors import InvalidArgumentError, LaunchError

INIT_METHODS = {
    "mpi": "the ranks of the MPI job, without a port or a file; the same as backend 'mpi'",
    "env": "MASTER_ADDR and MASTER_PORT in the environment",
    "file": "a folder on a file system that all ranks see",
    "tcp": "rank 0's host and port, and a secret",
}


RUN_ID_PREFIX = "syncline-"
"""The run ids of `syncline run` begin with this text. See also `is_own_run_id`."""
# Test the whole id and not only the prefix, because a user may pass an id such as "syncline-bench" to torchrun.
_OWN_RUN_ID = re.compile(RUN_ID_PREFIX + r"(started-\d+|alone|mpi|env)-[0-9a-f]{8}")


@dataclass(frozen=True)
class Launch:
    """The rank of this process in its job, and the sizes of the job and the node, according to the launcher.

    Attributes:
        is_mpi: whether the launcher starts MPI programs (mpiexec, mpirun, srun), so that MPI can connect the ranks.
        world_size: number of processes of the job. None if the launcher does not say (PALS, or PMIx alone).
        local_rank: rank among the processes of this node, or None if the launcher does not say. Only for warnings and errors:
            use `api.placement` elsewhere.
        local_world_size: number of processes on this node, or None. Only for warnings and errors.
    """

    launcher: str
    is_mpi: bool
    rank: int
    world_size: int | None
    local_rank: int | None = None
    local_world_size: int | None = None

    def least_world_size(self) -> int:
        """Return the number of processes if it is known, else a lower bound."""
        if self.world_size is not None:
            return self.world_size
        return max(self.rank + 1, self.local_world_size or 1)


@dataclass(frozen=True)
class _LauncherEnv:
    """The names of the environment variables that one launcher sets. A field is None if the launcher sets no such variable.

    The launcher is recognised if the variables named in `rank`, `world_size` and `also` are set.
    """

    launcher: str
    is_mpi: bool
    rank: str
    world_size: str | None
    local_rank: str
    local_world_size: str
    also: str | None = None


# Note [Order of launchers]
# ~~~~~~~~~~~~~~~~~~~~~~~~~
# Launchers nest, and the variables of the outer launchers stay visible inside: sbatch starts mpirun, which starts torchrun,
# which starts Python. The innermost launcher describes this process. From the inside outwards:
#
# 1. torchrun, recognised by TORCHELASTIC_RUN_ID. torchrun may run under any launcher: for example, an MPI job may start one
#    torchrun on each node. Then torchrun and the launcher give different numbers, which is no contradiction. `syncline run`
#    sets torchrun's variables for the script, too, but with a run id of its own form (`is_own_run_id`). For such a run id,
#    use the launcher that has started `syncline run` (points 2 to 4), or point 5 if `syncline run` has started the ranks.
# 2. The mpirun or mpiexec of an MPI: Open MPI, PMI (MPICH's Hydra, Intel MPI, Cray), MVAPICH. If the variables of two of these
#    are set, one launcher is inside the other, and nothing says which is the inner one.
# 3. The launcher of a resource manager: Flux, PALS, JSM or Slurm. Flux comes first, because it may run inside Slurm. Slurm
#    counts only if srun started the process: then the step id is a number. A batch script sees SLURM_PROCID=0 and the whole
#    SLURM_NTASKS, but is alone. An mpirun (2) starts its daemons with these launchers. So inside an mpirun, the launchers'
#    variables describe the daemons.
# 4. PMIx alone (prterun, and other launchers that only have PMIx). PMIx sets a rank, but no size. A launcher above may set the
#    variables of PMIx, too. Then its own variables and those of PMIx have the same numbers.
# 5. RANK and WORLD_SIZE without TORCHELASTIC_RUN_ID: set by hand, by a batch script or by Kubernetes.
#
# Two sources contradict each other if both describe *this* process and differ. The two sources may be two launchers of point 2,
# or one launcher of points 2 to 4 and the pair RANK and WORLD_SIZE. (Many scripts copy the pair from MPI's or Slurm's
# variables. Then both sources agree.) A stale pair, from a shell profile or a container image, would give the wrong rank to a
# part of a program. So a contradiction is an error.
#
# It is also an error if no launcher has set all its variables, but one variable says that there are several processes. If we
# ignored this variable, each process would train alone as rank 0 of 1: N trainings would silently overwrite each other's
# checkpoints.
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
_MVAPICH = _LauncherEnv(
    "MVAPICH", True, "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"
)
_FLUX = _LauncherEnv("Flux", True, "FLUX_TASK_RANK", "FLUX_JOB_SIZE", "FLUX_TASK_LOCAL_ID", "")
_PALS = _LauncherEnv("PALS", True, "PALS_RANKID", None, "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE", also="PALS_APID")
_JSM = _LauncherEnv(
    "JSM", True, "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"
)
_SLURM = _LauncherEnv(
    "Slurm", True, "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", also="SLURM_STEP_ID"
)
_PMIX = _LauncherEnv("PMIx", True, "PMIX_RANK", None, "PMIX_LOCAL_RANK", "PMIX_LOCAL_SIZE", also="PMIX_NAMESPACE")
_BY_HAND = _LauncherEnv("RANK and WORLD_SIZE", False, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_OF_AN_MPI = (_OPEN_MPI, _PMI, _MVAPICH)
_OF_A_MANAGER = (_FLUX, _PALS, _JSM, _SLURM, _PMIX)


def detect_launch(environ: Mapping[str, str], *, is_given: bool = False) -> Launch | None:
    """Read the launcher's variables from the environment. Return None if no launcher started this process. A pure function.

    See Note [Order of launchers]. If `is_given` is True, the caller has passed rank and world size, and incomplete variables
    are no error.

    Raises:
        LaunchError: a variable is not a number, or the rank is not below the world size. Or the variables of two launchers
            contradict each other. Or a variable says that there are several processes, and other variables are missing.
    """
    # A run id of `syncline run` is not torchrun's: see point 1 of the note.
    if _is_set(_TORCHRUN, environ) and not is_own_run_id(environ["TORCHELASTIC_RUN_ID"]):
        return _read(_TORCHRUN, environ)
    spoken = [launcher_env for launcher_env in _OF_AN_MPI if _is_set(launcher_env, environ)]
    if not spoken:
        # The variables of an outer manager stay visible, so only the first manager of this list counts.
        spoken = [launcher_env for launcher_env in _OF_A_MANAGER if _is_set(launcher_env, environ)][:1]
    # Without another launcher, ignore RANK and WORLD_SIZE if they say "rank 0 of 1": the process is alone anyway.
    if _is_set(_BY_HAND, environ) and (spoken or not _says_one(environ)):
        spoken.append(_BY_HAND)
    if not spoken:
        claim = None if is_given else _claim(environ)
        if claim is not None:
            raise LaunchError(claim)
        return None
    launches = [_read(launcher_env, environ) for launcher_env in spoken]
    for launcher_env, launch in zip(spoken[1:], launches[1:], strict=True):
        _check_agreement(spoken[0], launches[0], launcher_env, launch)
    # PALS and PMIx do not say the size. If RANK and WORLD_SIZE are set, too, take the size from WORLD_SIZE, the last entry.
    return replace(launches[0], world_size=launches[-1].world_size)


def several_torchrun_jobs(launch: Launch, environ: Mapping[str, str]) -> str | None:
    """Return a warning if torchrun's job has one node, but another launcher has started several processes; else None.

    In this case, each of the processes is, or has started, a training of its own. This may be on purpose. Or torchrun lacks the
    options for several nodes, or one of the two launchers has left its variables in the environment. A pure function.
    """
    if launch.launcher != _TORCHRUN.launcher or environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return None
    outer = next((row for row in (*_OF_AN_MPI, *_OF_A_MANAGER) if _is_set(row, environ)), None)
    size = None if outer is None else _number_if_plain(outer.world_size or "", environ)
    if outer is None or size is None or size < 2:
        return None
    # torchrun always sets GROUP_WORLD_SIZE. Without it, a script has set torchrun's variables from the launcher's numbers.
    if "GROUP_WORLD_SIZE" not in environ and launch.world_size == size:
        return None
    return (
        f"torchrun started this process in a job of one node, but {outer.launcher} says {outer.world_size}={size}, so there "
        f"may be {size} trainings that do not know of each other\n"
        "For one training on all nodes pass --nnodes and --rdzv-endpoint to torchrun. If variables are left over, unset them: "
        "those of the other launcher, or TORCHELASTIC_RUN_ID, RANK and WORLD_SIZE"
    )


def is_own_run_id(run_id: str) -> bool:
    """Return whether `syncline run`, and not torchrun, has made this value of TORCHELASTIC_RUN_ID. A pure function."""
    return _OWN_RUN_ID.fullmatch(run_id) is not None


def _says_one(environ: Mapping[str, str]) -> bool:
    return environ["WORLD_SIZE"] == "1" and environ["RANK"] == "0" and "MASTER_ADDR" not in environ


def _claim(environ: Mapping[str, str]) -> str | None:
    for launcher_env in (*_OF_AN_MPI, *_OF_A_MANAGER, _BY_HAND):
        if launcher_env is _SLURM and ("SLURM_STEP_ID" in environ or _number_if_plain(_SLURM.rank, environ) == 0):
            continue  # a batch script or a shell: it sees the size of its whole allocation
        needed = (launcher_env.rank, launcher_env.world_size, launcher_env.also)
        rank, size = (_number_if_plain(variable or "", environ) for variable in needed[:2])
        # A rank above 0 shows that there are other processes, and so does a size above 1.
        if (rank or 0) > 0 or (size or 0) > 1:
            there = [f"{name}={environ[name]}" for name in needed[:2] if name is not None and name in environ]
            lacks = [name for name in needed if name is not None and name not in environ]
            return (
                f"{' and '.join(there)} in the environment: this is one of several processes, but {' and '.join(lacks)} is "
                "missing. Set it, or unset the other; else each process would train alone\n"
                "The launcher may be one that Syncline does not know: then export RANK, WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT for each process. A process that is alone on purpose passes rank=0, world_size=1"
            )
    return None


# Note [The place of a process]
# ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
# A process that is a rank of a job has a *place* in the job. A child process inherits the launcher's variables, which describe
# the place of its parent. But the child has no place, because only the rank itself is connected to the launcher. If the child
# started MPI with these variables, MPICH would end the whole job, and Open MPI would wait for ever. So a process that takes a
# place writes its process id to the environment, where its children find it:
#
#   rank (pid 10)  PMI_RANK=0 ... SYNCLINE_PLACE="10 8a1f33c0 4711"
#     child (pid 12)               the same text: pid 10 is not 12, so this process has no place
#     mpiexec -> rank (pid 14)     the same text, but other variables of a launcher, or another socket, so it has its own place
#
# The second number is a digest of the launcher's variables. This digest does not tell all jobs apart: MPICH sets the same
# variables for rank 0 of 2 in every job. So the third number is the inode of the socket behind PMI_FD, which is different in
# each job.
PLACE_VARIABLE = "SYNCLINE_PLACE"
_OF_A_JOB = (
    "PMIX_NAMESPACE",
    "PMI_PORT",
    "PMI_ID",
    "PMI_JOBID",
    "MPIRUN_ID",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "FLUX_JOB_ID",
    "PALS_APID",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT",
)


def take_launch(environ: MutableMapping[str, str], *, is_given: bool = False) -> Launch | None:
    """Call `detect_launch`. If it finds a launcher, mark in `environ` that this process is the rank that the launcher started.

    A child process inherits the mark (the variable SYNCLINE_PLACE), so the child knows that it is not the rank. See Note [The
    place of a process]. If `is_given` is True, the caller has passed rank and world size. Then this function returns None in a
    child of a rank, and raises no error.

    Raises:
        LaunchError: this process is a child of a rank, or `detect_launch` has raised this error.
    """
    launch = detect_launch(environ, is_given=is_given)
    if launch is None:
        return None
    parent = parent_rank(environ)
    # No rank is above this process, so the place is free. From now on, children of this process see that the place is taken.
    if parent is None:
        environ[PLACE_VARIABLE] = _place(os.getpid(), environ)
        return launch
    # The caller has passed rank and world size, so the launcher is not needed.
    if is_given:
        return None
    raise LaunchError(child_of_rank(launch.rank, parent))


def launch_by(communicator: Any) -> Launch:
    """Return the rank of this process and the number of ranks in the caller's mpi4py communicator, as a `Launch`.

    Raises:
        InvalidArgumentError: the argument is not a communicator, or this process is not in the communicator.
    """
    if not hasattr(communicator, "Get_rank") or not communicator:
        raise InvalidArgumentError(
            f"communicator={communicator!r}: expected an mpi4py communicator that this rank is in; a rank that got "
            "MPI.COMM_NULL does not call init_process_group"
        )
    return Launch("the communicator", True, communicator.Get_rank(), communicator.Get_size())


def parent_rank(environ: Mapping[str, str]) -> int | None:
    """If this process is a child of a rank, return the rank's process id; else None."""
    pid, _, place = environ.get(PLACE_VARIABLE, "").partition(" ")
    # No process has taken a place, this process itself has taken the place, or the launcher's variables describe another place.
    if not pid.isdecimal() or int(pid) == os.getpid() or place.split()[:1] != _place(0, environ).split()[1:2]:
        return None
    own = _socket_number(environ)
    # If this process has another socket than the rank, a launcher inside the rank has started this process.
    return None if own not in ("", place.split()[-1]) else int(pid)


def child_of_rank(rank: int | None, parent: int) -> str:
    """Return the error message for a process that starts a group, although it is a child of a rank. A pure function."""
    which = "a rank" if rank is None else f"rank {rank}"
    return (
        f"this process is a child of {which} (pid {parent}), and is not itself a rank of the job: do not start a group in it, "
        "or pass rank, world_size and init_method for a group of its own\n"
        "- A script that multiprocessing or a DataLoader imports again: put its code under `if __name__ == '__main__':`.\n"
        "- Several children: pass rank=..., world_size=... and init_method='file:///folder' in each, with backend 'gloo'.\n"
        "- A child that is alone: pass rank=0, world_size=1.\n"
        "- Another MPI job: start it with mpiexec"
    )


def _place(pid: int, environ: Mapping[str, str]) -> str:
    spoken = [row for row in (*_OF_AN_MPI, *_OF_A_MANAGER) if _is_set(row, environ)]
    if not spoken or _is_set(_TORCHRUN, environ):  # in other cases, leave out RANK: the script may have set this variable
        spoken.append(_BY_HAND)
    names = {name for row in spoken for name in (row.rank, row.world_size)} | set(_OF_A_JOB)
    said = repr(sorted((name, environ[name]) for name in names if name is not None and name in environ))
    return f"{pid} {crc32(said.encode()):08x} {_socket_number(environ)}"


def _socket_number(environ: Mapping[str, str]) -> str:
    """Return the inode of the socket that the variable PMI_FD names. This socket connects a rank of MPICH to its mpiexec."""
    try:
        status = os.fstat(int(environ.get("PMI_FD", "")))
    except (ValueError, OSError):
        return ""
    return str(status.st_ino) if stat.S_ISSOCK(status.st_mode) else ""


# ---- the process manager that connects the ranks of an MPI job ----

SRUN_PMIX, SRUN_PMI2, OPEN_MPI, HYDRA = "srun --mpi=pmix", "srun --mpi=pmi2", "Open MPI's mpirun", "MPICH's mpiexec"


def process_manager(environ: Mapping[str, str]) -> str | None:
    """Return the process manager of this MPI job: SRUN_PMIX, SRUN_PMI2, OPEN_MPI or HYDRA. A pure function.

    Return None if the process manager is not known. If an mpirun runs inside Slurm, the mpirun is the process manager.
    """
    # Test this first, because ranks of an mpirun inside a step see Slurm's variables, too.
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return OPEN_MPI
    if environ.get("PMIX_NAMESPACE", "").startswith("slurm.pmix."):
        # An MPICH mpiexec inside the step sets its own variables, too. If only PMI_RANK is set, the manager is not certain.
        return HYDRA if "HYDI_CONTROL_FD" in environ else None if "PMI_RANK" in environ else SRUN_PMIX
    step = f"{environ.get('SLURM_JOB_ID')}.{environ.get('SLURM_STEP_ID')}"
    if environ.get("PMI_JOBID") == step:
        return SRUN_PMI2
    return HYDRA if {"HYDI_CONTROL_FD", "PMI_RANK"} <= environ.keys() else None


def tolerates_faults(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether Open MPI's mpirun keeps the job running when a rank is lost (`--with-ft ulfm`)."""
    return environ.get("OMPI_MCA_mpi_ft_enable", "0").lower() in ("1", "true", "yes")


def check_init_method(init_method: str | None) -> str | None:
    """Return the scheme of an `init_method`, such as "tcp" of "tcp://host:1234". For None, return None. A pure function.

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
    # Ids from 0xfffffff0 on mean batch scripts and interactive shells.
    return step_id.isdecimal() and int(step_id) < 0xFFFFFFF0


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
    """Return the number in the variable; None if it is not set, or has another text, such as Slurm's "4(x2),3"."""
    text = environ.get(variable, "")
    return int(text) if text.isdecimal() else None
