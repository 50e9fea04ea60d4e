"""Where the ranks run, and how many threads each may use there."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from syncline.collectives import ProcessGroup, exchange_objects


@dataclass(frozen=True)
class Placement:
    """A rank's host, and the cores that it may use there."""

    host: str
    cores: frozenset[int]


def gather_placements(group: ProcessGroup) -> list[Placement]:
    """The placement of every rank. A collective."""
    return exchange_objects(Placement(platform.node(), frozenset(os.sched_getaffinity(0))), group=group)


def threads_for(placements: Sequence[Placement], rank: int) -> int:
    """A rank's share of the cores that it may use, unless OMP_NUM_THREADS says otherwise.

    Ranks that share cores divide them; ranks that the launcher has bound to cores of their own use those.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    mine = placements[rank]
    sharing = [other for other in placements if other.host == mine.host and other.cores & mine.cores]
    return max(1, len(mine.cores) // len(sharing))
