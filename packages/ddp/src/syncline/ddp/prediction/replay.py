"""Compute the duration of a step with faster or slower reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from syncline.reducer import GradientSpec, assign_buckets


@dataclass(frozen=True)
class Gradient:
    """One gradient: its shape, its size in bytes, and the seconds from the start of the step until it was computed."""

    shape: tuple[int, ...]
    nbytes: float
    came_s: float


@dataclass(frozen=True)
class ReadyBucket:
    """A bucket: its gradients, and its earliest possible start in seconds from the start of the step."""

    gradients: tuple[Gradient, ...]
    ready_s: float

    @property
    def nbytes(self) -> float:
        """The size of all gradients of the bucket."""
        return sum(gradient.nbytes for gradient in self.gradients)


@dataclass(frozen=True)
class Workload:
    """A step without its communication.

    Attributes:
        buckets: the buckets, in the order of their start.
        backward_s: the time of the last gradient, in seconds from the start of the step.
        rest_s: the seconds of the rest of the step after the wait for the buckets, such as the optimizer.
    """

    buckets: tuple[ReadyBucket, ...]
    backward_s: float
    rest_s: float

    @property
    def alone_s(self) -> float:
        """The seconds of a step on one rank."""
        return self.backward_s + self.rest_s


@dataclass(frozen=True)
class Prediction:
    """The duration of a step and its exposed communication, in seconds."""

    step_s: float
    exposed_s: float


def replay(workload: Workload, reduce_s: Callable[[ReadyBucket], float]) -> Prediction:
    """Predict the duration of a step that reduces one bucket after the other, each as early as possible.

    `reduce_s` returns the seconds of a bucket's reduction.
    """
    free = 0.0
    for bucket in workload.buckets:
        free = max(free, bucket.ready_s) + reduce_s(bucket)
    exposed = max(0.0, free - workload.backward_s)
    return Prediction(workload.backward_s + exposed + workload.rest_s, exposed)


def spread(shapes: Sequence[tuple[int, ...]], nbytes: Sequence[float], since_s: float, until_s: float) -> tuple[Gradient, ...]:
    """Return a bucket's gradients, each with the estimated time at which backward has computed the gradient.

    The estimate: backward computes an equal number of bytes in each second.

    Args:
        shapes: the gradients' shapes, in the order in which the gradients come.
        nbytes: the gradients' sizes in bytes, in the order of `shapes`.
        since_s: when backward can begin with the first gradient, in seconds from the start of the step.
        until_s: the time of the last gradient, in seconds from the start of the step.
    """
    total, before, found = sum(nbytes), 0.0, []
    for shape, size in zip(shapes, nbytes, strict=True):
        before += size
        found.append(Gradient(shape, size, since_s + (until_s - since_s) * (before / total if total else 1.0)))
    return tuple(found)


def rebucket(workload: Workload, caps_bytes: Sequence[int]) -> Workload:
    """Put a workload's gradients into buckets of other sizes, as the reducer would do it.

    `caps_bytes` has the size limits of the first, second, ... bucket. The last limit also applies to all further buckets.
    """
    gradients = [gradient for bucket in workload.buckets for gradient in bucket.gradients]
    assigned = assign_buckets([GradientSpec(int(one.nbytes)) for one in gradients], caps_bytes, range(len(gradients)))
    buckets = []
    for bucket in assigned:
        members = tuple(gradients[index] for index in bucket.indices)
        buckets.append(ReadyBucket(members, max(one.came_s for one in members)))
    return Workload(tuple(buckets), workload.backward_s, workload.rest_s)
