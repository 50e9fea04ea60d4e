"""Start the reduction of a bucket by all_reduce or a communication hook, and wait for the result."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from syncline.collectives import CollectiveTimeout, MisuseError, ProcessGroup, ReduceOp, Work, premul_sum
from syncline.collectives.internal import Reduction

from .error_messages import naming_parameters
from .grad_bucket import GradBucket
from .sparse_bucket import AnyBucket, SparseBucket
from .statistics import BucketTimes
from .torch_internals import FutureBase

if TYPE_CHECKING:
    CommunicationHook: TypeAlias = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
else:
    CommunicationHook = Callable

# If a collective of the hook times out, the collective's error says more than the error of `HookReduction`. So `HookReduction`
# waits up to this many seconds longer than the group's timeout.
_REPORT_S = 2.5


class BucketReduction:
    """Starts the reduction of buckets over a group.

    Attributes:
        hook: the communication hook that reduces each bucket. None: all_reduce.
        hook_state: the hook's first argument.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.hook: CommunicationHook | None = None
        self.hook_state: Any = None
        self._group = group
        self._op: Reduction = ReduceOp.AVG

    def divide_by(self, count: int | None) -> None:
        """Set the divisor of the sums. None means the number of ranks. The divisor has no effect if there is a hook."""
        self._op = ReduceOp.AVG if count in (None, self._group.size) else premul_sum(1 / (count or 1))

    def start(self, bucket: AnyBucket, number: int, is_last: Callable[[], bool], times: BucketTimes) -> PendingReduction:
        """Issue the reduction of a bucket. All ranks call this method for the same buckets in the same order.

        `is_last` is a function that returns whether this is the last bucket of the backward. The function may wait for other
        ranks. The method calls this function only if there is a hook.
        """
        with naming_parameters(lambda: bucket.names):
            # Check for a hook first: a hook also reduces sparse buckets, on any group.
            if self.hook is not None:
                shown = GradBucket(bucket, number, is_last(), self._group)
                return HookReduction(bucket, times, self._future(self.hook, shown), shown, self._group)
            # See `DeferredReduction`.
            if isinstance(bucket, SparseBucket) and not self._group.has_total_order:
                return DeferredReduction(bucket, times, self._group, self._op)
            return CollectiveReduction(bucket, times, self._group.all_reduce(bucket.buffer, self._op, async_op=True))

    def _future(self, hook: CommunicationHook, bucket: GradBucket) -> torch.futures.Future[Any]:
        future = hook(self.hook_state, bucket)
        # `Future.then()` returns an object of the base class, so do not require the public class.
        if not isinstance(future, FutureBase):
            raise MisuseError(
                f"a communication hook must return a torch.futures.Future of the reduced bucket, found "
                f"{type(future).__name__}; see get_future() of a Work"
            )
        return future


class PendingReduction(ABC):
    """A bucket whose reduction is issued. The end time of the reduction is written into `times`.

    Callbacks on the reduction must hold no reference to the group. A group of torch may run a callback on the group's own
    thread. If this callback drops the last reference to the group, the callback waits for ever.

    Attributes:
        shows_bucket: whether a hook has seen the bucket's memory, and may use this memory later.
    """

    shows_bucket = False

    def __init__(self, bucket: AnyBucket, times: BucketTimes) -> None:
        self.bucket = bucket
        self._times = times

    def wait(self) -> object:
        """Wait until the reduction is over. Return the reduced buffer, or the hook's result, which is not checked here.

        Raises:
            TransportError, DisagreementError: the group's error. The error's text also names the parameters.
        """
        with naming_parameters(lambda: self.bucket.names):
            return self._wait()

    @abstractmethod
    def _wait(self) -> object: ...


class CollectiveReduction(PendingReduction):
    """A bucket that a collective reduces in place."""

    def __init__(self, bucket: AnyBucket, times: BucketTimes, work: Work) -> None:
        super().__init__(bucket, times)
        self._work = work
        # On CUDA, `_wait` notes the end. A callback on CUDA needs a stream, an event and a pickle, and runs too early: when the
        # call is issued, not when the call is over.
        if bucket.buffer.is_cuda:
            return
        if work.is_completed():
            times.note_end()
        else:
            work.get_future().add_done_callback(times.note_end)

    def _wait(self) -> object:
        self._work.wait()
        self._times.note_end()
        return self.bucket.buffer


class HookReduction(PendingReduction):
    """A bucket that a communication hook reduces. `shown` is the hook's argument, and `future` is the hook's result."""

    shows_bucket = True

    def __init__(
        self, bucket: AnyBucket, times: BucketTimes, future: torch.futures.Future[Any], shown: GradBucket, group: ProcessGroup
    ) -> None:
        super().__init__(bucket, times)
        self._future = future
        self._shown = shown
        self._group = group
        self._is_over: threading.Event | None = None
        # A hook that has already finished needs no callback and no event.
        if future.done():
            times.note_end()
        else:
            self._is_over = is_over = threading.Event()

            def note_end(_: object) -> None:
                times.note_end()
                is_over.set()

            future.add_done_callback(note_end)

    def _wait(self) -> object:
        # Wait for the event first, because this wait has a time limit. `Future.wait` has no limit.
        if self._is_over is not None:
            self._wait_for(self._is_over)
        value = self._future.wait()
        self._times.note_end()
        return self._as_given(value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value)

    def _wait_for(self, is_over: threading.Event) -> None:
        limit_s = self._group.timeout_s
        patience_s = min(limit_s + min(_REPORT_S, limit_s / 2), threading.TIMEOUT_MAX)
        if not is_over.wait(patience_s) and not self._future.done():
            raise CollectiveTimeout(
                f"the communication hook's future for bucket {self._shown.index()} did not finish within {limit_s:g} s "
                f"(timeout) on {self._group.place()}: look for a hook that never sets its result, or for a rank "
                "that waits elsewhere"
            )

    def _as_given(self, result: object) -> object:
        # Return any other result unchanged. If the result is wrong, `Bucket.accept` raises the error.
        if not isinstance(result, torch.Tensor) or result.dtype is not self._shown.buffer().dtype:
            return result
        # The hook has set a buffer of this dtype by `set_buffer`.
        return result.to(self.bucket.buffer.dtype)


class DeferredReduction(PendingReduction):
    """A sparse bucket on a group whose `has_total_order` is False, such as a group of torch. The reduction runs inside `wait`.

    A sparse all_reduce issues further collectives in a callback, in an order that could differ between ranks. When `wait` is
    called, all other collectives are issued already.
    """

    def __init__(self, bucket: SparseBucket, times: BucketTimes, group: ProcessGroup, op: Reduction) -> None:
        super().__init__(bucket, times)
        self._group = group
        self._op = op

    def _wait(self) -> object:
        self._group.all_reduce(self.bucket.buffer, self._op)
        self._times.note_end()
        return self.bucket.buffer
