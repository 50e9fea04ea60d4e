"""Wait for the buckets at the end of backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from syncline.collectives import Work

from .bucket_reduction import PendingReduction
from .error_messages import naming_parameters
from .sparse_bucket import AnyBucket
from .statistics import IterationStatistics

if TYPE_CHECKING:
    AnyFuture: TypeAlias = torch.futures.Future[Any]
else:
    AnyFuture = torch.futures.Future

GloballyUnused: TypeAlias = Callable[[Collection[int]], Collection[int]]
OnDelivery: TypeAlias = Callable[[Sequence[torch.nn.Parameter]], None]


def finalize(
    reductions: Sequence[PendingReduction],
    statistics: IterationStatistics,
    globally_unused: GloballyUnused,
    *,
    on_delivery: OnDelivery | None = None,
    extra_futures: Sequence[AnyFuture] = (),
    verification: Callable[[], Work | None] = lambda: None,
) -> None:
    """Wait for the buckets, in the order of their start, and give the parameters their reduced gradients.

    Args:
        reductions: the reductions of the buckets, in the order of their start.
        statistics: the object that stores the times of this backward.
        globally_unused: a function that takes indices of parameters, and returns those whose gradients stay unchanged. The
            function may wait for other ranks.
        on_delivery: a function that is called for each bucket, with the parameters that now have their reduced gradients.
        extra_futures: further futures to wait for.
        verification: a function that is called last, and returns the work by which the ranks compare their calls.

    Raises:
        DisagreementError: the ranks called different collectives.
    """
    statistics.finalize_started = time.perf_counter()
    for reduction in reductions:
        bucket = reduction.bucket
        bucket.accept(reduction.wait())
        untouched = globally_unused(bucket.indices)
        # A hook that has seen the bucket's memory may read or write it later, so no gradient may lie there.
        bucket.deliver(untouched, may_alias=not reduction.shows_bucket)
        if on_delivery is not None:
            on_delivery(_touched(bucket, untouched) if untouched else bucket.parameters)
    # For example, the futures of a hook that synchronises buffers.
    for future in extra_futures:
        future.wait()
    with naming_parameters(lambda: [name for reduction in reductions for name in reduction.bucket.names]):
        # None: the group compares every call by itself.
        work = verification()
        if work is not None:
            work.wait()
    statistics.finished = time.perf_counter()
    statistics.waited_s += statistics.finished - statistics.finalize_started


def _touched(bucket: AnyBucket, untouched: Collection[int]) -> list[torch.nn.Parameter]:
    members = zip(bucket.indices, bucket.parameters, strict=True)
    return [parameter for index, parameter in members if index not in untouched]
