"""Call functions after each reduced backward: a backward whose gradients were reduced over the ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from syncline.reducer import IterationStatistics

Listener: TypeAlias = Callable[[IterationStatistics], None]


class IterationListeners:
    """A list of functions that are called after each backward whose gradients the ranks have averaged.

    All ranks call these functions in the same order, so the functions may communicate.
    """

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def __call__(self, statistics: IterationStatistics) -> None:
        """Call all listeners."""
        for listener in tuple(self._listeners):
            listener(statistics)

    def add(self, listener: Listener) -> None:
        """Call this listener after each later reduced backward."""
        self._listeners.append(listener)

    def remove(self, listener: Listener) -> None:
        """Remove a listener. If the listener was not added, do nothing."""
        if listener in self._listeners:
            self._listeners.remove(listener)
