"""Which gradients and buckets are ready: a state machine over integers. No tensors, no ranks, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


class MarkedTwiceError(ValueError):
    """A gradient was marked ready a second time in one backward; `index` says which."""

    def __init__(self, index: int) -> None:
        super().__init__(f"gradient {index} was marked ready twice")
        self.index = index


class Readiness:
    """Counts gradients into buckets, and lets buckets start strictly in order.

    Note [Buckets start in order]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Gradients may become ready in different orders on different ranks, but the collectives of a group must be issued in one
    order. So bucket k+1 starts only after bucket k has, even if it is ready first; `mark_ready` returns the buckets that may
    start now. Only a model in which the last bucket is ready early loses overlap by this, and the rebuild in order of
    arrival mends it after the first backward.
    """

    def __init__(self, buckets: Sequence[Sequence[int]]) -> None:
        self._members = [frozenset(members) for members in buckets]
        self._bucket_of = {index: number for number, members in enumerate(buckets) for index in members}
        self.reset()

    def reset(self) -> None:
        """Forget everything that was marked."""
        self._missing = [len(members) for members in self._members]
        self._next = 0
        self._at_once: set[int] = set()
        self._arrived: set[int] = set()
        self._order: list[int] = []

    def mark_ready(self, indices: Iterable[int], *, all_of: int | None = None) -> range:
        """Note that gradients are ready, in this order.

        Args:
            indices: the gradients.
            all_of: the number of the bucket of which these are known to be all, each once: it takes a tenth of the time.

        Returns:
            The numbers of the buckets that may start now, in order; mostly none.

        Raises:
            MarkedTwiceError: one was marked before, since the last `reset`.
        """
        indices, before, first = list(indices), len(self._arrived), self._next
        if not indices:
            return range(first, first)
        if all_of is not None and self._missing[all_of] == len(indices):
            self._at_once.add(all_of)
            self._missing[all_of] = 0
        else:
            self._arrived.update(indices)
            if len(self._arrived) < before + len(indices) or (self._at_once and self._were_at_once(indices)):
                raise MarkedTwiceError(_first_repeated(indices, set(self._order)))
            for number, count in self._counts(indices).items():
                self._missing[number] -= count
        self._order += indices
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._next += 1
        return range(first, self._next)

    def _were_at_once(self, indices: Sequence[int]) -> bool:
        return any(self._bucket_of[index] in self._at_once for index in indices)

    def _counts(self, indices: Sequence[int]) -> Mapping[int, int]:
        """How many of these are in which bucket; mostly all are in one."""
        number = self._bucket_of[indices[0]]
        if self._members[number].issuperset(indices):
            return {number: len(indices)}
        return Counter(map(self._bucket_of.__getitem__, indices))

    @property
    def is_complete(self) -> bool:
        """Whether all buckets may have started."""
        return self._next == len(self._missing)

    def arrival_order(self) -> list[int]:
        """The gradients marked so far, first to last."""
        return list(self._order)

    def missing(self) -> list[int]:
        """The gradients not marked so far, ascending."""
        return sorted(set(self._bucket_of).difference(self._order))


def _first_repeated(indices: Sequence[int], seen: set[int]) -> int:
    for index in indices:
        if index in seen:
            return index
        seen.add(index)
    raise AssertionError("called if one is repeated")
