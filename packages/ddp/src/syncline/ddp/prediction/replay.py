"""Replay: when a step would end if its buckets were reduced at another price. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReadyBucket:
    """A bucket: its bytes, and when its last gradient came, in seconds from the start of the step."""

    nbytes: float
    ready_s: float


@dataclass(frozen=True)
class Workload:
    """What a step costs without communication; seconds from the start of the step.

    Attributes:
        buckets: in the order of their start.
        backward_s: when the last gradient came.
        rest_s: how long the optimizer takes, and what else follows the wait.
    """

    buckets: tuple[ReadyBucket, ...]
    backward_s: float
    rest_s: float


@dataclass(frozen=True)
class Prediction:
    """A step's duration, and how much of it is exposed communication, in seconds."""

    step_s: float
    exposed_s: float


def replay(workload: Workload, reduce_s: Callable[[float], float]) -> Prediction:
    """One bucket is reduced after the other, each as soon as it is ready.

    Args:
        workload: of a rank.
        reduce_s: from a bucket's bytes to the seconds of its reduction.
    """
    free = 0.0
    for bucket in workload.buckets:
        free = max(free, bucket.ready_s) + reduce_s(bucket.nbytes)
    exposed = max(0.0, free - workload.backward_s)
    return Prediction(workload.backward_s + exposed + workload.rest_s, exposed)


def rebucket(buckets: Sequence[ReadyBucket], backward_started_s: float, cap_bytes: float) -> tuple[ReadyBucket, ...]:
    """The same gradients in buckets of another size.

    Between two traced buckets gradients are taken to come evenly, byte by byte: the trace does not say when each came.

    Args:
        buckets: as traced, in order.
        backward_started_s: when the first gradient could come.
        cap_bytes: of each bucket but the last, above 0.
    """
    total = sum(bucket.nbytes for bucket in buckets)
    whole = int(total // cap_bytes)
    ends = [cap_bytes * (number + 1) for number in range(whole)]
    if total - whole * cap_bytes > 1e-9 * total:
        ends.append(total)
    starts = [0.0, *ends[:-1]]
    return tuple(
        ReadyBucket(end - start, _came(buckets, backward_started_s, end)) for start, end in zip(starts, ends, strict=True)
    )


def _came(buckets: Sequence[ReadyBucket], backward_started_s: float, position: float) -> float:
    """When all bytes up to a position were there."""
    before, since = 0.0, backward_started_s
    for bucket in buckets:
        if position <= before + bucket.nbytes:
            return since + (bucket.ready_s - since) * (position - before) / bucket.nbytes
        before, since = before + bucket.nbytes, bucket.ready_s
    return since
