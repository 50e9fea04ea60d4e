"""The times of the events of an iteration."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class BucketTimes:
    """The times of one bucket in one iteration, in seconds of `time.perf_counter()`.

    Attributes:
        nbytes: the size of the bucket's buffer, in bytes.
        ready: the earliest time when the bucket could start: its last gradient had come, and all earlier buckets had started.
        started: the time when the bucket's reduction was issued.
        finished: the time when the bucket's reduction ended. None before the end. For CUDA tensors without a communication
            hook, the time when the reducer's wait for the reduction returned.
        number: the bucket's position in `Reducer.buckets`.
    """

    nbytes: int
    ready: float
    started: float
    finished: float | None = None
    number: int = 0

    def note_end(self, _: object = None) -> None:
        """Set `finished` to the present time, because the reduction has ended. Further calls do nothing."""
        if self.finished is None:
            self.finished = time.perf_counter()


@dataclass
class IterationStatistics:
    """The times of one iteration, in seconds of `time.perf_counter()`.

    Attributes:
        forward_started: the time of the call of `prepare_for_backward`. For a second backward of one forward, the time when
            this backward began.
        forward_ended: the time when the module's forward returned, as set by DistributedDataParallel. 0.0 without a wrapper.
        backward_started: the time when the first gradient was ready.
        last_gradient: the time when the last gradient was ready.
        finalize_started: the time when the wait for the last reductions began.
        finished: the time when all parameters had their reduced gradients.
        waited_s: the exposed communication: the seconds that the reduction added to backward after the last gradient was ready,
            including copies.
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
