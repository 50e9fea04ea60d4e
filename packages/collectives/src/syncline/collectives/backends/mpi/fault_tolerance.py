"""What MPI knows of ranks that have failed: ULFM, in Open MPI started with `mpirun --with-ft ulfm`.

Elsewhere nothing is known, and nothing is done: MPICH and Intel MPI have the functions, but give up as a whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mpi4py import MPI

from ...startup.launch import tolerates_faults
from .library import translated


def is_fault_tolerant() -> bool:
    """Whether this job was started so that it outlives the loss of a rank."""
    return MPI.get_vendor()[0] == "Open MPI" and tolerates_faults(os.environ)


def missing_for_shrink() -> str | None:
    """What keeps the ranks that are left from going on, with the remedy; None if nothing does."""
    if is_fault_tolerant():
        return None
    if MPI.get_vendor()[0] == "Open MPI":
        return "Open MPI was started without its tolerance of faults; start the job with `mpirun --with-ft ulfm`"
    return (
        f"{MPI.get_vendor()[0]} cannot go on when a rank is lost; use Open MPI with `mpirun --with-ft ulfm`, or backend "
        "'gloo' with init_method='file:///shared/folder'"
    )


def failed_ranks(communicator: MPI.Comm) -> list[int]:
    """The ranks of a communicator that MPI knows to have failed. Local; does not block."""
    if not is_fault_tolerant() or MPI.Is_finalized():
        return []
    try:
        whole = communicator.Get_group()
        try:
            return translated(communicator.Get_failed(), whole)
        finally:
            whole.Free()
    except MPI.Exception:  # it was freed meanwhile
        return []


def revoke(communicators: Iterable[MPI.Comm | None]) -> None:
    """Let what runs on these communicators end with an error, on all ranks. May block while a rank stands still."""
    if not is_fault_tolerant() or MPI.Is_finalized():
        return
    for communicator in communicators:
        try:
            if communicator is not None and not communicator.Is_revoked():
                communicator.Revoke()
        except MPI.Exception:
            pass  # it was freed meanwhile


@contextmanager
def revoked_on_failure(*communicators: MPI.Comm) -> Iterator[None]:
    """Revoke them if what is done inside fails: the others may wait there for this rank, which lives and will not come."""
    try:
        yield
    except BaseException:
        revoke(communicators)
        raise
