"""Finalize: wait for the buckets, write their results back. The one place of the reducer that blocks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from .bucket import Bucket
from .statistics import BucketTimes, IterationStatistics


class Flight:
    """A bucket whose reduction was issued."""

    def __init__(self, bucket: Bucket, future: torch.futures.Future[Any], times: BucketTimes) -> None:
        self.bucket = bucket
        self.times = times
        self._future = future
        future.add_done_callback(self._note_end)

    def wait(self) -> object:
        """Block until the reduction is over, and return its result: the flat tensor, if the hook keeps its contract."""
        value = self._future.wait()
        self._note_end(self._future)
        return value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value

    def _note_end(self, _: torch.futures.Future[Any]) -> None:
        if self.times.finished is None:
            self.times.finished = time.perf_counter()


def finalize(flights: Sequence[Flight], statistics: IterationStatistics, *, write_back: bool) -> None:
    """Wait for each bucket in the order of their start, and hand its result to the parameters.

    Args:
        flights: the buckets in flight.
        statistics: gets the seconds spent waiting, and the end.
        write_back: copy into the parameters' own gradients; False if these are views of the buckets.
    """
    for flight in flights:
        began = time.perf_counter()
        result = flight.wait()
        statistics.waited_s += time.perf_counter() - began
        flight.bucket.accept(result)
        if write_back:
            flight.bucket.write_back()
    statistics.finished = time.perf_counter()
