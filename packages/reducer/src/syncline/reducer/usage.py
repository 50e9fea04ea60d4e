"""A usage model tells the reducer how many gradients each parameter gets in a backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence


class UnexpectedGradientError(ValueError):
    """Raised if a gradient of parameter `index` comes that the usage model does not expect."""

    def __init__(self, index: int) -> None:
        super().__init__(f"gradient {index} was not expected")
        self.index = index


class UsageModel(ABC):
    """Tells the reducer for which gradients to wait. The methods refer to parameters by their indices.

    A gradient is final when its parameter gets no more gradients in this backward.

    The reducer calls these methods on the thread of backward, under its lock, in this order:

        begin             when the first gradient of a backward has come (shadow_backward instead, on a rank without gradients)
        needed            for each bucket, after begin: how many gradients the reducer waits for
        arrived           when that many gradients have come, and at the end of backward (accumulated instead, in no_sync)
        ended             when the outermost backward has ended, before the reducer waits for the buckets
        sync_used_map     when all buckets have started; called on every rank, so it may issue collectives
        globally_unused   once for each bucket, when its reduction is over
        reset             when all gradients of this backward are averaged
    """

    hint_missing: str
    """The remedy in the error for missing gradients."""
    hint_twice: str
    """The remedy in the error for a gradient that came twice."""
    order_recurs: bool = True
    """Whether the next backward is likely to have the same order of gradients."""

    @property
    def asks_for_undefined(self) -> bool:
        """Whether `arrived` and `accumulated` need to know which gradients are None.

        If False, the reducer passes an empty collection as `undefined`.
        """
        return True

    @property
    def needs_everyone(self) -> bool:
        """Whether every rank must itself run the next backward with averaging.

        If True, no rank may call `Reducer.shadow_backward` in place of this backward.
        """
        return False

    @abstractmethod
    def begin(self) -> Sequence[int]:
        """Begin a backward with averaging. Return the parameters whose gradients will not come in this backward.

        The reducer does not wait for these gradients.
        """

    @abstractmethod
    def needed(self, indices: Collection[int]) -> int | None:
        """Return how many gradients these parameters of one bucket together get in this backward.

        When this number of gradients has come, the reducer calls `arrived`. If the result is None, the number is not known.
        Then the reducer calls `arrived` after each gradient.
        """

    @abstractmethod
    def arrived(self, indices: Sequence[int], undefined: Collection[int]) -> Sequence[int]:
        """Record gradients that have come. Return the parameters that get no further gradients in this backward.

        Args:
            indices: the parameters of the gradients, in the order in which the gradients came. A parameter with several
                gradients appears several times.
            undefined: the given parameters whose gradient is None.
        """

    @abstractmethod
    def ended(self) -> Sequence[int]:
        """Return the parameters whose gradients are final only because backward has ended. Empty if there are none."""

    def shadow_backward(self) -> None:  # noqa: B027 - most models need not know
        """Begin a backward that this rank does not run itself. The reducer calls this method in place of `begin`."""

    def accumulated(self, indices: Sequence[int], undefined: Collection[int]) -> None:  # noqa: B027 - most models need not know
        """Record gradients of a backward without averaging, as in `no_sync`.

        The next backward with averaging counts these gradients, too.

        Raises:
            UnexpectedGradientError: an earlier backward has shown that one of these parameters gets no gradient.
        """

    def may_skip(self, indices: Collection[int]) -> bool:  # noqa: ARG002 - the contract's
        """Whether the reducer leaves out the bucket of these parameters, because no rank uses them.

        If False, the ranks reduce the bucket. The return value is the same on all ranks. The method may wait for other ranks.
        """
        return False

    def sync_used_map(self) -> None:  # noqa: B027 - in most models the ranks agree on nothing
        """Start the collectives by which the ranks agree on the parameters that at least one rank uses.

        Every rank calls this method at the same point of a backward. A usage model without such collectives does nothing.
        """

    def locally_unused(self, indices: Collection[int]) -> frozenset[int]:  # noqa: ARG002 - the contract's
        """Return those of the given parameters that this rank does not use.

        The reducer calls this method when the parameters get no further gradients in this backward.
        """
        return frozenset()

    def globally_unused(self, indices: Collection[int]) -> frozenset[int]:  # noqa: ARG002 - the contract's
        """Return those of the given parameters that no rank uses. The gradients of the returned parameters stay unchanged.

        The method may wait for the collectives of `sync_used_map`.
        """
        return frozenset()

    def find_nodes_again(self) -> None:  # noqa: B027 - most models hold no nodes
        """Look for the parameters' nodes in autograd's graph again, because a conversion of parameters has made new nodes."""

    def reset(self) -> None:  # noqa: B027 - most models remember nothing
        """Forget the gradients of the backward that has just ended."""


class CompleteUsage(UsageModel):
    """The default usage model: every backward reaches every parameter exactly once."""

    hint_missing = (
        "Freeze them before the forward, or pass find_unused_parameters=True\n"
        "  Every parameter must take part in every backward, and the loss does not depend on these. To freeze one: "
        "requires_grad_(False). If they were removed from the model after it was wrapped, wrap it again.\n"
        "  If they are used in a re-entrant checkpoint whose inputs need no gradient, autograd never reaches them: use "
        "use_reentrant=False there."
    )
    hint_twice = (
        "It happens when a part of the model runs twice in a re-entrant checkpoint (use use_reentrant=False, or "
        "static_graph=True), or when parameters are used outside the wrapped module's forward"
    )

    @property
    def asks_for_undefined(self) -> bool:
        """False, because a gradient that is None counts as zeros."""
        return False

    def begin(self) -> Sequence[int]:
        return ()

    def needed(self, indices: Collection[int]) -> int:
        return len(indices)

    def arrived(self, indices: Sequence[int], undefined: Collection[int]) -> Sequence[int]:  # noqa: ARG002 - the contract's
        return indices

    def ended(self) -> Sequence[int]:
        return ()
