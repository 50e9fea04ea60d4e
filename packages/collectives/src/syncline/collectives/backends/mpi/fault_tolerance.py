"""What MPI knows of ranks that have failed: ULFM, in Open MPI started with `mpirun --with-ft ulfm`.

Elsewhere nothing is known, and nothing is done: MPICH and Intel MPI have the functions, but give up as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from mpi4py import MPI

_SWITCH = "OMPI_MCA_mpi_ft_enable"


def is_fault_tolerant() -> bool:
    """Whether this job was started so that it outlives the loss of a rank."""
    return MPI.get_vendor()[0] == "Open MPI" and os.environ.get(_SWITCH, "0").lower() in ("1", "true", "yes")


def failed_ranks(communicator: MPI.Comm) -> list[int]:
    """The ranks of a communicator that MPI knows to have failed. Local; does not block."""
    if not is_fault_tolerant():
        return []
    try:
        failed = communicator.Get_failed()
        return [
            int(rank) for rank in MPI.Group.Translate_ranks(failed, list(range(failed.Get_size())), communicator.Get_group())
        ]
    except MPI.Exception:  # it was freed meanwhile
        return []


def revoke(communicators: Iterable[MPI.Comm | None]) -> None:
    """Let what runs on these communicators end with an error, on all ranks. May block while a rank stands still."""
    if not is_fault_tolerant():
        return
    for communicator in communicators:
        try:
            if communicator is not None and not communicator.Is_revoked():
                communicator.Revoke()
        except MPI.Exception:
            pass  # it was freed meanwhile
