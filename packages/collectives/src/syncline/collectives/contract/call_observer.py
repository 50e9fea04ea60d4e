"""Observing the calls of all groups of this process: what was called, and when it began and ended.

Nobody who does not observe pays for it: while somebody does, the public methods of the group classes are replaced by methods
that also take the time; afterwards they are what they were.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch

from .process_group import ProcessGroup

_NAMES = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "send",
    "recv",
    "barrier",
)
_TRANSFERS = ("send", "recv")


class ObservedCall:
    """One call that was made on this rank; times are seconds of `time.perf_counter()`.

    Attributes:
        name: the method's, such as "all_reduce".
        group: on which it was called.
        tensor: the first argument that is a tensor, or None. Whoever keeps the call should let go of it.
        started: when it was called.
        finished: when it was over; None while it is not, or if that is not known (of a send or receive in flight).
    """

    __slots__ = ("finished", "group", "name", "started", "tensor")

    def __init__(self, name: str, group: ProcessGroup, tensor: torch.Tensor | None, started: float) -> None:
        self.name = name
        self.group = group
        self.tensor = tensor
        self.started = started
        self.finished: float | None = None

    def note_end(self, _: object = None) -> None:
        """It is over."""
        self.finished = time.perf_counter()


Observer: TypeAlias = Callable[[ObservedCall], None]

_lock = threading.Lock()
_observers: list[Observer] = []
_originals: list[tuple[type, str, Any]] = []
_inside = threading.local()


def observe_calls(observer: Observer) -> Callable[[], None]:
    """Tell `observer` of each call on any group of this process, on the calling thread, right after it was issued.

    Of calls that calls make, only the outermost is told. The observer must be quick, and must not communicate.

    Returns:
        What ends it.
    """
    with _lock:
        _observers.append(observer)
        if len(_observers) == 1:
            _wrap_methods()

    def stop() -> None:
        with _lock:
            if observer in _observers:
                _observers.remove(observer)
                if not _observers:
                    _restore_methods()

    return stop


def _wrap_methods() -> None:
    for kind in _group_classes():
        for name in _NAMES:
            if name in vars(kind):
                _originals.append((kind, name, vars(kind)[name]))
                setattr(kind, name, _observed(name, vars(kind)[name]))


def _restore_methods() -> None:
    while _originals:
        kind, name, method = _originals.pop()
        setattr(kind, name, method)


def _group_classes() -> Iterator[type]:
    """Those from which groups inherit, and all that exist now."""
    found: dict[type, None] = dict.fromkeys(ProcessGroup.__mro__[:-1])
    pending: list[type] = [ProcessGroup]
    while pending:
        subclasses: list[type] = type.__subclasses__(pending.pop())
        for kind in subclasses:
            found[kind] = None
            pending.append(kind)
    yield from found


def _observed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "is_active", False):
            return method(self, *args, **kwargs)
        _inside.is_active = True
        seen = ObservedCall(name, self, _first_tensor((*args, *kwargs.values())), time.perf_counter())
        try:
            work = method(self, *args, **kwargs)
        finally:
            _inside.is_active = False
        if work.is_completed():
            seen.note_end()
        elif name not in _TRANSFERS:  # the future of a transfer costs a thread
            work.get_future().add_done_callback(seen.note_end)
        for observer in tuple(_observers):
            observer(seen)
        return work

    return call


def _first_tensor(arguments: tuple[Any, ...]) -> torch.Tensor | None:
    return next((argument for argument in arguments if isinstance(argument, torch.Tensor)), None)
