"""How long the steps take, and how much of that is waiting for communication."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from syncline.collectives import ProcessGroup, exchange_objects
from syncline.ddp import DistributedDataParallel

WARM_UP_STEPS = 5


@dataclass
class Measurement:
    """One rank's steps: seconds that each took, and seconds in which its backward stood still."""

    step_s: list[float] = field(default_factory=list)
    waited_s: list[float] = field(default_factory=list)
    training_s: float = 0.0

    @contextmanager
    def step(self, model: DistributedDataParallel) -> Iterator[None]:
        """Measure the training step that runs inside."""
        began = time.perf_counter()
        yield
        self.step_s.append(time.perf_counter() - began)
        self.waited_s.append(model.iteration_statistics().waited_s)


def gather_measurements(own: Measurement, batch_size: int, group: ProcessGroup) -> dict[str, float]:
    """Put all ranks' measurements together, as fields of the report. A collective.

    The first steps, in which memory is allocated and buckets are rebuilt, count in the time of the training only.
    """
    everyone: list[Measurement] = exchange_objects(own, group=group)
    step_s = [value for rank in everyone for value in _after_warm_up(rank.step_s)]
    waited_s = [value for rank in everyone for value in _after_warm_up(rank.waited_s)]
    training_s = max(rank.training_s for rank in everyone)
    return {
        "training_time_s": training_s,
        "images_per_second": len(own.step_s) * batch_size / training_s,
        "step_time_median_ms": 1e3 * statistics.median(step_s),
        "waiting_share_of_step_percent": 100 * sum(waited_s) / sum(step_s),
    }


def _after_warm_up(values: list[float]) -> list[float]:
    """All but the first few; all, if there are no more."""
    return values[WARM_UP_STEPS:] or values
