"""How a bucket is reduced: by all_reduce, or by a communication hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from syncline.collectives import MisuseError, ProcessGroup, ReduceOp, TorchGroup, premul_sum
from syncline.collectives.internal import Reduction

from .flight import AnyBucket, CollectiveFlight, Flight, HookFlight, LateFlight, NamingParameters
from .grad_bucket import GradBucket
from .sparse_bucket import SparseBucket
from .statistics import BucketTimes

if TYPE_CHECKING:
    CommunicationHook: TypeAlias = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
else:
    CommunicationHook = Callable


class BucketReduction:
    """Starts the reduction of buckets over a group.

    Attributes:
        hook: what reduces a bucket; None for all_reduce.
        hook_state: the hook's first argument.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.hook: CommunicationHook | None = None
        self.hook_state: Any = None
        self._group = group
        self._op: Reduction = ReduceOp.AVG

    def divide_by(self, count: int | None) -> None:
        """Divide sums by this number instead of the number of ranks; None for that. A hook divides as it likes."""
        self._op = ReduceOp.AVG if count in (None, self._group.size) else premul_sum(1 / (count or 1))

    def start(self, bucket: AnyBucket, number: int, is_last: Callable[[], bool], times: BucketTimes) -> Flight:
        """Issue the reduction of a bucket; every rank does, for the same buckets in the same order.

        Whether it is the last is asked for a hook only, because the answer may have to be waited for.
        """
        with NamingParameters(bucket):
            if self.hook is not None:
                shown = GradBucket(bucket, number, is_last(), self._group)
                return HookFlight(bucket, times, self._future(self.hook, shown), shown, self._group)
            if isinstance(bucket, SparseBucket) and isinstance(self._group, TorchGroup):
                return LateFlight(bucket, times, self._group, self._op)
            return CollectiveFlight(bucket, times, self._group.all_reduce(bucket.buffer, self._op, async_op=True))

    def _future(self, hook: CommunicationHook, bucket: GradBucket) -> torch.futures.Future[Any]:
        future = hook(self.hook_state, bucket)
        if not isinstance(future, torch._C.Future):  # the base class: what Future.then() returns
            raise MisuseError(
                f"a communication hook must return a torch.futures.Future of the reduced bucket, found "
                f"{type(future).__name__}; see get_future() of a Work"
            )
        return future
