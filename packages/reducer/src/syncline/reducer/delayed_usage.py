"""Handle delayed parameters, which wait for the gradient of another parameter."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .usage import UsageModel


class DelayedUsage(UsageModel):
    """A usage model in which some parameters may get any number of gradients, until the gradient of `until` comes.

    Args:
        usage: the usage model for all other parameters.
        delayed: indices of the delayed parameters, which the last buckets contain.
        until: the index of the parameter for whose last gradient the delayed parameters wait. If None, or if this gradient does
            not come, the delayed parameters wait for the end of backward.
    """

    def __init__(self, usage: UsageModel, delayed: Collection[int], until: int | None) -> None:
        self._usage = usage
        self._delayed = frozenset(delayed)
        self._until = until
        self._released = False
        self.hint_missing = usage.hint_missing
        self.hint_twice = (
            f"{usage.hint_twice}; or it came after that of param_to_hook_all_reduce, although it is delayed until then: "
            "name a parameter there whose gradient comes later"
        )
        self.order_recurs = usage.order_recurs

    @property
    def needs_everyone(self) -> bool:
        return self._usage.needs_everyone

    def begin(self) -> Sequence[int]:
        return [index for index in self._usage.begin() if index not in self._delayed]

    def needed(self, indices: Collection[int]) -> int | None:
        """Return how many gradients these parameters of one bucket get in this backward. None: the number is not known.

        For a bucket with a delayed parameter or with `until`, the result is None. For any other bucket, the wrapped usage model
        gives the result.
        """
        return None if self._until in indices or not self._delayed.isdisjoint(indices) else self._usage.needed(indices)

    def shadow_backward(self) -> None:
        self._usage.shadow_backward()

    def arrived(self, indices: Sequence[int], undefined: Collection[int]) -> Sequence[int]:
        """Return the parameters whose gradients are final. A delayed gradient is final only after the gradient of `until`."""
        return [final for index in indices for final in self._arrived(index, undefined)]

    def _arrived(self, index: int, undefined: Collection[int]) -> Sequence[int]:
        if index in self._delayed and index != self._until:
            self._usage.accumulated([index], undefined)  # raises if the usage model does not expect this gradient
            self._usage.arrived([index], undefined)
            # A delayed gradient is not final before `until` has come, because the parameter may get another gradient.
            return (index,) if self._released else ()
        final = self._usage.arrived([index], undefined)
        # Do not release the delayed parameters: the gradient is not of `until`, or they are released already, or `until` will
        # get more gradients.
        if index != self._until or self._released or index not in final:
            return final
        self._released = True
        # `until` may be a delayed parameter, too. Then only `sorted()` adds `until`, so the list contains it once.
        return [*(other for other in final if other not in self._delayed), *sorted(self._delayed)]

    def accumulated(self, indices: Sequence[int], undefined: Collection[int]) -> None:
        self._usage.accumulated(indices, undefined)

    def ended(self) -> Sequence[int]:
        """Return the result of the wrapped usage model, followed by the delayed parameters that still wait for `until`."""
        final = [index for index in self._usage.ended() if index not in self._delayed]
        if self._released:
            return final
        self._released = True  # an enclosing backward may call `ended` again at its end
        return [*final, *sorted(self._delayed)]

    def may_skip(self, indices: Collection[int]) -> bool:
        return self._usage.may_skip(indices)

    def sync_used_map(self) -> None:
        self._usage.sync_used_map()

    def locally_unused(self, indices: Collection[int]) -> frozenset[int]:
        return self._usage.locally_unused(indices)

    def globally_unused(self, indices: Collection[int]) -> frozenset[int]:
        return self._usage.globally_unused(indices)

    def find_nodes_again(self) -> None:
        self._usage.find_nodes_again()

    def reset(self) -> None:
        self._usage.reset()
        self._released = False
