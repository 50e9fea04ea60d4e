"""LivingSet: a set of weak references, which any thread may change or go through at any time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class LivingSet(Generic[T]):
    """Objects that are still alive. The set keeps none of them alive.

    `weakref.WeakSet` raises an error if one thread adds an object while another thread goes through the set. This class needs
    no lock, so a signal's handler or the garbage collector may use the set in the middle of another method. Each step below
    is one operation of a `dict`, which Python does not interrupt.
    """

    def __init__(self) -> None:
        self._references: dict[int, weakref.ref[T]] = {}

    def add(self, thing: T) -> None:
        """Add an object; do nothing if it is there already."""
        self._references[id(thing)] = weakref.ref(thing, partial(_remove, self._references, id(thing)))

    def discard(self, thing: T) -> None:
        """Remove an object if it is there."""
        self._references.pop(id(thing), None)

    def clear(self) -> None:
        """Remove all objects."""
        self._references.clear()

    def __iter__(self) -> Iterator[T]:
        """Go through the objects that are there now, in the order in which they were added. Leave out objects added later."""
        things = [reference() for reference in list(self._references.values())]
        return iter([thing for thing in things if thing is not None])

    def __len__(self) -> int:
        """The number of objects."""
        return len(self._references)


def _remove(references: dict[int, weakref.ref[T]], key: int, gone: weakref.ref[T]) -> None:
    # After `discard`, a thread that goes through the set may still hold the reference `gone`. When its object is freed then,
    # another object may already have the same key (`id`). So remove the key only if it still belongs to `gone`.
    if references.get(key) is gone:
        del references[key]
