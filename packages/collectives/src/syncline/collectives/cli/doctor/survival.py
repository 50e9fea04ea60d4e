"""Whether a job survives the loss of a rank: a pure function of how it was launched and connected."""

from __future__ import annotations

from .finding import Finding, ok

_NAME = "loss of a rank"

# What the launchers do when one process of the job is killed.
_ENDS_THE_JOB = {
    "torchrun": "torchrun ends all ranks of a machine when one of them ends",
    "Open MPI": "mpirun ends the job when a process is killed, unless it was given --with-ft ulfm",
    "PMI (MPICH, Intel MPI)": "mpiexec ends the job when a process is killed",
    "PMIx": "its launcher ends the job when a process is killed",
}
_IF_TOLD_SO = {"Slurm": "if srun was given --no-kill --kill-on-bad-exit=0"}


def survival(launcher: str | None, size: int, lack: str | None, *, tolerates_faults: bool = False) -> Finding:
    """Would the others go on if a rank died? Neither answer is a defect.

    Args:
        launcher: who started the ranks, in words, or None.
        size: how many ranks there are.
        lack: what keeps the group from shrinking, or None.
        tolerates_faults: whether mpirun was told to leave the others alone.
    """
    if size == 1:
        return ok(_NAME, "nobody would be left: there is one rank")
    if lack is not None:
        return ok(_NAME, f"this job does not survive it: {lack}")
    if launcher in _ENDS_THE_JOB and not tolerates_faults:
        return ok(_NAME, f"this job does not survive it: {_ENDS_THE_JOB[launcher]}; start the ranks by hand or with srun")
    condition = f", {_IF_TOLD_SO[launcher]}" if launcher in _IF_TOLD_SO else ""
    return ok(_NAME, f"this job can survive it{condition}: the ranks that are left can shrink the group (syncline.ddp.Elastic)")
