"""The events of an iteration, with their times."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class BucketTimes:
    """When one bucket was ready, started and finished; seconds of `time.perf_counter()`.

    Attributes:
        nbytes: the size of the bucket's buffer, in bytes.
        ready: when the bucket could start, because its last gradient had come and all earlier buckets had started.
        started: when the bucket's reduction was issued.
        finished: when the bucket's reduction was over; None before that.
        number: the bucket's position in `Reducer.buckets`.
    """

    nbytes: int
    ready: float
    started: float
    finished: float | None = None
    number: int = 0

    def note_end(self, _: object = None) -> None:
        """Note that the reduction is over. Only the first call counts."""
        if self.finished is None:
            self.finished = time.perf_counter()


@dataclass
class IterationStatistics:
    """The times of one iteration, in seconds of `time.perf_counter()`.

    Attributes:
        forward_started: when `prepare_for_backward` was called. For a second backward of one forward, the time when this
            backward began.
        forward_ended: when the module's forward returned. 0.0 if no wrapper sets this time (DistributedDataParallel sets it).
        backward_started: when the first gradient was ready.
        last_gradient: when the last gradient was ready. After this time, no computation is left that could hide communication.
        finalize_started: when backward had computed all gradients, and the wait for the last reductions began.
        finished: when all reduced gradients were written back.
        waited_s: the exposed communication: the seconds that backward stood still because of the reduction, after the last
            gradient was ready. This time includes the start of the last buckets, the wait, and the writing back, but not
            autograd's own work.
        buckets: the times of each bucket, in the order in which the buckets started.
    """

    forward_started: float
    forward_ended: float = 0.0
    backward_started: float = 0.0
    last_gradient: float = 0.0
    finalize_started: float = 0.0
    finished: float = 0.0
    waited_s: float = 0.0
    buckets: list[BucketTimes] = field(default_factory=list)
