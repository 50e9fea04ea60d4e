"""Ask MPI which ranks have failed. Only Open MPI with `mpirun --with-ft ulfm` (ULFM) knows this.

With other MPIs these functions find no failed ranks and do nothing. MPICH and Intel MPI have the functions of ULFM, but when
one rank fails, the whole job fails.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from mpi4py import MPI

from ...startup.launch import tolerates_faults
from .library import translated


def is_fault_tolerant() -> bool:
    """Whether the launcher started this job so that it survives the loss of a rank."""
    return MPI.get_vendor()[0] == "Open MPI" and tolerates_faults(os.environ)


def missing_for_shrink() -> str | None:
    """Return why the surviving ranks cannot go on, and what the user can do. Return None if they can go on."""
    if is_fault_tolerant():
        return None
    # If only the option is missing, the user need not change the library.
    if MPI.get_vendor()[0] == "Open MPI":
        return "Open MPI was started without its tolerance of faults; start the job with `mpirun --with-ft ulfm`"
    return (
        f"{MPI.get_vendor()[0]} cannot go on when a rank is lost; use Open MPI with `mpirun --with-ft ulfm`, or backend "
        "'gloo' with init_method='file:///shared/folder'"
    )


def failed_ranks(communicator: MPI.Comm) -> list[int]:
    """Return the ranks of a communicator that have failed, as far as this process's MPI knows.

    Does not communicate or block.
    """
    if not is_fault_tolerant() or MPI.Is_finalized():
        return []
    try:
        whole = communicator.Get_group()
        try:
            return translated(communicator.Get_failed(), whole)
        finally:
            whole.Free()
    except MPI.Exception:  # the communicator was freed meanwhile
        return []


def revoke(communicators: Iterable[MPI.Comm | None]) -> None:
    """End all operations on these communicators with an error, on all ranks. May block while a rank is stopped."""
    if not is_fault_tolerant() or MPI.Is_finalized():
        return
    for communicator in communicators:
        try:
            if communicator is not None and not communicator.Is_revoked():
                communicator.Revoke()
        except MPI.Exception:
            pass  # the communicator was freed meanwhile


@contextmanager
def revoked_on_failure(*communicators: MPI.Comm) -> Iterator[None]:
    """A context that revokes the communicators if its body fails.

    Other ranks may wait in them for this rank, which will not come.
    """
    try:
        yield
    except BaseException:
        revoke(communicators)
        raise
