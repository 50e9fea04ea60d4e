"""Where the time of a step goes: forward, backward, communication hidden behind it and not. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .summary import Summary
from .timing import Phases


@dataclass(frozen=True)
class Breakdown:
    """The parts of a step: medians and quartiles.

    Attributes:
        forward: forward.
        backward: what backward computes: the backward of an unsynchronised step.
        exposed: what backward takes beyond that of the same round: communication that nothing hides.
        optimizer: the optimizer's step.
        communication: what the same communication takes when it begins after backward, so that nothing hides it.
        hidden: by how much that is more than what is exposed: communication that backward hides.
    """

    forward: Summary
    backward: Summary
    exposed: Summary
    optimizer: Summary
    communication: Summary
    hidden: Summary

    @classmethod
    def of(cls, steps: Sequence[Phases], after_backward: Sequence[Phases], alone: Sequence[Phases]) -> Breakdown:
        """Of a contender's steps, of those of the same contender without overlap, and of unsynchronised ones."""
        backward_s, after_s, computed_s = map(_backward_s, (steps, after_backward, alone))
        return cls(
            forward=Summary.of([step.forward_s for step in steps]),
            backward=Summary.of(computed_s),
            exposed=Summary.of_difference(backward_s, computed_s),
            optimizer=Summary.of([step.optimizer_s for step in steps]),
            communication=Summary.of_difference(after_s, computed_s),
            hidden=Summary.of_difference(after_s, backward_s),
        )

    def stacked_ms(self) -> dict[str, float]:
        """The medians of the parts that follow one another, in milliseconds, as bars: none shorter than nothing."""
        parts = {
            "forward": self.forward,
            "backward": self.backward,
            "exposed communication": self.exposed,
            "optimizer": self.optimizer,
        }
        return {name: 1e3 * max(0.0, part.median_s) for name, part in parts.items()}


def _backward_s(steps: Sequence[Phases]) -> list[float]:
    return [step.backward_s for step in steps]
