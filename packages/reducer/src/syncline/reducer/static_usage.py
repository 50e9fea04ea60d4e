"""Handle a graph that never changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

import torch

from syncline.collectives import ProcessGroup

from .dynamic_usage import UsedMap, without
from .usage import UnexpectedGradientError, UsageModel


class StaticUsage(UsageModel):
    """A usage model for `static_graph=True`: in every backward, each parameter gets as many gradients as in the first backward.

    "The first backward" is the first backward that averages gradients. A parameter may get no gradient, or several gradients
    (from re-entrant checkpoints). All gradients of the first backward are reduced at its end. Then the ranks also agree on the
    parameters that at least one rank uses. In later backwards, a parameter is ready as soon as its last gradient has come.

    A backward inside `no_sync` may leave out parameters. If a backward inside `no_sync` runs before the first backward, it may
    also use parameters that the first backward does not use. The gradients of these parameters are averaged once, together with
    the gradients of the first backward. Later, a gradient of such a parameter is an error.
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
        # Parameters whose gradient was None in the first backward on this rank. After this backward, only the parameters whose
        # gradient was None on every rank.
        self._undefined: frozenset[int] = frozenset()
        self._repeated: frozenset[int] = frozenset()
        self._counts: Counter[int] = Counter()
        self._used: set[int] = set()
        self._regular: set[int] = set()  # parameters that the first backward itself has used
        self._is_first = True
        self._map = UsedMap(group, parameters[0].device)
        self._is_map_synced = False

    def begin(self) -> Sequence[int]:
        return self._absent

    @property
    def needs_everyone(self) -> bool:
        """True until the ranks have agreed on the used parameters, at the end of the first backward with averaging."""
        return not self._is_map_synced

    @property
    def asks_for_undefined(self) -> bool:
        return self._expected is None or bool(self._undefined)

    def needed(self, indices: Collection[int]) -> int | None:
        expected = self._expected
        return None if expected is None else sum(expected[index] for index in indices)

    def arrived(self, indices: Sequence[int], undefined: Collection[int]) -> Sequence[int]:
        """Return the parameters whose last gradient of this backward has come.

        The first backward with averaging shows how many gradients each parameter gets. During this backward, the result is
        empty. If a parameter gets more gradients than expected, the method returns the parameter again for each additional
        gradient. Then the reducer raises an error.

        Raises:
            UnexpectedGradientError: a gradient that was None on every rank in the first backward now has a value.
        """
        if self._expected is None:
            self._counts.update(indices)
            self.accumulated(indices, undefined)
            self._regular.update(index for index in indices if index not in undefined)
            return ()
        # The ranks do not average a gradient that was None on every rank. If this gradient has a value now, refuse it.
        if self._undefined:
            self._refuse(index for index in indices if index in self._undefined and index not in undefined)
        # The usual case: each of these parameters gets one gradient.
        if not self._repeated or self._repeated.isdisjoint(indices):
            return indices
        final, counts, expected = [], self._counts, self._expected
        for index in indices:
            counts[index] += 1
            if counts[index] >= expected[index]:
                final.append(index)
        return final

    def accumulated(self, indices: Sequence[int], undefined: Collection[int]) -> None:
        """Until the end of the first backward with averaging, record the used parameters. Later, only check the parameters.

        Raises:
            UnexpectedGradientError: a later backward uses a parameter that the first backward did not use on this rank. Or it
                uses a parameter whose gradient was None on every rank in the first backward.
        """
        if self._expected is None:
            self._used.update(index for index in indices if index not in undefined)
            return
        # If the gradient was None on this rank, but not on every rank, it is averaged in every backward.
        nobodys = (index for index in indices if index not in self._expected or index in self._undefined)
        self._refuse(index for index in nobodys if index not in undefined)

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
        # In the first backward no gradient was final before its end, so all parameters are final only here.
        return range(self._count)

    def sync_used_map(self) -> None:
        """In the first backward with averaging, find out which parameters at least one rank used. Later, do nothing.

        Cost: an all_reduce of one byte for each parameter.
        """
        if not self._is_map_synced:
            # Level 1: used before the first reduction. Level 2: used by the first backward itself.
            self._map.sync(bytes((index in self._used) + (index in self._regular) for index in range(self._count)))
            self._is_map_synced = True

    def locally_unused(self, indices: Collection[int]) -> frozenset[int]:
        """Return those of the given parameters that got no gradient on this rank in the first backward with averaging.

        During that backward, the gradients of earlier backwards, such as in `no_sync`, count as well.
        """
        return without(indices, self._used if self._is_first else self._regular, self._count)

    def globally_unused(self, indices: Collection[int]) -> frozenset[int]:
        """Return those of the given parameters that no rank uses, as the ranks agreed in the first backward with averaging."""
        doubtful = self.locally_unused(indices)
        return self._map.unused(doubtful, 1 if self._is_first else 2) if doubtful else frozenset()

    def reset(self) -> None:
        if self._counts:
            self._counts = Counter()
        # Keep only the parameters that no rank uses. Gradients of the other parameters are averaged, and may have values later.
        if self._is_first and self._undefined:
            self._undefined = self._map.unused(self._undefined, 2)
        self._is_first = self._expected is None
