"""Gradients as they arrive: noted one by one, looked at by the bucket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


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
    there is no race.

    Attributes:
        indices: the gradients, in the order of their arrival.
        steps: the counts at which the reducer is woken.
    """

    def __init__(self) -> None:
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
    would cost as much again as noting); else the next gradient that wakes the reducer, or the end of backward.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, list[Arrivals]] = {}

    def add(self, arrivals: Arrivals) -> None:
        """Let them wait."""
        self._waiting.setdefault(threading.get_ident(), []).append(arrivals)

    def take(self, current: Arrivals | None = None) -> Iterator[list[int]]:
        """What waits on this thread, by the bucket; but not the last of the `current` arrivals, whose hooks still run."""
        for arrivals in self._waiting.pop(threading.get_ident(), ()):
            yield arrivals.take(but_last=int(arrivals is current))

    def clear(self) -> None:
        """Forget them."""
        self._waiting.clear()


class Listener:
    """A parameter's hooks, and the arrivals that its gradient is noted in.

    Args:
        index: the parameter's.
        parameter: the parameter.
        wake: called when the arrivals are worth a look.
        settled: called after all hooks on the parameter, if `follow` asked for it.
    """

    def __init__(
        self, index: int, parameter: torch.nn.Parameter, wake: Callable[[Arrivals], None], settled: Callable[[], None]
    ) -> None:
        self._index = index
        self._parameter = parameter
        self._wake = wake
        self._settled = settled
        self._node: torch.autograd.graph.Node | None = None
        self._noting: Any = None
        self._following: Any = None

    def listen_for(self, arrivals: Arrivals) -> None:
        """From now on note the gradient there."""
        if self._noting is not None:
            self._noting.remove()
        note = _hook(self._index, arrivals, self._wake)
        self._noting = self._parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """From the next backward on, see to what waits as soon as all hooks on this parameter have run."""
        if self._node is None:
            settled = self._settled
            # Held, because autograd makes a new node, without the hook, if nobody holds the old one.
            self._node = torch.autograd.graph.get_gradient_edge(self._parameter).node
            self._following = self._node.register_hook(lambda *_: settled())

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in (self._noting, self._following):
            if handle is not None:
                handle.remove()


def _hook(index: int, arrivals: Arrivals, wake: Callable[[Arrivals], None]) -> Callable[[torch.Tensor], None]:
    indices, steps, add = arrivals.indices, arrivals.steps, arrivals.indices.append

    def note(_: torch.Tensor) -> None:
        add(index)
        if len(indices) in steps:
            wake(arrivals)

    return note
