"""Collectives by size, side by side: `syncline bench`, and which of the project's targets its figures reach.

python3 tools/dev.py bench collectives [--sizes 4 64M] [--json PATH] [--plot PATH]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from syncline.collectives.cli.bench import Measurement
from syncline.collectives.cli.bench.command import add_arguments, run
from syncline.collectives.cli.bench.results import size_in_words
from syncline.collectives.cli.bench.subjects import FLOOR, IN_WINDOW, RAW_MPI, TORCH_GLOO

from .targets import (
    IN_WINDOW_OVER_FLOOR,
    IN_WINDOW_OVER_GLOO,
    IN_WINDOW_OVER_RAW,
    SMALL_ABOVE_RAW,
    SMALL_OVER_GLOO,
    Target,
)

MIB = 2**20
BUCKET = 25 * MIB
IN_THE_WINDOW = f"mpi{IN_WINDOW}"

Compare = Callable[[float, float], float]


@dataclass(frozen=True)
class Rule:
    """The comparison of a target: two subjects, at sizes from `least` to `most` bytes."""

    target: Target
    ours: str
    other: str
    least: int
    most: int
    compare: Compare

    def verdict(self, medians: Mapping[str, Mapping[int, float]]) -> Iterator[str]:
        """Lines from seconds by subject and size; none if no such size was measured on both."""
        ours, other = (medians.get(name, {}) for name in (self.ours, self.other))
        sizes = [size for size in ours if size in other and self.least <= size <= self.most]
        if sizes:
            seen = [(self.compare(ours[size], other[size]), f"{self.ours}, {size_in_words(size)}") for size in sizes]
            yield self.target.verdict(*self.target.worst(seen))


def main(arguments: Sequence[str] | None = None) -> int:
    """Every rank of the job calls it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    return run(options, verdicts)


def verdicts(measured: Sequence[Measurement]) -> list[str]:
    """A line for each target that the figures cover, about its worst size. A pure function."""
    rows = [row for row in measured if row.collective == "all_reduce" and row.dtype == "float32" and row.samples_s]
    medians: dict[str, dict[int, float]] = {}
    for row in rows:
        medians.setdefault(row.backend, {})[row.size_bytes] = row.quartiles_s[1]
    return [line for rule in RULES for line in rule.verdict(medians)]


def _times_faster(ours_s: float, other_s: float) -> float:
    return other_s / ours_s


def _over(ours_s: float, other_s: float) -> float:
    return ours_s / other_s


def _above_us(ours_s: float, other_s: float) -> float:
    return 1e6 * (ours_s - other_s)


RULES = (
    Rule(IN_WINDOW_OVER_GLOO, IN_THE_WINDOW, TORCH_GLOO, BUCKET, BUCKET, _times_faster),
    Rule(IN_WINDOW_OVER_RAW, IN_THE_WINDOW, RAW_MPI, 4 * MIB, 64 * MIB, _times_faster),
    Rule(IN_WINDOW_OVER_FLOOR, IN_THE_WINDOW, FLOOR, BUCKET, BUCKET, _over),
    Rule(SMALL_ABOVE_RAW, "mpi", RAW_MPI, 0, 2**14, _above_us),
    Rule(SMALL_OVER_GLOO, "mpi", TORCH_GLOO, 0, 2**14, _times_faster),
)

if __name__ == "__main__":
    sys.exit(main())
