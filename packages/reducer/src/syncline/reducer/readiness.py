"""A state machine that tells which gradients and buckets are ready."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence


class MarkedTwiceError(ValueError):
    """Raised if the gradient `index` is marked ready a second time in one backward."""

    def __init__(self, index: int) -> None:
        super().__init__(f"gradient {index} was marked ready twice")
        self.index = index


class Readiness:
    """Decides when the reduction of each bucket may start: when all gradients of this bucket and of earlier buckets are ready.

    So the buckets start in the same order on every rank.

    Args:
        buckets: the indices of the gradients in each bucket.
    """

    # Note [Buckets start in order]
    # ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    # Gradients may become ready in different orders on different ranks, but all ranks must issue the collectives of a group in
    # one order. So bucket k+1 starts only after bucket k, even if bucket k+1 is ready first; `mark_ready` returns the buckets
    # that may start now. If an early bucket is ready late, later buckets overlap less with backward. When the order of arrival
    # is known, the reducer builds the buckets again in this order, so that they are ready in order.

    def __init__(self, buckets: Sequence[Sequence[int]]) -> None:
        self._members = [frozenset(members) for members in buckets]
        self._bucket_of = {index: number for number, members in enumerate(buckets) for index in members}
        self.reset()

    def reset(self) -> None:
        """Mark all gradients as not ready, before the next backward."""
        self._missing = [len(members) for members in self._members]
        self._next = 0
        self._ready: set[int] = set()

    def mark_ready(self, indices: Sequence[int]) -> range:
        """Mark the gradients with these indices as ready.

        Returns:
            The numbers of the buckets that may start because of this call, in order. Empty if there is none.

        Raises:
            MarkedTwiceError: one of the gradients was already marked since the last `reset`.
        """
        first = self._next
        if not indices:
            return range(first, first)
        # A gradient was marked by an earlier call, or comes twice in this call.
        if not self._ready.isdisjoint(indices) or len(set(indices)) < len(indices):
            raise MarkedTwiceError(_first_repeated(indices, self._ready))
        self._ready.update(indices)
        for number, count in self._counts(indices).items():
            self._missing[number] -= count
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self._next += 1
        return range(first, self._next)

    def _counts(self, indices: Sequence[int]) -> Mapping[int, int]:
        number = self._bucket_of[indices[0]]
        # The usual case: all these gradients are in one bucket.
        if self._members[number].issuperset(indices):
            return {number: len(indices)}
        return Counter(map(self._bucket_of.__getitem__, indices))

    @property
    def is_complete(self) -> bool:
        """Whether all buckets may start, because all gradients are ready."""
        return self._next == len(self._missing)

    def missing(self) -> list[int]:
        """Return the indices of the gradients that are not marked yet, in ascending order."""
        return sorted(set(self._bucket_of).difference(self._ready))


def _first_repeated(indices: Sequence[int], ready: Collection[int]) -> int:
    return next(index for position, index in enumerate(indices) if index in ready or index in indices[:position])
