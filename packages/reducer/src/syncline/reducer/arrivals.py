"""Gradients as they arrive: noted one by one, looked at by the bucket."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Arrivals(list[int]):
    """The gradients of one bucket, by index, that have arrived and were not looked at yet.

    Note [What one gradient costs]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Autograd calls a Python function for every gradient, and that call is what a reducer in Python costs most. So the function
    only notes the gradient here. It wakes the reducer twice for each bucket: at the first gradient, because a backward may
    begin with it, and when so many have come that the bucket may be complete. What wakes nobody is looked at in the end of
    backward. The parameters of a bucket are on one device, and autograd has one thread for each device: so there is no race.

    Attributes:
        needed: how many must arrive before it is worth looking at them.
    """

    __slots__ = ("needed",)

    def __init__(self) -> None:
        super().__init__()
        self.needed = 1

    def take(self) -> list[int]:
        """What has arrived, in order, to be looked at now."""
        taken = list(self)
        self.clear()
        return taken


class Listener:
    """A parameter's hook, and the arrivals that it notes its gradient in."""

    def __init__(self, index: int, wake: Callable[[Arrivals], None]) -> None:
        self._place = [Arrivals()]
        self.hook = _hook(index, self._place, wake)

    def listen_for(self, arrivals: Arrivals) -> None:
        """From now on note the gradient there."""
        self._place[0] = arrivals


def _hook(index: int, place: list[Arrivals], wake: Callable[[Arrivals], None]) -> Callable[[torch.Tensor], None]:
    def note(_: torch.Tensor) -> None:
        arrivals = place[0]
        arrivals.append(index)
        count = len(arrivals)
        if count == 1 or count >= arrivals.needed:
            wake(arrivals)

    return note
