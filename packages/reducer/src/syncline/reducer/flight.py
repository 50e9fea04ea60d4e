"""A bucket in flight: its reduction was issued."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import torch

from syncline.collectives import CollectiveTimeout, ProcessGroup, Work
from syncline.collectives.internal import Reduction

from . import complaints
from .bucket import Bucket
from .grad_bucket import GradBucket
from .sparse_bucket import SparseBucket
from .statistics import BucketTimes

AnyBucket: TypeAlias = Bucket | SparseBucket

# How long to wait for a hook, in time limits of its group: its collectives have one each, and can tell more when it is over.
_PATIENCE = 2


class NamingParameters:
    """Has transport errors say whose gradients did not arrive. They keep their type. A context."""

    __slots__ = ("_bucket",)

    def __init__(self, bucket: AnyBucket) -> None:
        self._bucket = bucket

    def __enter__(self) -> None: ...

    def __exit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, Exception):
            failure = complaints.not_arrived(error, self._bucket.names)
            if failure is not None:
                raise failure from error


class Flight(ABC):
    """A bucket and the reduction that it waits for.

    Attributes:
        shows_bucket: whether somebody was shown the bucket's memory, and may keep it.

    Args:
        bucket: the bucket.
        times: gets the end of the reduction.
    """

    shows_bucket = False

    def __init__(self, bucket: AnyBucket, times: BucketTimes) -> None:
        self.bucket = bucket
        self.times = times

    def wait(self) -> object:
        """Block until the reduction is over, and return its result: the flat tensor, if a hook keeps its contract.

        Raises:
            TransportError: of the type that the group raised; names the parameters, too.
        """
        with NamingParameters(self.bucket):
            return self._wait()

    @abstractmethod
    def _wait(self) -> object: ...

    def _note_end(self, _: object = None) -> None:
        if self.times.finished is None:
            self.times.finished = time.perf_counter()


class CollectiveFlight(Flight):
    """A bucket that a collective reduces in place."""

    def __init__(self, bucket: AnyBucket, times: BucketTimes, work: Work) -> None:
        super().__init__(bucket, times)
        self._work = work
        work.get_future().add_done_callback(self._note_end)

    def _wait(self) -> object:
        self._work.wait()
        self._note_end()
        return self.bucket.buffer


class HookFlight(Flight):
    """A bucket that a communication hook reduces.

    Args:
        bucket: the bucket.
        times: gets the end of the reduction.
        future: what the hook returned.
        shown: what the hook was given.
        group: whose time limit holds for each collective of the hook.
    """

    shows_bucket = True

    def __init__(
        self,
        bucket: AnyBucket,
        times: BucketTimes,
        future: torch.futures.Future[Any],
        shown: GradBucket,
        group: ProcessGroup,
    ) -> None:
        super().__init__(bucket, times)
        self._future = future
        self._shown = shown
        self._group = group
        self._is_over: threading.Event | None = None
        if future.done():
            self._note_end()
        else:
            self._is_over = threading.Event()
            future.add_done_callback(self._note_end)

    def _note_end(self, _: object = None) -> None:
        super()._note_end()
        if self._is_over is not None:
            self._is_over.set()

    def _wait(self) -> object:
        if self._is_over is not None:
            self._wait_for(self._is_over)
        value = self._future.wait()
        self._note_end()
        return self._as_given(value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value)

    def _wait_for(self, is_over: threading.Event) -> None:
        limit_s = min(_PATIENCE * self._group.timeout_s, threading.TIMEOUT_MAX)
        if not is_over.wait(limit_s) and not self._future.done():
            raise CollectiveTimeout(
                f"the communication hook's future for bucket {self._shown.index()} did not finish within {limit_s:g} s on "
                f"{self._group.place()}: look for a hook that never sets its result, or for a rank that waits elsewhere"
            )

    def _as_given(self, result: object) -> object:
        """A hook that has put a buffer of another dtype in place, and left it there, may return that dtype (torch's do)."""
        if not isinstance(result, torch.Tensor) or result.dtype is not self._shown.buffer().dtype:
            return result
        return result.to(self.bucket.buffer.dtype)


class LateFlight(Flight):
    """A sparse bucket on a torch.distributed group: reduced when its turn to be waited for has come.

    A sparse all_reduce continues in a callback, and a torch group gives what a callback issues no defined place among the
    collectives of other threads (see `TorchGroup`). In finalize all ranks have issued everything else.
    """

    def __init__(self, bucket: SparseBucket, times: BucketTimes, group: ProcessGroup, op: Reduction) -> None:
        super().__init__(bucket, times)
        self._group = group
        self._op = op

    def _wait(self) -> object:
        self._group.all_reduce(self.bucket.buffer, self._op)
        self._note_end()
        return self.bucket.buffer
