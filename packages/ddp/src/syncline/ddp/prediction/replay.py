"""Replay: when a step would end if its buckets were reduced at another price. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from syncline.reducer import GradientSpec, assign_buckets


@dataclass(frozen=True)
class Gradient:
    """One gradient: its shape and bytes, and when it came, in seconds from the start of the step."""

    shape: tuple[int, ...]
    nbytes: float
    came_s: float


@dataclass(frozen=True)
class ReadyBucket:
    """A bucket: its gradients, and when it could be reduced, in seconds from the start of the step."""

    gradients: tuple[Gradient, ...]
    ready_s: float

    @property
    def nbytes(self) -> float:
        """Of all its gradients."""
        return sum(gradient.nbytes for gradient in self.gradients)


@dataclass(frozen=True)
class Workload:
    """What a step costs without communication; seconds from the start of the step.

    Attributes:
        buckets: in the order of their start.
        backward_s: when backward had nothing left to compute.
        rest_s: how long the optimizer takes, and what else follows the wait.
    """

    buckets: tuple[ReadyBucket, ...]
    backward_s: float
    rest_s: float

    @property
    def alone_s(self) -> float:
        """A step on one rank."""
        return self.backward_s + self.rest_s


@dataclass(frozen=True)
class Prediction:
    """A step's duration, and how much of it is exposed communication, in seconds."""

    step_s: float
    exposed_s: float


def replay(workload: Workload, reduce_s: Callable[[ReadyBucket], float]) -> Prediction:
    """One bucket is reduced after the other, each as soon as it is ready.

    Args:
        workload: of a rank.
        reduce_s: the seconds of a bucket's reduction.
    """
    free = 0.0
    for bucket in workload.buckets:
        free = max(free, bucket.ready_s) + reduce_s(bucket)
    exposed = max(0.0, free - workload.backward_s)
    return Prediction(workload.backward_s + exposed + workload.rest_s, exposed)


def spread(shapes: Sequence[tuple[int, ...]], nbytes: Sequence[float], since_s: float, until_s: float) -> tuple[Gradient, ...]:
    """The gradients of a bucket. They are taken to come evenly, byte by byte, for a trace knows only when the last one came.

    Args:
        shapes: of each, in the order in which they come.
        nbytes: of each.
        since_s: the second of the step from which on they come.
        until_s: when the last one has come.
    """
    total, before, found = sum(nbytes), 0.0, []
    for shape, size in zip(shapes, nbytes, strict=True):
        before += size
        found.append(Gradient(shape, size, since_s + (until_s - since_s) * (before / total if total else 1.0)))
    return tuple(found)


def rebucket(workload: Workload, caps_bytes: Sequence[int]) -> Workload:
    """The same gradients in buckets of other sizes, assigned as the reducer does it.

    Args:
        workload: as traced.
        caps_bytes: of the first, second, ... bucket, the last one of all further ones.
    """
    gradients = [gradient for bucket in workload.buckets for gradient in bucket.gradients]
    assigned = assign_buckets([GradientSpec(int(one.nbytes)) for one in gradients], caps_bytes, range(len(gradients)))
    buckets = []
    for bucket in assigned:
        members = tuple(gradients[index] for index in bucket.indices)
        buckets.append(ReadyBucket(members, max(one.came_s for one in members)))
    return Workload(tuple(buckets), workload.backward_s, workload.rest_s)
