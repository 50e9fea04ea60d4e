"""Gradients as they arrive: noted one by one, looked at by the bucket."""

from __future__ import annotations

import threading
from collections.abc import Iterator


class Arrivals:
    """The gradients of one bucket, by index, that have arrived and were not looked at yet.

    Note [What one gradient costs]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Autograd calls a Python function for every gradient, and that call is what a reducer in Python costs most. So the function
    only notes the gradient here, in plain lists, which Python is quickest with. It wakes the reducer at the bucket's first
    gradient, because a backward may begin with it, and when so many have come that the bucket may be complete: twice for each
    bucket, once they are built in the order of arrival. While that order is learnt, without synchronisation, and in the
    buckets of delayed parameters and of the one that they wait for, it wakes it at every gradient. What wakes nobody is looked
    at in the end of backward. The parameters of a bucket are on one device, and autograd has one thread for each device: so
    there is no race. Mostly even the call can be saved; see Note [One hook for a bucket].

    Attributes:
        indices: the gradients, in the order of their arrival.
        steps: the counts at which the reducer is woken.
        are_settled: whether they are noted only when all hooks on their parameter have run; see Note [After all hooks].
    """

    def __init__(self, *, are_settled: bool = False) -> None:
        self.are_settled = are_settled
        self.indices: list[int] = []
        self.steps: list[int] = []
        self.expect(1)

    def expect(self, needed: int) -> None:
        """So many must arrive before it is worth looking at them; of one, that is looked at when the next is there."""
        self._needed = needed
        self.steps[:] = [1, max(needed, 2)]

    @property
    def suffice(self) -> bool:
        """Whether as many have arrived as are needed."""
        return len(self.indices) >= self._needed

    def take(self, *, but_last: int = 0) -> list[int]:
        """What has arrived, in order, to be looked at now; but not so many that came last."""
        count = len(self.indices) - but_last
        taken = self.indices[:count]
        del self.indices[:count]
        return taken


class Backlog:
    """Arrivals that are worth a look, as soon as the hooks of their latest gradient have run.

    Note [After all hooks]
    ~~~~~~~~~~~~~~~~~~~~~~
    Users' hooks (`register_post_accumulate_grad_hook`) may change a gradient, and those that were registered after ours run
    after it. So no bucket is collected within our hook on a parameter. It waits here for what comes next on this thread: the
    end of the parameter's node in the graph, which is hooked where a bucket is known to become complete (a hook on every node
    would cost as much again as noting); else the next gradient that wakes the reducer, or the end of backward. Where a
    bucket's one hook is at the node itself, its bucket need not wait.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, list[Arrivals]] = {}

    def add(self, arrivals: Arrivals) -> None:
        """Let them wait."""
        self._waiting.setdefault(threading.get_ident(), []).append(arrivals)

    def take(self, current: Arrivals | None = None) -> Iterator[list[int]]:
        """What waits on this thread, by the bucket; but not the last of the `current` arrivals, whose hooks still run."""
        for arrivals in self._waiting.pop(threading.get_ident(), ()):
            taken = arrivals.take(but_last=int(arrivals is current))
            if taken:
                yield taken

    def clear(self) -> None:
        """Forget them."""
        self._waiting.clear()
