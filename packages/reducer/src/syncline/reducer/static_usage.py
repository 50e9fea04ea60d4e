"""A graph that never changes: learnt in the first backward, held to in the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch

from syncline.collectives import ProcessGroup

from .dynamic_usage import UsedMap, without
from .usage import UnexpectedGradientError, UsageModel


class StaticUsage(UsageModel):
    """Every backward gives each parameter as many gradients as the first did (`static_graph=True`).

    A parameter may get several in one backward, from re-entrant checkpoints, or none. In the first backward nobody knows
    which gradient is the last, so all are reduced at its end; there the ranks also agree which parameters are used on any
    rank. From the second backward on a parameter is ready when its last gradient has come, and buckets overlap.

    Backwards that are not synchronised may leave out parameters, but not use others. What they used before the first
    reduction is reduced by it, and only that once if the first synchronised backward did not use it.
    """

    hint_missing = (
        "The graph is not static: pass static_graph=False\n"
        "  These parameters had more gradients in the first backward. If some are unused now and then, pass "
        "find_unused_parameters=True as well."
    )
    hint_twice = (
        "The graph is not static: pass static_graph=False\n"
        "  The parameter had fewer gradients in the first backward. In checkpoints, pass use_reentrant=False as well."
    )

    def __init__(self, parameters: Sequence[torch.nn.Parameter], group: ProcessGroup) -> None:
        self._count = len(parameters)
        self._expected: Counter[int] | None = None
        self._absent: list[int] = []
        self._undefined: frozenset[int] = frozenset()  # came in the first backward, but as None, on every rank
        self._repeated: frozenset[int] = frozenset()
        self._counts: Counter[int] = Counter()
        self._used: set[int] = set()
        self._regular: set[int] = set()  # used by the first backward itself
        self._is_first = True
        self._map = UsedMap(group, parameters[0].device)
        self._is_map_synced = False

    def begin(self) -> Sequence[int]:
        return self._absent

    @property
    def needs_everyone(self) -> bool:
        """In the first backward, where the ranks agree which parameters are used."""
        return not self._is_map_synced

    @property
    def asks_for_undefined(self) -> bool:
        return self._expected is None or bool(self._undefined)

    def needed(self, indices: Collection[int]) -> int | None:
        expected = self._expected
        return None if expected is None else sum(expected[index] for index in indices)

    def arrived(self, indices: Sequence[int], undefined: Collection[int]) -> Sequence[int]:
        """Final are the last that are expected, and those one too many, which readiness refuses."""
        if self._expected is None:
            self._counts.update(indices)
            self.accumulated(indices, undefined)
            self._regular.update(index for index in indices if index not in undefined)
            return ()
        if self._undefined:
            self._refuse(index for index in indices if index in self._undefined and index not in undefined)
        if not self._repeated or self._repeated.isdisjoint(indices):
            return indices
        final, counts, expected = [], self._counts, self._expected
        for index in indices:
            counts[index] += 1
            if counts[index] >= expected[index]:
                final.append(index)
        return final

    def accumulated(self, indices: Sequence[int], undefined: Collection[int]) -> None:
        """Count as uses in the first backward; later ones may not use what that did not.

        Raises:
            UnexpectedGradientError: one does.
        """
        if self._expected is None:
            self._used.update(index for index in indices if index not in undefined)
            return
        self._refuse(index for index in indices if index not in self._regular and index not in undefined)

    def _refuse(self, unexpected: Iterable[int]) -> None:
        for index in unexpected:
            raise UnexpectedGradientError(index)

    def ended(self) -> Sequence[int]:
        if self._expected is not None:
            return ()
        self._expected = self._counts
        self._undefined = frozenset(self._expected).difference(self._regular)
        self._absent = [index for index in range(self._count) if index not in self._expected]
        self._repeated = frozenset(index for index, count in self._expected.items() if count > 1)
        return range(self._count)

    def sync_used_map(self) -> None:
        """Once, one all_reduce of a byte for each parameter."""
        if not self._is_map_synced:
            self._map.sync(bytes((index in self._used) + (index in self._regular) for index in range(self._count)))
            self._is_map_synced = True

    def locally_unused(self, indices: Collection[int]) -> frozenset[int]:
        """Those that were given no gradient in the first backward, or, in that, up to then."""
        return without(indices, self._used if self._is_first else self._regular, self._count)

    def globally_unused(self, indices: Collection[int]) -> frozenset[int]:
        """As agreed in the first backward."""
        doubtful = self.locally_unused(indices)
        return self._map.unused(doubtful, 1 if self._is_first else 2) if doubtful else frozenset()

    def reset(self) -> None:
        if self._counts:
            self._counts = Counter()
        if self._is_first and self._undefined:  # where another rank uses one, it is averaged anyway
            self._undefined = self._map.unused(self._undefined, 2)
        self._is_first = self._expected is None
