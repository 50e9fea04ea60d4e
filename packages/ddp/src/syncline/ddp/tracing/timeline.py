"""The steps of all ranks, with times of rank 0's clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .clock import ClockOffset
from .events import BucketLayout, StepEvent, ToClock
from .part import Header, Part

_UNKNOWN_DRIFT = 50e-6
"""The assumed drift of two clocks in seconds per second, if the offset was measured only once."""


@dataclass(frozen=True)
class RankTimeline:
    """The steps of one rank by number, with times of rank 0's clock.

    Attributes:
        layouts: the layouts of the buckets; see `Part`.
        error_s: the largest possible error of the times, in seconds. None if the rank's clock was never measured.
        epoch_s: `time.time()` of this rank's host minus rank 0's clock, in seconds.
    """

    header: Header
    layouts: tuple[tuple[BucketLayout, ...], ...]
    steps: dict[int, StepEvent]
    error_s: float | None
    epoch_s: float


@dataclass(frozen=True)
class Timeline:
    """The steps of all ranks, with times of rank 0's clock.

    Attributes:
        ranks: the traced ranks, in ascending order.
        missing: the other ranks of the group.
    """

    ranks: tuple[RankTimeline, ...]
    missing: tuple[int, ...]

    @property
    def size(self) -> int:
        """The number of ranks that trained."""
        return self.ranks[0].header.size

    @property
    def steps(self) -> list[int]:
        """The steps that all ranks have traced, in ascending order."""
        return sorted(set.intersection(*(set(rank.steps) for rank in self.ranks)))

    @property
    def error_s(self) -> float | None:
        """The largest `error_s` of all ranks. None if the clock of a rank was never measured."""
        errors = [rank.error_s for rank in self.ranks]
        return None if None in errors else max(error for error in errors if error is not None)

    def of_step(self, number: int) -> list[StepEvent]:
        """Return one step on each rank, in the order of `ranks`."""
        return [rank.steps[number] for rank in self.ranks]


def merge(parts: Sequence[Part]) -> Timeline:
    """Merge the parts of at least one rank, sorted by rank, into a timeline."""
    present = {part.header.rank for part in parts}
    missing = tuple(rank for rank in range(parts[0].header.size) if rank not in present)
    return Timeline(tuple(map(_by_rank_0, parts)), missing)


def _by_rank_0(part: Part) -> RankTimeline:
    clock = clock_of(part.clocks)
    steps = {step.number: step.by(clock) for step in part.steps}
    epoch_s = part.header.epoch_s - (part.clocks[0].offset_s if part.clocks else 0.0)
    return RankTimeline(part.header, part.layouts, steps, error_of(part), epoch_s)


def clock_of(clocks: Sequence[ClockOffset]) -> ToClock:
    """Return a function that converts times of a rank's clock to rank 0's clock.

    The function is linear through the first and the last measurement.
    """
    if not clocks:
        # The clock was never measured: leave the times as they are.
        return lambda time: time
    first, last = clocks[0], clocks[-1]
    # With one measurement, the offset is known, but not the drift.
    if last.at <= first.at:
        return lambda time: time + first.offset_s
    slope = (last.offset_s - first.offset_s) / (last.at - first.at)
    return lambda time: time + first.offset_s + slope * (time - first.at)


def error_of(part: Part) -> float | None:
    """Return the largest possible error of a rank's times in seconds. None if the rank's clock was never measured."""
    if not part.clocks or part.header.rank == 0:
        return 0.0 if part.header.rank == 0 else None
    measured = max(clock.error_s for clock in part.clocks)
    if len(part.clocks) > 1 or not part.steps:
        return measured
    return measured + _UNKNOWN_DRIFT * max(0.0, part.steps[-1].finished - part.clocks[0].at)
