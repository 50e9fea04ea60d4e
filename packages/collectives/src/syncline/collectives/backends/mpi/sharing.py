"""Making memory that the ranks of each node share: on all nodes, or nowhere."""

from __future__ import annotations

import os

from mpi4py import MPI

from .hierarchy import Hierarchy
from .segment import Segment, create_file, open_file, padded, reserve


class SharingError(Exception):
    """The memory cannot be had. All ranks of the group raise it together; it says where and why."""


def share(hierarchy: Hierarchy, communicator: MPI.Intracomm, part_bytes: int) -> Segment:
    """Memory with a part for each rank of a node. All ranks of the group call it, and have met just before.

    Raises:
        SharingError: a rank did not get it.
    """
    file, complaint = _common_file(hierarchy.node, part_bytes)
    segment = None
    try:
        if not complaint:
            segment, complaint = _mapped(hierarchy.node, file, part_bytes)
        _agree(communicator, complaint)  # from here on nobody needs the descriptor of the rank that made the file
    finally:
        if file >= 0:
            os.close(file)
    assert segment is not None
    return segment


def _common_file(node: MPI.Intracomm, part_bytes: int) -> tuple[int, str]:
    """A descriptor of one file on all ranks of the node, or why there is none."""
    name, file, complaint = f"syncline-{os.urandom(8).hex()}", -1, ""
    try:
        if node.Get_rank() == 0:
            file = create_file(name, node.Get_size() * padded(part_bytes))
    except OSError as error:
        complaint = str(error)
    pid, creators, name, complaint = node.bcast((os.getpid(), file, name, complaint))
    try:
        if node.Get_rank() != 0 and not complaint:
            file = open_file(pid, creators, name)
    except OSError as error:
        complaint = str(error)
    return file, complaint


def _mapped(node: MPI.Intracomm, file: int, part_bytes: int) -> tuple[Segment | None, str]:
    """Each rank reserves its own part, whose pages so lie in the memory next to its core."""
    try:
        reserve(file, part_bytes, node.Get_rank())
        return Segment(file, node.Get_size(), part_bytes, node.Get_rank()), ""
    except (OSError, ValueError) as error:
        return None, str(error)


def _agree(communicator: MPI.Intracomm, complaint: str) -> None:
    complaints = communicator.allgather(complaint)
    found = [f"rank {rank}: {said}" for rank, said in enumerate(complaints) if said]
    if found:
        raise SharingError(found[0] if len(found) == 1 else f"{found[0]} (and {len(found) - 1} more rank(s))")
