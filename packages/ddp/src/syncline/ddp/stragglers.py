"""Report after every N steps for which rank the other ranks wait most often (the straggler)."""

from __future__ import annotations

import logging
import numbers
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from syncline.collectives import InvalidArgumentError, ProcessGroup
from syncline.collectives.internal import message_device
from syncline.reducer import IterationStatistics

EVERY_VARIABLE = "SYNCLINE_STRAGGLERS"

logger = logging.getLogger("syncline.ddp")


@dataclass(frozen=True)
class Straggler:
    """The rank that was last in the most steps: its last gradient came later than those of all other ranks.

    Attributes:
        rank: the straggler's rank in the group.
        times_last: the number of steps in which this rank was last.
        steps: the number of all steps.
        late_s: the median of this rank's delays in seconds, over the steps in which this rank was last. A delay is the time
            from the median of the other ranks' last gradients to this rank's last gradient.
    """

    rank: int
    times_last: int
    steps: int
    late_s: float

    def __str__(self) -> str:
        late_ms = 1e3 * self.late_s
        return f"rank {self.rank} was last in {self.times_last} of {self.steps} steps, by {late_ms:.3g} ms in the median"


def find_straggler(steps: Sequence[Sequence[float]]) -> Straggler:
    """Return the rank that was last in the most steps. If several ranks qualify, return the one with the longest delays.

    Args:
        steps: for each step and each rank, the time of the last gradient in seconds. All ranks measure from the same moment. At
            least one step and two ranks.
    """
    last = [max(range(len(times)), key=times.__getitem__) for times in steps]
    late = {
        rank: [_lateness(times, rank) for times, slowest in zip(steps, last, strict=True) if slowest == rank] for rank in last
    }
    counts = Counter(last)
    rank = max(counts, key=lambda one: (counts[one], statistics.median(late[one])))
    return Straggler(rank, counts[rank], len(steps), statistics.median(late[rank]))


def _lateness(times: Sequence[float], rank: int) -> float:
    return times[rank] - statistics.median(time for other, time in enumerate(times) if other != rank)


class StragglerWatch:
    """Makes rank 0 log, after every `every` steps, which rank was the `Straggler` in these steps. The logger is `syncline.ddp`.

    The time of a step includes reading data, forward and backward. All ranks measure from the same moment, the end of the
    previous step, so their clocks need no comparison.

    Cost: for every `every` steps, an all-gather of 8 `every` bytes from each rank.
    """

    def __init__(self, group: ProcessGroup, every: int) -> None:
        self._group = group
        self.every = every
        self._common: float | None = None
        self._times: list[float] = []

    def note_step(self, seen: IterationStatistics) -> None:
        """Store the time of a step's last gradient. Call this method after each step's backward.

        The first call stores no time. A call that stores the last of `every` times is a collective.
        """
        # No step ends before the first step, so the ranks have no common moment from which to measure.
        if self._common is not None:
            self._times.append(seen.last_gradient - self._common)
        self._common = seen.finished
        if len(self._times) == self.every:
            self._say()
            self._times = []

    def _say(self) -> None:
        own = torch.tensor(self._times, dtype=torch.float64, device=message_device(self._group))
        times = [torch.empty_like(own) for _ in range(self._group.size)]
        self._group.all_gather(times, own)
        if self._group.rank == 0 and self._group.size > 1:
            # Log a warning, because a warning is shown even if the script sets up no logger.
            logger.warning("%s", find_straggler(torch.stack(times, dim=1).tolist()))


def every_from(environ: Mapping[str, str], variable: str = EVERY_VARIABLE) -> int | None:
    """Return the number of steps in an environment variable, or None if the variable is empty or not set.

    Raises:
        InvalidArgumentError: the text is not a whole number of at least 1.
    """
    text = environ.get(variable, "")
    if not text:
        return None
    return checked_every(int(text) if text.strip().isdecimal() else text, variable)


def checked_every(every: object, name: str) -> int:
    """Check a number of steps, and return it.

    Raises:
        InvalidArgumentError: `every` is not a whole number of at least 1. The text contains `name`.
    """
    if not isinstance(every, numbers.Integral) or every < 1:
        raise InvalidArgumentError(f"{name}: expected a number of steps of at least 1, found {every!r}")
    return int(every)
