"""Usage models: for which parameters a backward brings gradients, and how many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence


class UnexpectedGradientError(ValueError):
    """A gradient came that the usage model excludes. `index` is the index of its parameter."""

    def __init__(self, index: int) -> None:
        super().__init__(f"gradient {index} was not expected")
        self.index = index


class UsageModel(ABC):
    """Tells the reducer which gradients to wait for. Parameters are given by their indices.

    The reducer calls these methods on the thread of backward, under its lock, in this order:

        begin             when the first gradient of a backward has come (shadow_backward instead, on a rank without gradients)
        needed            for each bucket after begin: how many gradients make it worth a look
        arrived           when this number has come, and at the end of backward (accumulated instead, in no_sync)
        ended             when the outermost backward has ended, before the reducer waits for the buckets
        sync_used_map     when all buckets have started, on every rank: collectives may be issued here
        globally_unused   once for each bucket, when its reduction is over
        reset             when everything is over
    """

    hint_missing: str
    """The remedy in the error for missing gradients."""
    hint_twice: str
    """The remedy in the error for a gradient that came twice."""
    order_recurs: bool = True
    """Whether the next backward is likely to have the same order of gradients."""

    @property
    def asks_for_undefined(self) -> bool:
        """Whether the model needs to know which of the gradients are None."""
        return True

    @property
    def needs_everyone(self) -> bool:
        """Whether every rank must have gradients in the next backward."""
        return False

    @abstractmethod
    def begin(self) -> Sequence[int]:
        """Return the parameters whose gradients will not come in this backward."""

    @abstractmethod
    def needed(self, indices: Collection[int]) -> int | None:
        """How many gradients complete these parameters of one bucket; None if each gradient must be looked at."""

    @abstractmethod
    def arrived(self, indices: Sequence[int], undefined: Collection[int]) -> Sequence[int]:
        """Note gradients in the order in which they came. Return the parameters whose gradients are final now.

        Args:
            indices: the parameters. A parameter with several gradients is there several times.
            undefined: the parameters among them whose gradient is None.
        """

    @abstractmethod
    def ended(self) -> Sequence[int]:
        """Return the parameters whose gradients are final only at the end of backward."""

    def shadow_backward(self) -> None:  # noqa: B027 - most need not know
        """Begin a backward of the other ranks in which this rank has no gradients. Called in place of `begin`."""

    def accumulated(self, indices: Sequence[int], undefined: Collection[int]) -> None:  # noqa: B027 - most need not know
        """Note gradients of a backward that is not reduced. They count for a later one.

        Raises:
            UnexpectedGradientError: an earlier backward has shown that this parameter gets no gradient.
        """

    def may_skip(self, indices: Collection[int]) -> bool:  # noqa: ARG002 - the contract's
        """Whether no rank uses any of these parameters. Every rank gets the same answer."""
        return False

    def sync_used_map(self) -> None:  # noqa: B027 - most have nothing to agree on
        """Issue the collectives by which the ranks agree. Every rank calls it at the same place among its collectives."""

    def locally_unused(self, indices: Collection[int]) -> frozenset[int]:  # noqa: ARG002 - the contract's
        """Return the given parameters that this rank has not used. Called when all of the given parameters are ready."""
        return frozenset()

    def globally_unused(self, indices: Collection[int]) -> frozenset[int]:  # noqa: ARG002 - the contract's
        """Return the given parameters that no rank has used. Their gradients stay unchanged. May wait for `sync_used_map`."""
        return frozenset()

    def find_nodes_again(self) -> None:  # noqa: B027 - most hold none
        """Look for the parameters' nodes again, because autograd may have new ones."""

    def reset(self) -> None:  # noqa: B027 - most remember nothing
        """Forget this backward."""


class CompleteUsage(UsageModel):
    """Every backward reaches every parameter exactly once."""

    hint_missing = (
        "Freeze them, or pass find_unused_parameters=True\n"
        "  Every parameter must take part in every backward, and the loss does not depend on these. To freeze one: "
        "requires_grad_(False).\n"
        "  If they are used in a re-entrant checkpoint whose inputs need no gradient, autograd never reaches them: use "
        "use_reentrant=False there."
    )
    hint_twice = (
        "It happens when a part of the model runs twice in a re-entrant checkpoint (use use_reentrant=False, or "
        "static_graph=True), or when parameters are used outside the wrapped module's forward"
    )

    @property
    def asks_for_undefined(self) -> bool:
        """False: a gradient that is None counts as zeros."""
        return False

    def begin(self) -> Sequence[int]:
        return ()

    def needed(self, indices: Collection[int]) -> int:
        return len(indices)

    def arrived(self, indices: Sequence[int], undefined: Collection[int]) -> Sequence[int]:  # noqa: ARG002 - the contract's
        return indices

    def ended(self) -> Sequence[int]:
        return ()
