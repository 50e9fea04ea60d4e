"""Parameters whose gradients are final only when another one's is there."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .graph import Graph


class DelayedGraph(Graph):
    """A graph in which some parameters get any number of gradients, until the gradient of another one arrives.

    Args:
        graph: what is known of the graph otherwise.
        delayed: the parameters that wait, by index; they are in the last buckets.
        until: the parameter for whose last gradient they wait. If it does not come, or is None, they wait for the end of
            backward.
    """

    def __init__(self, graph: Graph, delayed: Collection[int], until: int | None) -> None:
        self._graph = graph
        self._delayed = frozenset(delayed)
        self._until = until
        self._released = False
        self.advice_missing = graph.advice_missing
        self.advice_twice = (
            f"{graph.advice_twice}; or it came after that of param_to_hook_all_reduce, although it is delayed until then: "
            "name a parameter there whose gradient comes later"
        )
        self.order_recurs = graph.order_recurs

    @property
    def needs_everyone(self) -> bool:
        """As without delay."""
        return self._graph.needs_everyone

    def begin(self) -> Sequence[int]:
        """As without delay, but for the delayed."""
        return [index for index in self._graph.begin() if index not in self._delayed]

    def needed(self, indices: Collection[int]) -> int:
        """As without delay, in buckets that have nothing to do with it; others are looked at gradient by gradient."""
        return 1 if self._until in indices or not self._delayed.isdisjoint(indices) else self._graph.needed(indices)

    def sit_out(self) -> None:
        """As without delay."""
        self._graph.sit_out()

    def arrived(self, indices: Sequence[int], undefined: Collection[int]) -> Sequence[int]:
        """A delayed one is final when the one that it waits for has arrived; one that comes later is refused by readiness."""
        return [final for index in indices for final in self._arrived(index, undefined)]

    def _arrived(self, index: int, undefined: Collection[int]) -> Sequence[int]:
        if index in self._delayed and index != self._until:
            self._graph.used([index], undefined)
            return (index,) if self._released else ()
        final = self._graph.arrived([index], undefined)
        if index != self._until or self._released or index not in final:
            return final
        self._released = True
        return [*(other for other in final if other not in self._delayed), *sorted(self._delayed)]

    def accumulated(self, indices: Sequence[int], undefined: Collection[int]) -> None:
        """As without delay."""
        self._graph.accumulated(indices, undefined)

    def used(self, indices: Sequence[int], undefined: Collection[int]) -> None:
        """As without delay."""
        self._graph.used(indices, undefined)

    def ended(self) -> Sequence[int]:
        """The delayed, too, if they still wait."""
        final = [index for index in self._graph.ended() if index not in self._delayed]
        return final if self._released else [*final, *sorted(self._delayed)]

    def may_skip(self, indices: Collection[int]) -> bool:
        """As without delay."""
        return self._graph.may_skip(indices)

    def agree(self) -> None:
        """As without delay."""
        self._graph.agree()

    def unused_here(self, indices: Collection[int]) -> frozenset[int]:
        """As without delay."""
        return self._graph.unused_here(indices)

    def untouched(self, indices: Collection[int]) -> frozenset[int]:
        """As without delay."""
        return self._graph.untouched(indices)

    def forget(self) -> None:
        """As without delay, and wait anew."""
        self._graph.forget()
        self._released = False
