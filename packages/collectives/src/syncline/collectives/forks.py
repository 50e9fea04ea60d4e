"""Forks: a forked child of a rank is not itself a rank.

Note [Forks]
~~~~~~~~~~~~
A forked child (a worker of torch's DataLoader, a pool, `os.fork`) inherits all objects of its parent, but only the thread that
forked. The other ranks do not know about the child. So in a child:

- *Groups* raise `GroupClosedError` at every call; `close` and `abort` do nothing. `rank` and `size` still work. A wait for a
  call of the parent raises `GroupClosedError`, too. A child may make its own groups.
- *Stores*: a `GroupStore` raises `GroupClosedError` at every call. A child has its own copy of an `InMemoryStore`. Servers of
  the parent do not run in a child.
- *Windows* (memory that the ranks of a node share) become private memory. The tensors that the program allocated there on this
  rank keep the values that they had at the fork. All other bytes are zeros.
- *Hooks of reducers* are removed from the parameters, so a backward in a child sends nothing.
- *MPI* is not called, not even to finalize MPI. A call would act in the parent's name, or wait for a lock that is never
  released.

To react to forks, derive a class from `Inherited`, and register its objects with `tell_in_forks`. Forks by C code are not seen.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

from .errors import GroupClosedError

logger = logging.getLogger("syncline.collectives")

_lock = threading.RLock()  # guards the set; reentrant, because the garbage collector may call into this module at any time
_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()
_fork_count = 0
_is_of_rank = False


class Inherited(ABC):
    """An object that a forked child inherits, but must not use unchanged."""

    def before_fork(self) -> None:  # noqa: B027 - most have nothing to do
        """Called in the parent before a fork, on the thread that forks. Change nothing that other threads may be using."""

    @abstractmethod
    def in_fork(self) -> None:
        """Called in the child before any other code runs. Take no lock of the parent: the lock may be held for ever."""


def tell_in_forks(thing: Inherited) -> None:
    """From now on, call `before_fork` and `in_fork` of `thing` at every fork of this process.

    `thing` must stay alive elsewhere: this module keeps only a weak reference to `thing`.
    """
    with _lock:
        _inherited.add(thing)


def in_forks(function: Callable[[], object]) -> None:
    """From now on, call `function` in every forked child of this process, before any other code runs."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def fork_count() -> int:
    """Return the number of forks between the first process and this process.

    An object that stores this number when it is made can find out later whether it is used in a forked child.
    """
    return _fork_count


def is_fork_of_rank() -> bool:
    """Whether this process was forked, directly or indirectly, from a process that had a group."""
    return _is_of_rank


def not_the_rank(call: str, place: str) -> GroupClosedError:
    """Return the error for a forked child that uses its parent's group or waits for its parent's call.

    `place` names the parent's rank and group.
    """
    return GroupClosedError(
        f"{call} on {place}: this process (pid {os.getpid()}) is a fork of that rank, and only the rank itself communicates. "
        "Let the rank call it, or start a process that communicates by 'spawn', with a group of its own"
    )


def _each(things: Iterable[Inherited], action: Callable[[Inherited], object]) -> None:
    for thing in things:
        try:
            action(thing)
        except Exception:
            logger.exception("a fork of this process does not leave %s alone", type(thing).__name__)


def _before() -> None:
    with _lock:
        things = list(_inherited)
    _each(things, lambda thing: thing.before_fork())


def _in_fork() -> None:
    global _fork_count, _is_of_rank, _lock
    _lock = threading.RLock()  # another thread of the parent may have held the old lock at the fork
    _fork_count += 1
    _is_of_rank = _is_of_rank or len(_inherited) > 0
    _each(list(_inherited), lambda thing: thing.in_fork())
    _inherited.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_child=_in_fork)
