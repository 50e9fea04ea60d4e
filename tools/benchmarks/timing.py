"""Steps of several contenders, taken in turn, so that whatever the machine does meanwhile hits them alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from syncline.collectives import ProcessGroup, exchange_objects

WARM_UP = 5
"""In the first steps memory is allocated, buckets are rebuilt, and PowerSGD has not started yet."""


class Phases(NamedTuple):
    """How long the parts of one step took, in seconds."""

    forward_s: float
    backward_s: float
    optimizer_s: float

    @classmethod
    def undivided(cls, total_s: float) -> Phases:
        """A step of which only the whole is known."""
        return cls(0.0, total_s, 0.0)

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.forward_s + self.backward_s + self.optimizer_s


Step = Callable[[], Phases]


def interleaved(steps: dict[str, Step], group: ProcessGroup, rounds: int, warm_up: int = WARM_UP) -> dict[str, list[Phases]]:
    """Let each contender take one step a round; every other round runs backwards. A collective.

    Returns:
        For each contender the steps after the warm-up, each as the rank saw it that took longest.
    """
    own: dict[str, list[Phases]] = {name: [] for name in steps}
    for number in range(warm_up + rounds):
        for name in steps if number % 2 == 0 else reversed(steps):
            group.barrier()
            taken = steps[name]()
            if number >= warm_up:
                own[name].append(taken)
    everyone = exchange_objects(own, group=group)
    return {name: slowest([rank[name] for rank in everyone]) for name in steps}


def slowest(ranks: list[list[Phases]]) -> list[Phases]:
    """Of each step the phases of the rank that took longest. A pure function."""
    return [max(step, key=lambda phases: phases.total_s) for step in zip(*ranks, strict=True)]
