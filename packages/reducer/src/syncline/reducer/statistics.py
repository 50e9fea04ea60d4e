"""What happened in an iteration, and when."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class BucketTimes:
    """When one bucket was ready, started and finished; seconds of `time.perf_counter()`.

    Attributes:
        nbytes: size of its buffer.
        ready: it could start: its last gradient was there, and all earlier buckets had started.
        started: its reduction was issued.
        finished: its reduction was over, or None while it is not.
        number: which bucket it was, by `Reducer.buckets`.
    """

    nbytes: int
    ready: float
    started: float
    finished: float | None = None
    number: int = 0

    def note_end(self, _: object = None) -> None:
        """The reduction is over, if nobody has said so before."""
        if self.finished is None:
            self.finished = time.perf_counter()


@dataclass
class IterationStatistics:
    """One iteration; all times are seconds of `time.perf_counter()`.

    Attributes:
        forward_started: `prepare_for_backward` was called; a second backward of one forward has no forward of its own, and
            this is when it began.
        forward_ended: the module's forward returned; 0.0 if nobody said so (DistributedDataParallel does).
        backward_started: the first gradient was ready.
        last_gradient: the last gradient was ready: from here on nothing is computed that communication could hide behind.
        finalize_started: backward had nothing left to compute.
        finished: all reduced gradients were written back.
        waited_s: seconds that backward stood still for the reduction once the last gradient was there (the exposed part): to
            start the last buckets, to wait, and to write back. What else autograd computed in between does not count.
        buckets: one for each bucket, in the order of their start.
    """

    forward_started: float
    forward_ended: float = 0.0
    backward_started: float = 0.0
    last_gradient: float = 0.0
    finalize_started: float = 0.0
    finished: float = 0.0
    waited_s: float = 0.0
    buckets: list[BucketTimes] = field(default_factory=list)
