"""Which reducers average the same parameters."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence

import torch

_lock = threading.RLock()  # a claim may be made where another one is: the garbage collector runs anything
_living: weakref.WeakSet[Claim] = weakref.WeakSet()


class Claim:
    """That somebody averages these parameters, until it is given up or forgotten.

    Args:
        parameters: the parameters; held, because they are known by where they are in memory.
        in_place: whether gradients are averaged where they are, so that nobody else can read them meanwhile.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], *, in_place: bool = False) -> None:
        self._parameters = parameters
        self._in_place = in_place
        self._places = frozenset(map(id, parameters))
        self._others: list[weakref.ref[Claim]] = []
        self._is_given_up = False
        with _lock:
            for other in list(_living):
                if not self._places.isdisjoint(other._places):
                    other._others.append(weakref.ref(self))
                    self._others.append(weakref.ref(other))
            _living.add(self)

    @property
    def is_shared(self) -> bool:
        """Whether somebody else averages any of the parameters, too."""
        return bool(self._others) and any(True for _ in self._rivals())

    @property
    def is_disturbed(self) -> bool:
        """Whether one of both reads what the other averages in place."""
        return bool(self._others) and any(self._in_place or other._in_place for other in self._rivals())

    def give_up(self) -> None:
        """It is averaged no more. May be called at any time, by the garbage collector, too: it takes no lock."""
        self._is_given_up = True

    def _rivals(self) -> Iterator[Claim]:
        for reference in self._others:
            other = reference()
            if other is not None and not other._is_given_up:
                yield other
