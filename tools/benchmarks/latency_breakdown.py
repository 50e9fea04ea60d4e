"""Where the time of a step goes: forward, backward, communication hidden behind it and not. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .timing import Phases


@dataclass(frozen=True)
class Breakdown:
    """Medians of the parts of a step, in seconds.

    Attributes:
        forward_s: forward.
        backward_s: what backward computes: the backward of an unsynchronised step.
        exposed_s: what backward takes beyond that: communication that nothing hides.
        optimizer_s: the optimizer's step.
        communication_s: what the same communication takes when it begins after backward, so that nothing hides it.
    """

    forward_s: float
    backward_s: float
    exposed_s: float
    optimizer_s: float
    communication_s: float

    @property
    def hidden_s(self) -> float:
        """Communication that backward hides."""
        return max(0.0, self.communication_s - self.exposed_s)

    def shown(self) -> dict[str, float]:
        """The parts that follow one another, in milliseconds."""
        parts = {
            "forward": self.forward_s,
            "backward": self.backward_s,
            "exposed communication": self.exposed_s,
            "optimizer": self.optimizer_s,
        }
        return {name: 1e3 * seconds for name, seconds in parts.items()}


def breakdown(steps: Sequence[Phases], after_backward: Sequence[Phases], alone: Sequence[Phases]) -> Breakdown:
    """Of a contender's steps, of those of the same contender without overlap, and of unsynchronised ones."""
    computed_s = _backward_s(alone)
    return Breakdown(
        statistics.median(step.forward_s for step in steps),
        computed_s,
        max(0.0, _backward_s(steps) - computed_s),
        statistics.median(step.optimizer_s for step in steps),
        max(0.0, _backward_s(after_backward) - computed_s),
    )


def _backward_s(steps: Sequence[Phases]) -> float:
    return statistics.median(step.backward_s for step in steps)
