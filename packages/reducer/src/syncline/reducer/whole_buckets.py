"""Buckets whose gradients are not noted one by one: that they have come is seen in the bucket."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import repeat

import torch

from .bucket import Bucket, some_are_none
from .graph_task import accumulates


class WholeBuckets:
    """Those buckets that are looked at as a whole; see Note [One hook for a bucket].

    Args:
        parameters: all of the reducer's.
        buckets: the buckets, by their numbers.
        awaited: those parameters of each that may get a gradient, the one that should be the last to get it at the end.
        hooked: those that have a hook, these last ones among them.
        advice: for errors, if one gets a second gradient.
        inner_backwards: whether gradients may come from re-entrant checkpoints, of which autograd tells nothing.

    Attributes:
        awaited, hooked: as above.
        order_held: whether up to now each bucket could be told to be ready when that last gradient came.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        buckets: Mapping[int, Bucket],
        awaited: Mapping[int, Sequence[int]],
        hooked: Collection[int],
        *,
        advice: str,
        inner_backwards: bool,
    ) -> None:
        self._parameters = parameters
        self._buckets = buckets
        self.awaited = awaited
        self.hooked = hooked
        self._inner_backwards = inner_backwards
        self._expected = awaited
        self._number_of = {index: number for number, indices in awaited.items() for index in indices}
        self._open: set[int] = set()
        self._absent: Sequence[int] = ()
        self._none_before = False
        self.order_held = True
        for bucket in buckets.values():
            bucket.detect_late_gradients(advice)

    @classmethod
    def none(cls) -> WholeBuckets:
        """There are none."""
        return cls((), {}, {}, (), advice="", inner_backwards=False)

    def close(self) -> None:
        """They are looked at as a whole no more."""
        for bucket in self._buckets.values():
            bucket.ignore_late_gradients()

    def __contains__(self, index: object) -> bool:
        return index in self._number_of

    def begin(self, absent: Sequence[int], *, none_before: bool) -> None:
        """A backward has begun.

        Args:
            absent: these will get no gradient in it.
            none_before: no parameter had a gradient then.
        """
        self._expected = self.awaited
        self._absent = absent if none_before else ()
        if absent:
            left_out = frozenset(absent)
            self._expected = {
                number: [index for index in indices if index not in left_out] for number, indices in self.awaited.items()
            }
        self._open = {number for number, indices in self._expected.items() if indices}
        self._none_before = none_before

    def arrive(self, index: int) -> Sequence[int]:
        """The gradient of an awaited parameter has come: which are ready now.

        If it is its bucket's last, they are all that are awaited; or none, if it is not certain that all have come: then `rest`
        tells. If the bucket was ready before, it is the parameter that got a gradient a second time. The bucket holds what was
        seen until `forget_seen`.
        """
        number = self._number_of[index]
        if number not in self._open:
            return (index,)
        if index != self.awaited[number][-1]:
            return ()
        if not (self._none_before and self._are_there(number)):
            self.order_held = False
            return ()
        self._open.discard(number)
        return self._expected[number]

    def forget_seen(self, index: int) -> None:
        """The bucket was collected, or will be later, and shall see for itself then."""
        self._buckets[self._number_of[index]].forget_seen()

    def rest(self) -> Iterator[Sequence[int]]:
        """Backward has ended: what there is of the gradients of each bucket that was not ready before."""
        for number in sorted(self._open):
            self.order_held = False
            yield [index for index in self._expected[number] if self._may_have_come(index)]
        self._open.clear()

    def remember(self, number: int, *, by_hook: bool) -> None:
        """The reduction of a bucket was issued: what comes from now on comes too late."""
        if number in self._buckets:
            self._buckets[number].remember(by_hook=by_hook)

    def check(self) -> None:
        """Backward has ended, and no gradient was written back yet.

        Raises:
            MisuseError: a gradient came too late.
        """
        for bucket in self._buckets.values():
            bucket.check_remembered()

    def unforeseen(self) -> Sequence[int]:
        """Backward has ended: those that have a gradient, although there was to be none, and none was there before."""
        return [index for index in self._absent if index in self and self._parameters[index].grad is not None]

    def forget(self) -> None:
        """Forget this backward."""
        self._open.clear()

    def _may_have_come(self, index: int) -> bool:
        """Whether it has a gradient, or autograd left that undefined, or a user's hook took it away; as far as one sees."""
        parameter = self._parameters[index]
        has_gradient = parameter.grad is not None
        if (has_gradient and self._none_before) or accumulates(parameter):
            return True
        has_users_hooks = len(parameter._post_accumulate_grad_hooks or ()) > (index in self.hooked)
        return self._inner_backwards and (has_gradient or has_users_hooks)

    def _are_there(self, number: int) -> bool:
        bucket, awaited = self._buckets[number], self._expected[number]
        gradients = bucket.look()
        if len(awaited) < len(gradients):
            members = frozenset(awaited)
            gradients = [gradient for index, gradient in zip(bucket.indices, gradients, strict=True) if index in members]
        return not some_are_none(gradients)


def have_none(parameters: Sequence[torch.nn.Parameter]) -> bool:
    """Whether no parameter has a gradient."""
    return all(map(operator.is_, map(operator.attrgetter("grad"), parameters), repeat(None)))
