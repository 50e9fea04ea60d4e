"""Can the ranks of each node share memory? Tried, with a page for each."""

from __future__ import annotations

import torch
from mpi4py import MPI

from ..library import mpi_errors
from .hierarchy import Hierarchy
from .sharing import SharingError, share


def try_sharing() -> str:
    """Let each rank of the job read what the others of its node wrote. A collective of all of them.

    Returns:
        The result in words, the same on all ranks: it begins with "yes", "no", or, where every rank is alone, "nothing".
    """
    with mpi_errors():
        communicator = MPI.COMM_WORLD.Dup()
        hierarchy = Hierarchy(communicator)
        try:
            return _result(hierarchy, communicator)
        finally:
            for made in (hierarchy.counterparts, hierarchy.node, communicator):
                if made is not None:
                    made.Free()


def _result(hierarchy: Hierarchy, communicator: MPI.Intracomm) -> str:
    if not hierarchy.shares_memory:
        return "nothing to share: every rank is alone on its node"
    try:
        segment = share(hierarchy, communicator, torch.int64.itemsize, lambda start: start().Wait())
    except SharingError as error:
        return f"no: {error}"
    segment.view(segment.mine, 0, 1, torch.int64).fill_(communicator.Get_rank())
    written = hierarchy.node.allgather(communicator.Get_rank())
    read = [int(segment.view(rank, 0, 1, torch.int64).item()) for rank in range(len(written))]
    wrong = [rank for rank, is_wrong in enumerate(communicator.allgather(read != written)) if is_wrong]
    return (
        f"no: rank(s) {wrong} did not read what others wrote"
        if wrong
        else "yes: each rank read what the others of its node wrote"
    )
