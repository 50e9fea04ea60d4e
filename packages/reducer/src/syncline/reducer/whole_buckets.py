"""Buckets whose gradients are not noted one by one: that they have come is seen in the bucket."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch

from .bucket import Bucket
from .evidence import Evidence
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
        hooked_at_nodes: those of the hooked whose hook is at their node of the graph.
        is_regular: whether every backward gives gradients to the same parameters.

    Attributes:
        awaited, hooked, hooked_at_nodes: as above.
        evidence: what proves that gradients have come.
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
        self.evidence = Evidence(parameters, buckets, is_regular=is_regular)
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

    def begin(self, absent: Sequence[int], *, none_before: bool) -> None:
        """A backward has begun.

        Args:
            absent: these will get no gradient in it.
            none_before: what the evidence said in forward.
        """
        self._expected = self.awaited
        self._absent = absent if none_before else ()
        if absent:
            left_out = frozenset(absent)
            self._expected = {
                number: [index for index in indices if index not in left_out] for number, indices in self.awaited.items()
            }
        self._open = {number for number, indices in self._expected.items() if indices}
        self.evidence.begin(none_before=none_before)

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
        if not self.evidence.of_all(number, self._expected[number]):
            self.order_held &= self.evidence.is_in_doubt(number)
            return ()
        self._open.discard(number)
        return self._expected[number]

    def forget_seen(self, index: int) -> None:
        """The bucket was collected, or will be later, and shall see for itself then."""
        self._buckets[self._number_of[index]].forget_seen()

    def rest(self) -> Iterator[Sequence[int]]:
        """Backward has ended: what there is of the gradients of each bucket that was not ready before."""
        for number in sorted(self._open):
            self.order_held &= self.evidence.is_in_doubt(number)
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
        if self.evidence.of_one(self._number_of[index], index) or accumulates(parameter):
            return True
        hooks_of_ours = index in self.hooked and index not in self.hooked_at_nodes
        has_users_hooks = len(parameter._post_accumulate_grad_hooks or ()) > hooks_of_ours
        return self._inner_backwards and (parameter.grad is not None or has_users_hooks)
