"""Forks: a child of a rank is not the rank.

Note [Forks]
~~~~~~~~~~~~
A fork (a worker of torch's DataLoader, a pool, `os.fork`) inherits what its parent had, but only the thread that forked. The
other ranks know nothing of it. So in a fork

- *groups* raise `GroupClosedError` at every call; `close` and `abort` do nothing. `rank` and `size` stay, for workers ask for
  them. What was in flight is the parent's, and to wait for it raises the same error. A fork may make groups of its own.
- *windows* are private: this rank's part is a copy of what it held at the fork, that of the others is zeros.
- *hooks of reducers* are taken off the parameters: a backward is local.
- *MPI* is not called, not even to end it: that would be in the parent's name, or wait for a lock that nobody will give back.

What must know of a fork is an `Inherited` that was given to `tell_in_forks`. Nothing is asked in calls, so they cost what they
did. Python calls the functions below for forks that it makes itself; a process that C code forks runs no Python.
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

_lock = threading.RLock()  # of the set, while threads run; reentrant, because the garbage collector may run anything
_inherited: weakref.WeakSet[Inherited] = weakref.WeakSet()
_generation = 0
_is_of_rank = False


class Inherited(ABC):
    """What a fork inherits and must not use as it is."""

    def before_fork(self) -> None:  # noqa: B027 - most have nothing to do
        """Called in the parent, on the thread that forks. Others may be running: change nothing that they use."""

    @abstractmethod
    def in_fork(self) -> None:
        """Called in the fork, before anything else of it runs. Any lock of the parent's may be held, for ever: take none."""


def tell_in_forks(thing: Inherited) -> None:
    """Let something know of the forks of this process, as long as somebody holds it."""
    with _lock:
        _inherited.add(thing)


def in_forks(function: Callable[[], object]) -> None:
    """Call a function in every fork, before anything else of it runs; for what a module remembers."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def generation() -> int:
    """How many forks lie between this process and the first of its family. What was made in another one is a parent's."""
    return _generation


def is_fork_of_rank() -> bool:
    """Whether this process is a fork of one that had a group, or such a fork's."""
    return _is_of_rank


def not_the_rank(call: str, place: str) -> GroupClosedError:
    """The error of a call on a group that was made before the fork.

    Args:
        call: its name.
        place: rank and group, in words.
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
    global _generation, _is_of_rank, _lock
    _lock = threading.RLock()  # another thread of the parent may hold it
    _generation += 1
    _is_of_rank = _is_of_rank or len(_inherited) > 0
    _each(list(_inherited), lambda thing: thing.in_fork())
    _inherited.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_child=_in_fork)
