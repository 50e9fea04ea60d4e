"""Finalize: wait for the buckets, write their results back. The one place of the reducer that blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .flight import AnyBucket, Flight
from .statistics import IterationStatistics

if TYPE_CHECKING:
    AnyFuture: TypeAlias = torch.futures.Future[Any]
else:
    AnyFuture = torch.futures.Future

Untouched: TypeAlias = Callable[[Collection[int]], Collection[int]]
Delivered: TypeAlias = Callable[[Sequence[torch.nn.Parameter]], None]


def finalize(
    flights: Sequence[Flight],
    statistics: IterationStatistics,
    untouched: Untouched,
    *,
    delivered: Delivered | None = None,
    others: Sequence[AnyFuture] = (),
) -> None:
    """Wait for each bucket in the order of their start, and hand its result to the parameters.

    Args:
        flights: the buckets in flight.
        statistics: gets beginning, end and the seconds in between.
        untouched: of some parameters (by index), those whose gradients shall stay as they are; may wait.
        delivered: told the parameters of each bucket that have their reduced gradients now, while later buckets are still
            in flight.
        others: what else shall be over when backward is.
    """
    statistics.finalize_started = time.perf_counter()
    for flight in flights:
        flight.bucket.accept(flight.wait())
        kept = untouched(flight.bucket.indices)
        flight.bucket.deliver(kept, may_lend=not flight.shows_bucket)
        if delivered is not None:
            delivered(_others(flight.bucket, kept) if kept else flight.bucket.parameters)
    for future in others:
        future.wait()
    statistics.finished = time.perf_counter()
    statistics.waited_s += statistics.finished - statistics.finalize_started


def _others(bucket: AnyBucket, kept: Collection[int]) -> list[torch.nn.Parameter]:
    members = zip(bucket.indices, bucket.parameters, strict=True)
    return [parameter for index, parameter in members if index not in kept]
