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

    What lies in a bucket came in this backward if its parameters had no gradients in forward, or if it looks new, as far as
    the bucket can tell after it has seen new gradients once; see Note [Gradients that are new]. Then forward need not look.
    Not so after a backward that is not synchronised, which leaves new gradients behind; and never where other parameters are
    unused each time: there, one that should get no gradient must not have got any.

    Args:
        parameters: all of the reducer's.
        buckets: the buckets, by their numbers.
        awaited: those parameters of each that may get a gradient, the one that should be the last to get it at the end.
        hooked: those that have a hook, these last ones among them.
        advice: for errors, if one gets a second gradient.
        inner_backwards: whether gradients may come from re-entrant checkpoints, of which autograd tells nothing.
        hooked_at_nodes: those of the hooked whose hook is at their node of the graph.
        is_regular: whether every backward gives gradients to the same parameters.

    Attributes:
        awaited, hooked, hooked_at_nodes: as above.
        order_held: whether up to now each bucket could be told to be ready when that last gradient came.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        buckets: Mapping[int, Bucket],
        awaited: Mapping[int, Sequence[int]],
        hooked: Collection[int],
        hooked_at_nodes: Collection[int],
        *,
        advice: str,
        inner_backwards: bool,
        is_regular: bool,
    ) -> None:
        self._parameters = parameters
        self._buckets = buckets
        self.awaited = awaited
        self.hooked = hooked
        self.hooked_at_nodes = hooked_at_nodes
        self._inner_backwards = inner_backwards
        self._expected = awaited
        self._number_of = {index: number for number, indices in awaited.items() for index in indices}
        self._open: set[int] = set()
        self._absent: Sequence[int] = ()
        self._had_none: frozenset[int] = frozenset()
        self._may_tell = set(buckets) if is_regular else set()
        self._telling: set[int] = set()
        self._told: frozenset[int] = frozenset()
        self._unsure: set[int] = set()
        self._turn = 0
        self._doubted: Sequence[torch.nn.Parameter] | None = None
        self.order_held = True
        for bucket in buckets.values():
            bucket.detect_late_gradients(advice)

    @classmethod
    def none(cls, parameters: Sequence[torch.nn.Parameter]) -> WholeBuckets:
        """There are none."""
        return cls(parameters, {}, {}, (), (), advice="", inner_backwards=False, is_regular=False)

    def close(self) -> None:
        """They are looked at as a whole no more."""
        for bucket in self._buckets.values():
            bucket.ignore_late_gradients()

    def __contains__(self, index: object) -> bool:
        return index in self._number_of

    def __iter__(self) -> Iterator[int]:
        """The awaited parameters; those first that come first."""
        return iter(self._number_of)

    def number_of(self, index: int) -> int:
        """The bucket of one of the awaited parameters."""
        return self._number_of[index]

    def had_none(self) -> bool:
        """Whether parameters have no gradients before this forward: all that are doubted, and one in each other bucket.

        Mostly gradients are kept of all parameters or of none. It is another one each time.
        """
        self._turn += 1
        for number in list(self._telling):
            members = self._buckets[number].parameters
            if members[self._turn % len(members)].grad is not None:
                self._telling.discard(number)
                self._doubted = None
        return all(map(operator.is_, map(operator.attrgetter("grad"), self.doubted), repeat(None)))

    @property
    def doubted(self) -> Sequence[torch.nn.Parameter]:
        """The parameters of buckets that do not tell whether their gradients are new."""
        if self._doubted is None:
            told = {index for number in self._telling for index in self._buckets[number].indices}
            self._doubted = [parameter for index, parameter in enumerate(self._parameters) if index not in told]
        return self._doubted

    def doubt_all(self) -> None:
        """Let no bucket tell until its gradients are proven to be new again: there will be some that nothing was written to."""
        self._telling.clear()
        self._doubted = None

    def begin(self, absent: Sequence[int], *, none_before: bool) -> None:
        """A backward has begun.

        Args:
            absent: these will get no gradient in it.
            none_before: none of those that are doubted had a gradient in forward.
        """
        self._expected = self.awaited
        self._absent = absent if none_before else ()
        if absent:
            left_out = frozenset(absent)
            self._expected = {
                number: [index for index in indices if index not in left_out] for number, indices in self.awaited.items()
            }
        self._open = {number for number, indices in self._expected.items() if indices}
        self._told = frozenset(self._telling)
        self._unsure.clear()
        self._had_none = frozenset(self.awaited) - self._told if none_before else frozenset()

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
        if not self._have_come(number):
            return ()
        self._open.discard(number)
        return self._expected[number]

    def forget_seen(self, index: int) -> None:
        """The bucket was collected, or will be later, and shall see for itself then."""
        self._buckets[self._number_of[index]].forget_seen()

    def rest(self) -> Iterator[Sequence[int]]:
        """Backward has ended: what there is of the gradients of each bucket that was not ready before."""
        for number in sorted(self._open):
            self.order_held &= number in self._unsure
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
        parameter, number = self._parameters[index], self._number_of[index]
        has_gradient = parameter.grad is not None
        if has_gradient and (number in self._had_none or (number in self._told and self._buckets[number].has_new(index))):
            return True
        if accumulates(parameter):
            return True
        hooks_of_ours = index in self.hooked and index not in self.hooked_at_nodes
        has_users_hooks = len(parameter._post_accumulate_grad_hooks or ()) > hooks_of_ours
        return self._inner_backwards and (has_gradient or has_users_hooks)

    def _have_come(self, number: int) -> bool:
        """Whether all that are awaited have come, for certain."""
        bucket, awaited = self._buckets[number], self._expected[number]
        gradients = bucket.look()
        if number in self._telling:
            if bucket.sees_new():
                return True
            self._doubt(number)
            if not some_are_none(gradients):
                self._unsure.add(number)
            return False
        if number in self._had_none:
            if number in self._may_tell and self._learn_whether_it_tells(number):
                return True
            if len(awaited) < len(gradients):
                members = frozenset(awaited)
                gradients = [gradient for index, gradient in zip(bucket.indices, gradients, strict=True) if index in members]
            if not some_are_none(gradients):
                return True
        self.order_held = False
        return False

    def _learn_whether_it_tells(self, number: int) -> bool:
        """Its gradients came after forward, if they are there: do they show it?"""
        if self._buckets[number].learn_new():
            self._telling.add(number)
            self._doubted = None
            return True
        self._may_tell.discard(number)
        return False

    def _doubt(self, number: int) -> None:
        """Gradients are kept, or changed before the bucket sees them."""
        self._may_tell.discard(number)
        self._telling.discard(number)
        self._doubted = None
