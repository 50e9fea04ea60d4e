"""The reduction of a bucket, alone."""

from __future__ import annotations

import gc
from collections.abc import Callable
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from syncline.collectives.transports.threads import create_groups
from syncline.collectives.work import FinishedWork
from syncline.reducer.bucket import Bucket, Layout
from syncline.reducer.bucket_reduction import BucketReduction, CollectiveReduction
from syncline.reducer.statistics import BucketTimes


class Future(torch.futures.Future):  # type: ignore[type-arg]
    """A future that is not over, and shows what it would call."""

    def __init__(self) -> None:
        super().__init__()
        self.callbacks: list[Callable[[Any], Any]] = []

    def add_done_callback(self, callback: Callable[[Any], Any]) -> None:
        self.callbacks.append(callback)


class PendingCall:
    """A work that is not over."""

    def __init__(self) -> None:
        self.future = Future()

    def is_completed(self) -> bool:
        return False

    def get_future(self) -> Future:
        return self.future


class Group:
    """A group whose collectives are not over; `reaches` looks for it."""

    size = 2

    def __init__(self) -> None:
        self.work = PendingCall()

    def all_reduce(self, *_: object, **__: object) -> PendingCall:
        return self.work


def reaches(start: object, end: object) -> bool:
    """Whether one keeps the other alive."""
    seen: set[int] = set()
    found = [start]
    while found:
        entry = found.pop()
        if entry is end:
            return True
        if id(entry) in seen or isinstance(entry, (type, ModuleType)):
            continue
        seen.add(id(entry))
        of_module = entry.__globals__ if isinstance(entry, FunctionType) else None
        found += [referent for referent in gc.get_referents(entry) if referent is not of_module]
    return False


@pytest.mark.parametrize("has_hook", [False, True])
def test_what_is_called_at_the_end_keeps_no_group_alive(has_hook: bool) -> None:
    """A group's own thread may be the last to hold it, and would wait for itself."""
    (own,) = create_groups(1)
    parameter = torch.nn.Parameter(torch.ones(2))
    bucket = Bucket([0], [parameter], ["p0"], [Layout.of(parameter)], own, as_view=False)
    group: Any = Group()
    reduction = BucketReduction(group)
    if has_hook:
        reduction.hook = lambda _, shown: group.work.future
    times = BucketTimes(8, 0.0, 0.0)
    pending = reduction.start(bucket, 0, lambda: True, times)

    (callback,) = group.work.future.callbacks
    assert reaches(pending, group) is has_hook  # the pending reduction itself does: it says where a hook's future hangs
    assert not reaches(callback, group)
    callback(group.work.future)
    assert times.finished is not None


@pytest.mark.parametrize("is_cuda", [False, True])
def test_on_cuda_the_end_is_noted_by_who_waits_and_no_future_is_asked_for(is_cuda: bool) -> None:
    """A callback there costs a stream and an event, and is told that the call was issued, not that it is over."""
    asked: list[str] = []

    class Pending(FinishedWork):
        def is_completed(self) -> bool:
            return False

        def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
            asked.append("future")
            return torch.futures.Future()

    bucket: Any = SimpleNamespace(buffer=SimpleNamespace(is_cuda=is_cuda), names=["weight"])
    times = BucketTimes(8, 0.0, 0.0)
    reduction = CollectiveReduction(bucket, times, Pending([]))
    assert times.finished is None
    assert asked == ([] if is_cuda else ["future"])
    assert reduction.wait() is bucket.buffer
    assert times.finished is not None
