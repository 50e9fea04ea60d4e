"""What proves that the gradients which lie in a bucket came in this backward."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from itertools import repeat

import torch

from .bucket import Bucket, some_are_none

_gradient_of = operator.attrgetter("grad")


class Evidence:
    """Two kinds of proof: in forward there was none, or it looks new, as far as its bucket can tell that.

    A bucket tells after it has once seen gradients that were proven to be new (Note [Gradients that are new]); then forward
    need not look at it any more. Not so after a backward that is not synchronised, which leaves new gradients behind.

    Args:
        parameters: all of the reducer's.
        buckets: the buckets that are asked about, by their numbers.
        is_regular: whether every backward gives gradients to the same parameters. If not, no bucket tells: where one should get
            no gradient, it must not have got any.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], buckets: Mapping[int, Bucket], *, is_regular: bool) -> None:
        self._parameters = parameters
        self._buckets = buckets
        self._may_learn = set(buckets) if is_regular else set()
        self._telling: set[int] = set()
        self._silent_parameters: Sequence[torch.nn.Parameter] | None = parameters
        self._forwards = 0
        # In this backward:
        self._told: frozenset[int] = frozenset()
        self._had_none: frozenset[int] = frozenset()
        self._in_doubt: set[int] = set()

    # ---- in forward ----

    def none_before(self) -> bool:
        """Whether there are no gradients: in buckets that do not tell, and at one place of each that does.

        It is another place each time. Mostly gradients are kept of all parameters or of none.
        """
        self._forwards += 1
        for number in list(self._telling):
            members = self._buckets[number].parameters
            if members[self._forwards % len(members)].grad is not None:
                self._silence(number)
        return all(map(operator.is_, map(_gradient_of, self._not_told()), repeat(None)))

    def forget(self) -> None:
        """Let no bucket tell until gradients were proven to be new again: there will be some that nothing was written to."""
        self._telling.clear()
        self._silent_parameters = None

    # ---- in backward ----

    def begin(self, *, none_before: bool) -> None:
        """A backward has begun; `none_before` as forward said, if no other backward ran since."""
        self._told = frozenset(self._telling)
        self._had_none = frozenset(self._buckets) - self._told if none_before else frozenset()
        self._in_doubt.clear()

    def of_all(self, number: int, awaited: Collection[int]) -> bool:
        """Whether the awaited gradients of a bucket, by index, have come, for certain."""
        bucket = self._buckets[number]
        gradients = bucket.look()
        if number in self._told:
            if bucket.sees_new():
                return True
            self._may_learn.discard(number)
            self._silence(number)
            if not some_are_none(gradients):
                self._in_doubt.add(number)
            return False
        if number not in self._had_none:
            return False
        if number in self._may_learn:
            if bucket.learn_new():
                self._telling.add(number)
                self._silent_parameters = None
                return True
            self._may_learn.discard(number)
        if len(awaited) < len(gradients):
            members = frozenset(awaited)
            gradients = [gradient for index, gradient in zip(bucket.indices, gradients, strict=True) if index in members]
        return not some_are_none(gradients)

    def of_one(self, number: int, index: int) -> bool:
        """Whether there is a gradient of this parameter in the bucket that has come, for certain."""
        if number in self._had_none:
            return self._parameters[index].grad is not None
        return number in self._told and self._buckets[number].has_new(index)

    def is_in_doubt(self, number: int) -> bool:
        """Whether all gradients of a bucket were there, and some did not look new: that says nothing of their order."""
        return number in self._in_doubt

    def _silence(self, number: int) -> None:
        self._telling.discard(number)
        self._silent_parameters = None

    def _not_told(self) -> Sequence[torch.nn.Parameter]:
        if self._silent_parameters is None:
            told = {index for number in self._telling for index in self._buckets[number].indices}
            self._silent_parameters = [parameter for index, parameter in enumerate(self._parameters) if index not in told]
        return self._silent_parameters
