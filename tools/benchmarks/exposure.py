"""Steps of contenders compared with unsynchronised steps: their duration, and the communication that they expose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .contenders import ALONE, counterpart
from .summary import Summary, ratio_of_costs


@dataclass(frozen=True)
class Compared:
    """One case.

    Attributes:
        steps: the steps of each contender.
        exposed: by how much each step is longer than the unsynchronised step of the same round.
    """

    steps: dict[str, Summary]
    exposed: dict[str, Summary]

    @classmethod
    def of(cls, taken_s: Mapping[str, Sequence[float]]) -> Compared:
        """From the seconds of each contender in each round."""
        alone_s = taken_s[ALONE]
        return cls(
            {name: Summary.of(steps_s) for name, steps_s in taken_s.items()},
            {name: Summary.of_difference(steps_s, alone_s) for name, steps_s in taken_s.items()},
        )

    def step_ratio(self, name: str) -> float:
        """The contender's step divided by that of torch's counterpart."""
        return self.steps[name].median_s / self.steps[counterpart(name)].median_s

    def exposed_ratio(self, name: str) -> float | None:
        """The ratio of exposed communication; None if it is lost in noise."""
        return ratio_of_costs(self.exposed[name], self.exposed[counterpart(name)])

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "steps": {name: asdict(summary) for name, summary in self.steps.items()},
            "exposed": {name: asdict(summary) for name, summary in self.exposed.items()},
            "step_ratio": {name: self.step_ratio(name) for name in self.steps},
            "exposed_ratio": {name: self.exposed_ratio(name) for name in self.steps},
        }
