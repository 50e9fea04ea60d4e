"""What every public call of a group begins with: a look at its tensors, and who looks at it (torch's profiler, observers)."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from ..torch_internals import ProfilerRange, profiler_runs
from .arguments import are_usual, has_fakes, resolved
from .call_observer import observed, observers
from .work import FinishedWork, Work

Method = TypeVar("Method", bound=Callable[..., Work])


class _Here(threading.local):
    """Whether a collective is being recorded on this thread: what it is made of is not shown again."""

    is_recording = False


_here = _Here()


def recorded(title: str) -> Callable[[Method], Method]:
    """A decorator of a group's method: show each call to whoever looks.

    A profiler shows it as `profiled_as:title` (see `record`), and observers are told of it (see `call_observer`).

    Before that, tensors that stand for others are replaced, and a call on tensors that do not exist ends; see Note [Tensors
    that are no memory] in `arguments`.
    """

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def call(group: Any, *args: Any, **kwargs: Any) -> Work:
            if not are_usual(args) or not are_usual(kwargs.values()):
                args = tuple(map(resolved, args))
                kwargs = {name: resolved(value) for name, value in kwargs.items()}
                values = (*args, *kwargs.values())
                if has_fakes(values):
                    return FinishedWork(list(_tensors(values)))
            is_profiled = profiler_runs() and group.profiled_as is not None
            if not (is_profiled or observers):
                return method(group, *args, **kwargs)
            values = (*args, *kwargs.values())
            issue = functools.partial(method, group, *args, **kwargs)
            if is_profiled:
                full_title, is_async = f"{group.profiled_as}:{title}", kwargs.get("async_op", False)
                issue = functools.partial(record, full_title, list(_tensors(values)), issue, is_async=is_async)
            return observed(method.__name__, group, values, issue) if observers else issue()

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
