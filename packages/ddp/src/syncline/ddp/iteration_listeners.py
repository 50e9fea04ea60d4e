"""IterationListeners: who is told of each backward that was reduced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from syncline.reducer import IterationStatistics

Listener: TypeAlias = Callable[[IterationStatistics], None]


class IterationListeners:
    """Told one after the other, on every rank in the same order, so that they may communicate."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def __bool__(self) -> bool:
        """Whether anybody is told."""
        return bool(self._listeners)

    def __call__(self, statistics: IterationStatistics) -> None:
        """A backward was reduced."""
        for listener in tuple(self._listeners):
            listener(statistics)

    def add(self, listener: Listener) -> None:
        """Tell it, too."""
        self._listeners.append(listener)

    def remove(self, listener: Listener) -> None:
        """Tell it no more; nothing happens if it is not told."""
        if listener in self._listeners:
            self._listeners.remove(listener)
