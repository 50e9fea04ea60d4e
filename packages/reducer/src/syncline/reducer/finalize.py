"""Finalize: wait for the buckets, write their results back. The one place of the reducer that blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeAlias

import torch

from syncline.collectives import ProcessGroup, ReduceOp

from .bucket import Bucket
from .grad_bucket import GradBucket
from .sparse_bucket import SparseBucket
from .statistics import BucketTimes, IterationStatistics

Untouched: TypeAlias = Callable[[Collection[int]], Collection[int]]


class Flight:
    """A bucket whose reduction was issued.

    Args:
        bucket: the bucket.
        future: of the reduction.
        times: gets the moment of its end.
        shown: what the hook was given; None without a hook.
    """

    def __init__(
        self,
        bucket: Bucket | SparseBucket,
        future: torch.futures.Future[Any],
        times: BucketTimes,
        shown: GradBucket | None = None,
    ) -> None:
        self.bucket = bucket
        self.times = times
        self._future = future
        self._shown = shown
        future.add_done_callback(self._note_end)

    def wait(self) -> object:
        """Block until the reduction is over, and return its result: the flat tensor, if the hook keeps its contract."""
        value = self._future.wait()
        self._note_end(self._future)
        return self._as_given(value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value)

    def _as_given(self, result: object) -> object:
        """A hook that has put a buffer of another dtype in place, and left it there, may return that dtype (torch's do)."""
        if self._shown is None or not isinstance(result, torch.Tensor) or result.dtype is not self._shown.buffer().dtype:
            return result
        return result.to(self.bucket.buffer.dtype)

    def _note_end(self, _: torch.futures.Future[Any]) -> None:
        if self.times.finished is None:
            self.times.finished = time.perf_counter()


class LateFlight:
    """A sparse bucket on a torch.distributed group: reduced when its turn to be waited for has come.

    A sparse all_reduce continues in a callback, and a torch group gives what a callback issues no defined place among the
    collectives of other threads (see `TorchGroup`). In finalize all ranks have issued everything else.
    """

    def __init__(self, bucket: SparseBucket, group: ProcessGroup, times: BucketTimes) -> None:
        self.bucket = bucket
        self.times = times
        self._group = group

    def wait(self) -> object:
        """Reduce it now."""
        self._group.all_reduce(self.bucket.buffer, ReduceOp.AVG)
        self.times.finished = time.perf_counter()
        return self.bucket.buffer


def finalize(flights: Sequence[Flight | LateFlight], statistics: IterationStatistics, untouched: Untouched) -> None:
    """Wait for each bucket in the order of their start, and hand its result to the parameters.

    Args:
        flights: the buckets in flight.
        statistics: gets beginning, end and the seconds in between.
        untouched: of some parameters (by index), those whose gradients shall stay as they are; may wait.
    """
    statistics.finalize_started = time.perf_counter()
    for flight in flights:
        flight.bucket.accept(flight.wait())
        flight.bucket.deliver(untouched(flight.bucket.indices))
    statistics.finished = time.perf_counter()
    statistics.waited_s += statistics.finished - statistics.finalize_started
