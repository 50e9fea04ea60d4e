"""Call functions after each backward whose gradients the ranks have averaged."""

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
        """Add a listener, which is called after each later backward that averages gradients."""
        self._listeners.append(listener)

    def remove(self, listener: Listener) -> None:
        """Remove a listener. If the listener was not added, do nothing."""
        if listener in self._listeners:
            self._listeners.remove(listener)
