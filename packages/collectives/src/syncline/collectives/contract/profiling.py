"""What torch's profiler shows of collectives: a range for each, with its name and the shapes of its tensors."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ..torch_internals import ProfilerRange, profiler_runs
from .work import Work

Method = TypeVar("Method", bound=Callable[..., Work])


class _Here(threading.local):
    """Whether a collective is being recorded on this thread: what it is made of is not shown again."""

    is_recording = False


_here = _Here()


def recorded(title: str) -> Callable[[Method], Method]:
    """A decorator: show each call of a group's method as `profiled_as:title` while a profiler runs; see `record`."""

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(group: Any, *args: Any, **kwargs: Any) -> Work:
            if not profiler_runs() or group.profiled_as is None:
                return method(group, *args, **kwargs)
            tensors = list(_tensors((*args, *kwargs.values())))
            issue = functools.partial(method, group, *args, **kwargs)
            return record(f"{group.profiled_as}:{title}", tensors, issue, is_async=kwargs.get("async_op", False))

        return call  # type: ignore[return-value]  # the method's own signature

    return decorate


def record(title: str, tensors: list[torch.Tensor], issue: Callable[[], Work], *, is_async: bool) -> Work:
    """Issue a collective inside a range of torch's profiler, which lasts until the collective has finished.

    Args:
        title: the name of the range.
        tensors: whose shapes it shows.
        issue: issues the collective, made of others or not.
        is_async: whether it may go on after `issue` has returned.
    """
    if _here.is_recording:
        return issue()
    span = ProfilerRange(title, tensors)
    _here.is_recording = True
    try:
        work = issue()
    except BaseException:
        span.end()
        raise
    finally:
        _here.is_recording = False
    if is_async:
        span.end_with(work.get_future())
    else:
        span.end()
    return work


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
