"""`LivingSet`: a set of weak references. Any thread may change the set, or iterate over it, at any time."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from typing import Generic, TypeVar

T = TypeVar("T")


class LivingSet(Generic[T]):
    """A set of the objects that are still alive. The set has only weak references to its objects.

    `weakref.WeakSet` raises an error if one thread adds an object while another thread iterates over the set. This class does
    not, and needs no lock: each step is one operation of a `dict`, which Python does not interrupt. So a signal handler or the
    garbage collector may use the set while another method runs.
    """

    def __init__(self) -> None:
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
        """Iterate over the objects that are in the set now, in the order of addition. Leave out objects added later."""
        things = [reference() for reference in list(self._references.values())]
        return iter([thing for thing in things if thing is not None])

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self._references)


def _remove(references: dict[int, weakref.ref[T]], key: int, gone: weakref.ref[T]) -> None:
    # After `discard`, a thread that goes through the set may still hold the reference `gone`. When its object is freed then,
    # another object may already have the same key (`id`). So remove the key only if it still belongs to `gone`.
    if references.get(key) is gone:
        del references[key]
