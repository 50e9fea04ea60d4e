"""Show the calls of groups to torch's profiler, and to functions that the program has passed to `observe_calls`."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Protocol, TypeAlias, TypeVar

import torch

from ..tensors.checks import are_usual, has_fakes, resolved
from ..torch_internals import ProfilerRange, profiler_runs
from ..work import FinishedWork, Work

Method = TypeVar("Method", bound=Callable[..., Work])

# The future of a send or receive costs a thread, so observers do not learn when such a transfer is over.
_TRANSFERS = ("send", "recv")

# For each of these methods, the name that torch's own backends give to its range in the profile.
_TITLES = {
    "all_gather_into_tensor": "_all_gather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_to_all_single": "all_to_all",
}


class Group(Protocol):
    """The properties of a `ProcessGroup` that this module and observers use."""

    @property
    def name(self) -> str:
        """The group's name in messages."""

    @property
    def rank(self) -> int:
        """This process's rank in the group."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """For each rank of this group, the rank of the same process in the default group."""

    @property
    def profiled_as(self) -> str | None:
        """The prefix of the names of this group's ranges in a profile; None if the group shows no ranges."""


class ObservedCall:
    """One call on this rank. Times are in seconds of `time.perf_counter()`.

    Attributes:
        name: the method's name, such as "all_reduce".
        group: the group of the call.
        started: when the method was called.
        finished: when the call ended. None while the call is in flight. A send or receive that is in flight when its method
            returns keeps None.
    """

    __slots__ = ("finished", "group", "name", "started")

    def __init__(self, name: str, group: Group, started: float) -> None:
        self.name = name
        self.group = group
        self.started = started
        self.finished: float | None = None

    def note_end(self, _: object = None) -> None:
        """Note that the call is over now."""
        self.finished = time.perf_counter()


Observer: TypeAlias = Callable[[ObservedCall, torch.Tensor | None], None]
"""A function that gets a call, and the call's first tensor (or None). The `ObservedCall` does not keep the tensor alive."""

observers: list[Observer] = []
"""The functions that get each call now. `observe_calls` adds a function."""


class _Here(threading.local):
    """Whether this thread is inside a call that the profiler or the observers see. Calls inside this call are not shown."""

    is_profiled = False
    is_observed = False


_here = _Here()


def observe_calls(observer: Observer) -> Callable[[], None]:
    """Call `observer` after each call of a collective, send or receive in this process, on the thread of the call.

    If a call makes other calls, the observer gets only the outermost call. The observer must be quick, and must not
    communicate.

    Returns:
        A function that stops the observation.
    """
    observers.append(observer)

    def stop() -> None:
        with suppress(ValueError):  # already stopped
            observers.remove(observer)

    return stop


def public_call(method: Method) -> Method:
    """Decorate a method of a group that users call. The profiler and the observers then see each call of the method.

    Before the method runs, the decorator also handles two special kinds of tensors, see Note [Tensors that are no memory] in
    `tensors.checks`:

    - The result of a functional collective is replaced by its tensor.
    - With a FakeTensor, the call communicates nothing, and returns a finished work.
    """
    name = method.__name__

    @functools.wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Work:
        values = (*args, *kwargs.values())
        if not are_usual(values):
            args = tuple(map(resolved, args))
            kwargs = {key: resolved(value) for key, value in kwargs.items()}
            values = (*args, *kwargs.values())
            # A compiler or a shape check only traces the program: there is no memory to send.
            if has_fakes(values):
                return FinishedWork(list(_tensors(values)))
        if not (profiler_runs() or observers):  # the usual case
            return method(group, *args, **kwargs)
        issue = functools.partial(method, group, *args, **kwargs)
        if profiler_runs():
            is_async = bool(kwargs.get("async_op", False))
            issue = functools.partial(shown, group, name, list(_tensors(values)), issue, is_async=is_async)
        return _observed(name, group, values, issue) if observers else issue()

    return call  # type: ignore[return-value]  # the method's own signature


def shown(group: Group, name: str, tensors: list[torch.Tensor], issue: Callable[[], Work], *, is_async: bool) -> Work:
    """Call `issue`, which issues a call of `group`. If a profiler runs and the group shows its calls, open a range.

    The range shows the shapes of `tensors`. If `is_async`, the call may go on after `issue` has returned.
    """
    # Open no range if no profiler runs, or if the groups inside this group show the call.
    if not profiler_runs() or group.profiled_as is None:
        return issue()
    return profiled(f"{group.profiled_as}:{_TITLES.get(name, name)}", tensors, issue, is_async=is_async)


def profiled(title: str, tensors: list[torch.Tensor], issue: Callable[[], Work], *, is_async: bool) -> Work:
    """Call `issue` inside a range of torch's profiler. The range lasts until the issued call is over. See `shown`."""
    # An outer call has opened the range already.
    if _here.is_profiled:
        return issue()
    span = ProfilerRange(title, tensors)
    _here.is_profiled = True
    try:
        work = issue()
    # The range must end here, because no work exists whose future could end it.
    except BaseException:
        span.end()
        raise
    finally:
        _here.is_profiled = False
    # The call may go on after `issue`. End the range before any thread returns from `wait`: that thread may stop the profiler.
    if is_async and not work.is_completed():
        work.before_end(span.end_elsewhere())
    else:
        span.end()
    return work


def _observed(name: str, group: Group, values: tuple[object, ...], issue: Callable[[], Work]) -> Work:
    # Observers get only the outermost call: a coalesced call, for example, but not its all-reduces.
    if _here.is_observed:
        return issue()
    tensor = next((value for value in values if isinstance(value, torch.Tensor)), None)
    call = ObservedCall(name, group, time.perf_counter())
    _here.is_observed = True
    try:
        work = issue()
    finally:
        _here.is_observed = False
    # The call ended before it returned, so its future is not needed.
    if work.is_completed():
        call.note_end()
    elif name not in _TRANSFERS:
        work.get_future().add_done_callback(call.note_end)
    for observer in tuple(observers):
        observer(call, tensor)
    return work


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
