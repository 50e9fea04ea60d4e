"""Whom a rank talks to when something is wrong.

Note [Neighbours]
~~~~~~~~~~~~~~~~~
If each of N ranks told each other one, N^2 messages would be sent just when something is wrong. And a rank may never come back
from a send to one that it is not connected with: MPICH over TCP connects two processes when one first sends to the other, and
waits inside the send until that one calls MPI, too. The rank that all wait for does not.

So a rank talks to its neighbours: those that are 1, 2, 4, ... ranks before and after it. They are connected when the group is
made, and all other ranks are at most log2 N of them away. What a rank hears from one neighbour it tells the others::

      what this rank says --> its 2 log2 N neighbours --> theirs --> ...      each tells again when it has heard something new

It does not matter which ranks keep silent, as long as those that talk are neighbours of one another. Where they are not, as
ranks 0 and 3 of 8 with all others silent, they do not hear of one another.
"""

from __future__ import annotations

from mpi4py import MPI

from ...host.control_messages import rounds
from .library import Tag


def neighbours(rank: int, size: int) -> list[int]:
    """The neighbours of a rank, ascending: its partners in `rounds`. A pure function; they have that rank as a neighbour."""
    return sorted({peer for partners in rounds(rank, size) for peer in partners})


def connect_neighbours(communicator: MPI.Intracomm) -> list[int]:
    """The neighbours of this rank, connected with it. A collective of all ranks of the communicator.

    Cost: an empty message to each.
    """
    found = neighbours(communicator.Get_rank(), communicator.Get_size())
    nothing = [bytearray(), MPI.BYTE]
    requests = [communicator.Irecv(nothing, neighbour, Tag.GREETING) for neighbour in found]
    requests += [communicator.Isend(nothing, neighbour, Tag.GREETING) for neighbour in found]
    for request in requests:
        request.Wait()
    return found
