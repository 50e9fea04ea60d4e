"""Gradients as they arrive: noted one by one, looked at by the bucket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


class Arrivals(list[int]):
    """The gradients of one bucket, by index, that have arrived and were not looked at yet.

    Note [What one gradient costs]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Autograd calls a Python function for every gradient, and that call is what a reducer in Python costs most. So the function
    only notes the gradient here. It wakes the reducer at the bucket's first gradient, because a backward may begin with it,
    and when so many have come that the bucket may be complete: twice for each bucket, once they are built in the order of
    arrival. While that order is learnt, without synchronisation, and in the buckets of delayed parameters and of the one that
    they wait for, it wakes it at every gradient.
    What wakes nobody is looked at in the end of backward. The parameters of a bucket are on one device, and autograd has one
    thread for each device: so there is no race.

    Attributes:
        needed: how many must arrive before it is worth looking at them.
    """

    __slots__ = ("needed",)

    def __init__(self) -> None:
        super().__init__()
        self.needed = 1

    def take(self, *, but_last: int = 0) -> list[int]:
        """What has arrived, in order, to be looked at now; but not so many that came last."""
        count = len(self) - but_last
        taken = self[:count]
        del self[:count]
        return taken


class Backlog:
    """Arrivals that are worth a look, as soon as the hooks of their latest gradient have run.

    Note [After all hooks]
    ~~~~~~~~~~~~~~~~~~~~~~
    Users' hooks (`register_post_accumulate_grad_hook`) may change a gradient, and those that were registered after ours run
    after it. So no bucket is collected within our hook on a parameter. It waits here for what comes next on this thread: the
    end of the parameter's node in the graph, which is hooked where a bucket is known to become complete (a hook on every node
    would cost as much again as noting); else the next gradient, or the end of backward.
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
        self._parameter = parameter
        self._settled = settled
        self._place = [Arrivals()]
        self._node: torch.autograd.graph.Node | None = None
        note = _hook(index, self._place, wake)
        self.handles: list[Any] = [parameter.register_post_accumulate_grad_hook(note)]  # type: ignore[no-untyped-call]

    def listen_for(self, arrivals: Arrivals) -> None:
        """From now on note the gradient there."""
        self._place[0] = arrivals

    def follow(self) -> None:
        """From the next backward on, see to what waits as soon as all hooks on this parameter have run."""
        if self._node is None:
            settled = self._settled
            # Held, because autograd makes a new node, without the hook, if nobody holds the old one.
            self._node = torch.autograd.graph.get_gradient_edge(self._parameter).node
            self.handles.append(self._node.register_hook(lambda *_: settled()))


def _hook(index: int, place: list[Arrivals], wake: Callable[[Arrivals], None]) -> Callable[[torch.Tensor], None]:
    def note(_: torch.Tensor) -> None:
        arrivals = place[0]
        arrivals.append(index)
        count = len(arrivals)
        if count == 1 or count >= arrivals.needed:
            wake(arrivals)

    return note
