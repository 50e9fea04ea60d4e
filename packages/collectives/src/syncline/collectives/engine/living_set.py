"""`LivingSet`: a set of weak references for several threads."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class LivingSet(Generic[T]):
    """A set of weak references to objects. Any thread, a signal handler or the garbage collector may use it at any time.

    Unlike `weakref.WeakSet`, the set may change while a thread iterates over it. The set needs no lock.
    """

    def __init__(self) -> None:
        # Each method uses one operation of this dict at a time. Python does not interrupt such an operation.
        self._references: dict[int, weakref.ref[T]] = {}

    def add(self, thing: T) -> None:
        """Add an object. If the set already has the object, do nothing."""
        self._references[id(thing)] = weakref.ref(thing, partial(_remove, self._references, id(thing)))

    def discard(self, thing: T) -> None:
        """Remove an object. If the set does not have the object, do nothing."""
        self._references.pop(id(thing), None)

    def clear(self) -> None:
        """Remove all objects."""
        self._references.clear()

    def __iter__(self) -> Iterator[T]:
        things = [reference() for reference in list(self._references.values())]
        return iter([thing for thing in things if thing is not None])

    def __len__(self) -> int:
        return len(self._references)


def _remove(references: dict[int, weakref.ref[T]], key: int, gone: weakref.ref[T]) -> None:
    # After `discard`, a thread that goes through the set may still hold the reference `gone`. When its object is freed then,
    # another object may already have the same key (`id`). So remove the key only if it still belongs to `gone`.
    if references.get(key) is gone:
        del references[key]
