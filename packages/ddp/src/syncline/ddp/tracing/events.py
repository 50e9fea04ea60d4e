"""The events of a step on one rank. Times are in seconds. All times of an event come from the same clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

ToClock: TypeAlias = Callable[[float], float]
"""Converts a time of one clock to the time of another clock at the same moment."""


@dataclass(frozen=True)
class BucketLayout:
    """A bucket: its size in bytes, and the names and shapes of its parameters."""

    nbytes: int
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class BucketEvent:
    """One bucket in one step.

    Attributes:
        number: the bucket's position in the step's layout.
        nbytes: the size of the bucket's buffer.
        ready: the time when the bucket's last gradient had come, and all earlier buckets had started.
        started, finished: the times when the bucket's reduction was issued, and when it ended.
    """

    number: int
    nbytes: int
    ready: float
    started: float
    finished: float

    def by(self, clock: ToClock) -> BucketEvent:
        """Return this event with all times converted by `clock`."""
        return replace(self, ready=clock(self.ready), started=clock(self.started), finished=clock(self.finished))


@dataclass(frozen=True)
class CallEvent:
    """A collective, send or receive, except the all-reduces of buckets.

    Attributes:
        name: the call's name, such as "broadcast".
        group: the name of the group.
        nbytes: the size of the call's first tensor; 0 without a tensor.
        started, finished: the times of start and end. If the end is not known, both times are equal.
    """

    name: str
    group: str
    nbytes: int
    started: float
    finished: float

    def by(self, clock: ToClock) -> CallEvent:
        """Return this event with all times converted by `clock`."""
        return replace(self, started=clock(self.started), finished=clock(self.finished))


@dataclass(frozen=True)
class OptimizerEvent:
    """One call of an optimizer's `step`. `name` is the name of the optimizer's class."""

    name: str
    started: float
    finished: float

    def by(self, clock: ToClock) -> OptimizerEvent:
        """Return this event with all times converted by `clock`."""
        return replace(self, started=clock(self.started), finished=clock(self.finished))


@dataclass(frozen=True)
class StepEvent:
    """One step. The times have the same meaning as in `syncline.reducer.IterationStatistics`.

    Attributes:
        number: the step's number, counted from 1.
        layout: the index of the step's layout of buckets in `Part.layouts`.
        buckets: the buckets, in the order of their start.
        optimizers, calls: the events from the start of this step's forward to the start of the next step's forward.
    """

    number: int
    layout: int
    forward_started: float
    forward_ended: float
    backward_started: float
    last_gradient: float
    finalize_started: float
    finished: float
    waited_s: float
    buckets: tuple[BucketEvent, ...] = ()
    optimizers: tuple[OptimizerEvent, ...] = ()
    calls: tuple[CallEvent, ...] = ()

    def by(self, clock: ToClock) -> StepEvent:
        """Return this event with all times converted by `clock`."""
        return replace(
            self,
            forward_started=clock(self.forward_started),
            forward_ended=clock(self.forward_ended) if self.forward_ended else 0.0,
            backward_started=clock(self.backward_started),
            last_gradient=clock(self.last_gradient),
            finalize_started=clock(self.finalize_started),
            finished=clock(self.finished),
            buckets=tuple(bucket.by(clock) for bucket in self.buckets),
            optimizers=tuple(one.by(clock) for one in self.optimizers),
            calls=tuple(call.by(clock) for call in self.calls),
        )
