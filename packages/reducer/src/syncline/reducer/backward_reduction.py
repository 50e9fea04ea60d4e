"""The reductions of one backward."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext

from syncline.collectives import ProcessGroup, Work

from .bucket_reduction import BucketReduction, PendingReduction
from .finalize import AnyFuture, GloballyUnused, OnDelivery, finalize
from .sparse_bucket import AnyBucket
from .statistics import BucketTimes, IterationStatistics
from .usage import UsageModel


class BackwardReduction:
    """Issues the collectives of one backward, and waits for them when the backward ends.

    Call the methods on the thread of this backward.

    Args:
        buckets: the reducer's buckets, in the order in which they are reduced.
        usage: the usage model. Before `start` or `start_empty`, the caller calls `usage.begin` or `usage.shadow_backward`.
        reduction: starts the reduction of a bucket.
        group: the group whose ranks average their gradients.
        statistics: the object that stores the times of this backward.
        mark: identifies this backward; see Note [Which backward is reduced] in `sync_policy`.
    """

    def __init__(
        self,
        buckets: Sequence[AnyBucket],
        usage: UsageModel,
        reduction: BucketReduction,
        group: ProcessGroup,
        statistics: IterationStatistics,
        mark: str,
    ) -> None:
        self._mark = mark
        self._buckets = buckets
        self._usage = usage
        self._reduction = reduction
        self._group = group
        self._statistics = statistics
        self._started: list[PendingReduction] = []
        self._verification: Work | None = None
        self._left_alone: GloballyUnused = usage.globally_unused

    def start(self, numbers: range, *, is_last: bool) -> None:
        """Copy gradients into these buckets, and issue the buckets' reductions. Leave out buckets that no rank uses.

        `is_last` says whether these are the last buckets of this backward. See Note [Buckets start in order] in `readiness`.
        """
        began = time.perf_counter()
        if is_last:
            self._statistics.last_gradient = began
        for number in numbers:
            self._start(number)
        if is_last:
            self._start_agreements()
            self._statistics.waited_s += time.perf_counter() - began

    def start_empty(self) -> None:
        """Issue the collectives of a backward, with zeros as gradients. This rank's own gradients stay unchanged."""
        self._left_alone = frozenset
        for number in range(len(self._buckets)):
            self._start(number, empty=True)
        self._start_agreements()

    def finish(self, on_delivery: OnDelivery | None = None, extra_futures: Sequence[AnyFuture] = ()) -> None:
        """Wait for all reductions and deliver the gradients; see `finalize`."""
        finalize(
            self._started,
            self._statistics,
            self._left_alone,
            on_delivery=on_delivery,
            extra_futures=extra_futures,
            verification=lambda: self._group.agree_on_calls() if self._compares_at_end() else self._verification,
        )

    def _start(self, number: int, *, empty: bool = False) -> None:
        bucket = self._buckets[number]
        # All ranks agree that no rank uses this bucket, so all ranks leave the bucket out.
        if self._usage.may_skip(bucket.indices):
            return
        ready = time.perf_counter()
        if empty:
            bucket.collect_nothing()
        else:
            bucket.collect(self._usage.locally_unused(bucket.indices))
        times = BucketTimes(bucket.nbytes, ready, time.perf_counter(), number=number)
        self._statistics.buckets.append(times)
        # Buckets start in order, so a mark on the first bucket is enough for all buckets.
        with nullcontext() if self._started else self._group.marked(self._mark):
            self._started.append(self._reduction.start(bucket, number, lambda: self._is_last(number), times))

    def _is_last(self, number: int) -> bool:
        return all(self._usage.may_skip(bucket.indices) for bucket in self._buckets[number + 1 :])

    def _start_agreements(self) -> None:
        """Start the collectives by which the ranks agree at the end of a backward.

        Every rank calls this method after its last bucket.
        """
        self._usage.sync_used_map()
        # If the ranks compare their calls only at the end of backward, `finish` starts the comparison.
        if not self._compares_at_end():
            self._verification = self._group.agree_on_calls(async_op=True)

    def _compares_at_end(self) -> bool:
        # A hook's callbacks may issue collectives until the end of backward. Without a total order, such a collective may come
        # before the comparison on one rank, and after the comparison on another rank.
        return self._reduction.hook is not None and not self._group.has_total_order
