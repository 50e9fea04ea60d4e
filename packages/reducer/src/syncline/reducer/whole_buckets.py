"""Buckets whose gradients are not noted one by one: that they have come is seen in the bucket."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import repeat

import torch

from .bucket import Bucket


class WholeBuckets:
    """Those buckets that are looked at as a whole; see Note [One hook for a bucket].

    Args:
        awaited: for each of them, by its number, the bucket and those of its parameters that get a gradient in every backward,
            the one that should be the last to get it at the end.

    Attributes:
        kept_order: whether up to now all gradients were there, and seen to be new, when the last one came.
    """

    def __init__(self, awaited: Mapping[int, tuple[Bucket, Sequence[int]]]) -> None:
        self._awaited = awaited
        self._open: set[int] = set()
        self.kept_order = True

    def __bool__(self) -> bool:
        return bool(self._awaited)

    def begin(self) -> None:
        """A backward has begun."""
        self._open = set(self._awaited)

    def look(self, number: int) -> Sequence[int]:
        """The last gradient of a bucket has come: which parameters are ready now.

        They are all that are awaited; or none, if it is not certain that all have come: `rest` tells, then. If the bucket was
        ready before, it is the parameter that got a gradient a second time. The bucket holds what was seen until `look_away`.
        """
        bucket, awaited = self._awaited[number]
        if number not in self._open:
            return awaited[-1:]
        if not self._are_new(bucket, awaited):
            self.kept_order = False
            return ()
        self._open.discard(number)
        return awaited

    def look_away(self, number: int) -> None:
        """The bucket was collected, or will be later, and shall see for itself then."""
        self._awaited[number][0].look_away()

    def rest(self) -> Iterator[Sequence[int]]:
        """Backward has ended: what has come of the gradients of each bucket that was not ready before."""
        for number in sorted(self._open):
            self.kept_order = False
            _, awaited = self._awaited[number]
            bucket = self._awaited[number][0]
            there = dict(zip(bucket.indices, (parameter.grad is not None for parameter in bucket.parameters), strict=True))
            yield [index for index in awaited if there[index]]
        self._open.clear()

    def forget(self) -> None:
        """Forget this backward."""
        self._open.clear()

    def _are_new(self, bucket: Bucket, awaited: Collection[int]) -> bool:
        """Whether each has a gradient that is not one from before. Those that are copied were all None in forward."""
        gradients, views = bucket.look(), bucket.views
        if len(awaited) < len(gradients):
            members = set(awaited)
            chosen = [place for place, index in enumerate(bucket.indices) if index in members]
            gradients, views = [gradients[place] for place in chosen], [views[place] for place in chosen]
        return not (any(map(operator.is_, gradients, repeat(None))) or any(map(operator.is_, gradients, views)))


def have_none(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether no parameter has a gradient."""
    return all(map(operator.is_, map(operator.attrgetter("grad"), parameters), repeat(None)))
