"""Steps of several contenders in turn, so that disturbances of the machine hit all of them alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from syncline.collectives import ProcessGroup, exchange_objects

WARM_UP = 2
"""Rounds of two steps. In the first, memory is allocated, buckets are rebuilt, and PowerSGD has not started yet."""


class Timed(Protocol):
    """The result of a step: at least its duration."""

    @property
    def total_s(self) -> float:
        """The whole step, in seconds."""


T = TypeVar("T", bound=Timed)


class Phases(NamedTuple):
    """How long the parts of one step took, in seconds."""

    forward_s: float
    backward_s: float
    optimizer_s: float

    @classmethod
    def undivided(cls, total_s: float) -> Phases:
        """A step of which only the total is known."""
        return cls(0.0, total_s, 0.0)

    @property
    def total_s(self) -> float:
        """The whole step."""
        return self.forward_s + self.backward_s + self.optimizer_s


Step = Callable[[], Phases]


def interleaved(
    steps: dict[str, Callable[[], T]], group: ProcessGroup, rounds: int, warm_up: int = WARM_UP
) -> dict[str, list[T]]:
    """Let each contender take two steps a round, in an order that is drawn again for each round. A collective.

    Only the second step counts: it finds the caches as the contender's own step leaves them, as in training, and not as
    another contender does.

    Returns:
        For each contender the steps after the warm-up, one a round, each as seen on the slowest rank.
    """
    own: dict[str, list[T]] = {name: [] for name in steps}
    for number in range(warm_up + rounds):
        for name in order_of_round(number, steps):
            steps[name]()
            group.barrier()
            taken = steps[name]()
            if number >= warm_up:
                own[name].append(taken)
    everyone = exchange_objects(own, group=group)
    return {name: slowest([rank[name] for rank in everyone]) for name in steps}


def order_of_round(number: int, names: Iterable[str]) -> list[str]:
    """The names in a random order that follows from the round's number: the same on every rank. A pure function."""
    shuffled = list(names)
    random.Random(number).shuffle(shuffled)
    return shuffled


def slowest(ranks: Sequence[Sequence[T]]) -> list[T]:
    """Each step as seen on the rank where it took longest. A pure function."""
    return [max(step, key=lambda taken: taken.total_s) for step in zip(*ranks, strict=True)]
