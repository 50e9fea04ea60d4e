"""A graph that never changes: learnt in the first backward, held to in the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch

from syncline.collectives import ProcessGroup

from .graph import Graph, UnexpectedGradientError
from .used_parameters import UsedMap, without


class StaticGraph(Graph):
    """Every backward gives each parameter as many gradients as the first did (`static_graph=True`).

    A parameter may get several in one backward, from re-entrant checkpoints, or none. In the first backward nobody knows
    which gradient is the last, so all are reduced at its end; there the ranks also agree which parameters are used on any
    rank. From the second backward on a parameter is ready when its last gradient has come, and buckets overlap.

    Backwards that are not synchronised may leave out parameters, but not use others. What they used before the first
    reduction is reduced by it, and only that once if the first synchronised backward did not use it.
    """

    one_hook_may_do = True
    never_changes = True
    advice_missing = (
        "The graph is not static: these had more gradients in the first backward. Pass static_graph=False (and "
        "find_unused_parameters=True if parameters are unused now and then)"
    )
    advice_twice = (
        "The graph is not static: it had fewer gradients in the first backward. Pass static_graph=False (and "
        "use_reentrant=False in checkpoints)"
    )

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: ProcessGroup) -> None:
        self._count = len(parameters)
        self._expected: Counter[int] | None = None
        self._absent: list[int] = []
        self._repeated: frozenset[int] = frozenset()
        self._arrivals: Counter[int] = Counter()
        self._last_arrival: dict[int, None] = {}
        self._used: set[int] = set()
        self._regular: set[int] = set()  # used by the first backward itself
        self._is_first = True
        self._map = UsedMap(group, parameters[0].device)
        self._agreed = False

    def begin(self) -> Sequence[int]:
        """Those that had no gradient in the first backward."""
        return self._absent

    @property
    def needs_everyone(self) -> bool:
        """In the first backward, where the ranks agree which parameters are used."""
        return not self._agreed

    @property
    def minds_undefined(self) -> bool:  # type: ignore[override]  # it depends
        """Only in the first backward."""
        return self._expected is None

    def needed(self, indices: Collection[int]) -> int:
        """As many as in the first backward."""
        expected = self._expected
        return 1 if expected is None else sum(expected[index] for index in indices)

    def once(self, indices: Collection[int]) -> Sequence[int] | None:
        """As in the first backward."""
        if self._expected is None or not self._repeated.isdisjoint(indices):
            return None
        found = [index for index in indices if index in self._expected]
        return found if self._regular.issuperset(found) else None  # some came, and a user's hook took them away

    def arrived(self, indices: Sequence[int], undefined: Collection[int]) -> Sequence[int]:
        """Final are the last that are expected, and those one too many, which readiness refuses."""
        if self._expected is None:
            self._learn(indices, undefined)
            return ()
        if not self._repeated or self._repeated.isdisjoint(indices):
            return indices
        final, arrivals, expected = [], self._arrivals, self._expected
        for index in indices:
            arrivals[index] += 1
            if arrivals[index] >= expected[index]:
                final.append(index)
        return final

    def _learn(self, indices: Sequence[int], undefined: Collection[int]) -> None:
        for index in indices:
            self._arrivals[index] += 1
            self._last_arrival.pop(index, None)
            self._last_arrival[index] = None
        self.used(indices, undefined)

    def accumulated(self, indices: Sequence[int], undefined: Collection[int]) -> None:
        """Count as uses in the first backward; later ones may not use what that did not.

        Raises:
            UnexpectedGradientError: it does.
        """
        if self._expected is None:
            self._used.update(index for index in indices if index not in undefined)
            return
        for index in indices:
            if index not in self._regular:
                raise UnexpectedGradientError(index)

    def used(self, indices: Sequence[int], undefined: Collection[int]) -> None:
        """As `accumulated`, and in each later backward, too.

        Raises:
            UnexpectedGradientError: as there.
        """
        self.accumulated(indices, undefined)
        if self._expected is None:
            self._regular.update(index for index in indices if index not in undefined)

    def ended(self) -> Sequence[int]:
        """In the first backward all: in the order of their last gradients, then those that had none."""
        if self._expected is not None:
            return ()
        self._expected = self._arrivals
        self._absent = [index for index in range(self._count) if index not in self._expected]
        self._repeated = frozenset(index for index, count in self._expected.items() if count > 1)
        rest = [index for index in range(self._count) if index not in self._last_arrival]
        return [*self._last_arrival, *rest]

    def agree(self) -> None:
        """Once, one all_reduce of a byte for each parameter."""
        if not self._agreed:
            self._map.agree(bytes((index in self._used) + (index in self._regular) for index in range(self._count)))
            self._agreed = True

    def unused_here(self, indices: Collection[int]) -> frozenset[int]:
        """Those that were given no gradient in the first backward, or, in that, up to then."""
        return without(indices, self._used if self._is_first else self._regular, self._count)

    def untouched(self, indices: Collection[int]) -> frozenset[int]:
        """As agreed in the first backward."""
        doubtful = self.unused_here(indices)
        return self._map.unused(doubtful, 1 if self._is_first else 2) if doubtful else frozenset()

    def forget(self) -> None:
        """Expect the same again."""
        if self._arrivals:
            self._arrivals = Counter()
        self._is_first = self._expected is None
