"""Says whether a job survives the loss of a rank. A pure function of how the job was launched and connected."""

from __future__ import annotations

from .finding import Finding, ok

_NAME = "loss of a rank"

# These launchers end the job when one process is killed.
_ENDS_THE_JOB = {
    "torchrun": "torchrun ends all ranks of a machine when one of them ends",
    "Open MPI": "mpirun ends the job when a process is killed, unless it was given --with-ft ulfm",
    "PMI (MPICH, Intel MPI)": "mpiexec ends the job when a process is killed",
    "PMIx": "its launcher ends the job when a process is killed",
}
_IF_TOLD_SO = {"Slurm": "if srun was given --no-kill --kill-on-bad-exit=0"}


def survival(launcher: str | None, size: int, lack: str | None, *, tolerates_faults: bool = False) -> Finding:
    """Say whether the other ranks would go on if a rank died. The finding is always OK, because both answers are normal.

    Args:
        launcher: the launcher in words, or None.
        size: the number of ranks.
        lack: why the group cannot shrink, or None.
        tolerates_faults: whether mpirun was told not to end the other ranks.
    """
    if size == 1:
        return ok(_NAME, "nobody would be left: there is one rank")
    if lack is not None:
        return ok(_NAME, f"this job does not survive it: {lack}")
    if launcher in _ENDS_THE_JOB and not tolerates_faults:
        return ok(_NAME, f"this job does not survive it: {_ENDS_THE_JOB[launcher]}; start the ranks by hand or with srun")
    condition = f", {_IF_TOLD_SO[launcher]}" if launcher in _IF_TOLD_SO else ""
    return ok(_NAME, f"this job can survive it{condition}: the ranks that are left can shrink the group (syncline.ddp.Elastic)")
