"""Statistics of samples: medians with their spread, and ratios of them. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from syncline.collectives.cli.bench.results import quartiles


@dataclass(frozen=True)
class Summary:
    """Quartiles of `count` samples, in seconds."""

    p25_s: float
    median_s: float
    p75_s: float
    count: int

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> Summary:
        """The summary of at least one sample."""
        return cls(*quartiles(samples_s), len(samples_s))

    @classmethod
    def of_difference(cls, samples_s: Sequence[float], base_s: Sequence[float]) -> Summary:
        """The summary of the differences between each sample and the base's sample of the same round."""
        return cls.of([sample - base for sample, base in zip(samples_s, base_s, strict=True)])

    @property
    def margin_s(self) -> float:
        """The possible error of the median: it is smaller in about 95 % of all cases.

        The notch of a box plot: 1.57 times the distance of the quartiles, divided by the root of the number of samples (McGill,
            Tukey
        and Larsen, Variations of Box Plots, 1978).
        """
        return 1.57 * (self.p75_s - self.p25_s) / math.sqrt(self.count)

    @property
    def is_lost_in_noise(self) -> bool:
        """Whether the median may be 0 or below, so that nothing is known about a cost."""
        return self.median_s <= self.margin_s

    def in_ms(self) -> str:
        """Median and quartiles as a cell of a table."""
        return self._in(1e3)

    def in_us(self) -> str:
        """Median and quartiles in microseconds."""
        return self._in(1e6)

    def as_ratio(self) -> str:
        """For samples that are ratios, not seconds: the median, its possible error, and the quartiles."""
        return f"{self.median_s:.3f} +- {self.margin_s:.3f} [{self.p25_s:.3f} {self.p75_s:.3f}]"

    def _in(self, per_second: float) -> str:
        return f"{per_second * self.median_s:.2f} [{per_second * self.p25_s:.2f} {per_second * self.p75_s:.2f}]"


def ratio_of_costs(ours: Summary, theirs: Summary) -> float | None:
    """The ratio of the medians; None if either is lost in noise."""
    return None if ours.is_lost_in_noise or theirs.is_lost_in_noise else ours.median_s / theirs.median_s


@dataclass(frozen=True)
class GeometricMean:
    """A mean over the cases whose ratio is known.

    Attributes:
        value: None if no ratio is known.
        cases: the number of cases in all.
        left_out: the names of cases without a known ratio.
    """

    value: float | None
    cases: int
    left_out: tuple[str, ...]

    @classmethod
    def of(cls, ratios: Mapping[str, float | None]) -> GeometricMean:
        """The mean of ratios above 0, given by the name of the case."""
        known = [ratio for ratio in ratios.values() if ratio is not None]
        mean = math.exp(sum(map(math.log, known)) / len(known)) if known else None
        return cls(mean, len(ratios), tuple(name for name, ratio in ratios.items() if ratio is None))

    def basis(self) -> str:
        """Which cases the mean includes, and which it leaves out."""
        told = f"over {self.cases - len(self.left_out)} of {self.cases} cases"
        return f"{told}, lost in noise: {'; '.join(self.left_out)}" if self.left_out else told


def as_times(ratio: float | None) -> str:
    """A ratio as a cell of a table."""
    return "-" if ratio is None else f"{ratio:.2f}"
