"""The tags on a group's private communicator."""

from __future__ import annotations

import enum


class Tag(enum.IntEnum):
    """Who sends what."""

    PAIRWISE = 1
    """`all_to_all`: the ranks' parts."""
    STATEMENT = 2
    """`Inquest`: what a rank waits for."""
    NOTHING = 3
    """Nobody: to look for it lets MPI go on with its work."""
    DEPARTURE = 4
    """`ExitBarrier`: that a rank has left, and what it started before."""
