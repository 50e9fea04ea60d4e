"""Observing the calls of all groups of this process: what was called, and when it began and ended.

`recorded`, the decorator of every public method of a group, asks whether `observers` is empty, and calls `observed` if not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeAlias

import torch

from .membership import Membership
from .work import Work

_TRANSFERS = ("send", "recv")


class ObservedCall:
    """One call that was made on this rank; times are seconds of `time.perf_counter()`.

    Attributes:
        name: the method's, such as "all_reduce".
        group: on which it was called.
        started: when it was called.
        finished: when it was over; None while it is not, or if that is not known (of a send or receive in flight).
    """

    __slots__ = ("finished", "group", "name", "started")

    def __init__(self, name: str, group: Membership, started: float) -> None:
        self.name = name
        self.group = group
        self.started = started
        self.finished: float | None = None

    def note_end(self, _: object = None) -> None:
        """It is over."""
        self.finished = time.perf_counter()


Observer: TypeAlias = Callable[[ObservedCall, torch.Tensor | None], None]
"""Gets a call, and its first argument that is a tensor; the call does not keep it alive."""

observers: list[Observer] = []
"""Those that are told of calls now; `observe_calls` adds to it."""


class _Here(threading.local):
    """Whether a call is being observed on this thread: the calls that it makes are not told."""

    is_observing = False


_here = _Here()


def observe_calls(observer: Observer) -> Callable[[], None]:
    """Tell `observer` of each call on any group of this process, on the calling thread, right after it was issued.

    Of calls that calls make, only the outermost is told. The observer must be quick, and must not communicate.

    Returns:
        What ends it.
    """
    observers.append(observer)

    def stop() -> None:
        with suppress(ValueError):  # it was stopped before
            observers.remove(observer)

    return stop


def observed(name: str, group: Membership, arguments: Sequence[object], issue: Callable[[], Work]) -> Work:
    """Issue a call, and tell the observers of it.

    Args:
        name: the method's.
        group: on which it is called.
        arguments: of the call.
        issue: makes the call.
    """
    if _here.is_observing:
        return issue()
    tensor = next((argument for argument in arguments if isinstance(argument, torch.Tensor)), None)
    call = ObservedCall(name, group, time.perf_counter())
    _here.is_observing = True
    try:
        work = issue()
    finally:
        _here.is_observing = False
    if work.is_completed():
        call.note_end()
    elif name not in _TRANSFERS:  # the future of a transfer costs a thread
        work.get_future().add_done_callback(call.note_end)
    for observer in tuple(observers):
        observer(call, tensor)
    return work
