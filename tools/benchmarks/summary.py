"""What is said about samples: medians with their spread, and ratios of them. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from syncline.collectives.bench.results import quartiles

LEAST_RATIO = 0.01
"""An exposed time at or below zero is noise around nothing; in a geometric mean it counts as this share."""


@dataclass(frozen=True)
class Summary:
    """Quartiles of some samples, in seconds."""

    p25_s: float
    median_s: float
    p75_s: float

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> Summary:
        """Of at least one sample."""
        return cls(*quartiles(samples_s))

    def in_ms(self) -> str:
        """Median and quartiles as a cell of a table."""
        return f"{1e3 * self.median_s:.2f} [{1e3 * self.p25_s:.2f} {1e3 * self.p75_s:.2f}]"


def exposed_ratio(ours_s: float, native_s: float, alone_s: float) -> float | None:
    """Communication left exposed (a step minus an unsynchronised one), ours over native's; None where native has none."""
    native = native_s - alone_s
    return (ours_s - alone_s) / native if native > 0 else None


def geometric_mean(ratios: Sequence[float | None]) -> float | None:
    """Of those that are known, each `LEAST_RATIO` at least; None if none is."""
    known = [max(ratio, LEAST_RATIO) for ratio in ratios if ratio is not None]
    return math.exp(sum(map(math.log, known)) / len(known)) if known else None


def as_times(ratio: float | None) -> str:
    """A ratio as a cell of a table."""
    return "-" if ratio is None else f"{ratio:.2f}"
