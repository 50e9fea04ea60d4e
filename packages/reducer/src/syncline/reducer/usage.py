"""Which parameters a backward uses: which gradients will come, how often, and which never."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence


class UnexpectedGradientError(ValueError):
    """A gradient came that should not have; `index` says which."""

    def __init__(self, index: int) -> None:
        super().__init__(f"gradient {index} was not expected")
        self.index = index


class UsageModel(ABC):
    """Tells the reducer which gradients to wait for. Parameters are named by their indices.

    The reducer asks on the thread of backward, under its lock, in this order:

        begin             when the first gradient of a backward has come (shadow_backward instead, on a rank that has none)
        needed            for each bucket, then: how many gradients make it worth a look
        arrived           when so many have come, and at the end of backward (accumulated instead, in no_sync)
        ended             when the outermost backward has ended, before the buckets are waited for
        sync_used_map     when all buckets have started, on every rank: here collectives may be issued
        globally_unused   once for each bucket, when its reduction is over
        reset             when all is over
    """

    hint_missing: str
    """For the error when gradients are missing: what to do."""
    hint_twice: str
    """For the error when a gradient came twice: what to do."""
    order_recurs: bool = True
    """Whether the order in which gradients come says something about the next backward."""

    @property
    def asks_for_undefined(self) -> bool:
        """Whether it matters which of the gradients that came are None after all."""
        return True

    @property
    def needs_everyone(self) -> bool:
        """Whether every rank must have gradients in the next backward."""
        return False

    @abstractmethod
    def begin(self) -> Sequence[int]:
        """The parameters whose gradients will not come in this backward."""

    @abstractmethod
    def needed(self, indices: Collection[int]) -> int | None:
        """How many gradients complete these parameters, which share a bucket; None if each gradient must be looked at."""

    @abstractmethod
    def arrived(self, indices: Sequence[int], undefined: Collection[int]) -> Sequence[int]:
        """Take note of gradients, in the order in which they came, and return which are final now.

        Args:
            indices: the parameters; one that got several gradients is there several times.
            undefined: those of them that have no gradient after all.
        """

    @abstractmethod
    def ended(self) -> Sequence[int]:
        """The parameters whose gradients are final only now that backward has ended."""

    def shadow_backward(self) -> None:  # noqa: B027 - most need not know
        """This rank has no gradients in a backward of the others, and reaches no parameter."""

    def accumulated(self, indices: Sequence[int], undefined: Collection[int]) -> None:  # noqa: B027 - most need not know
        """Take note of gradients of a backward that is not reduced, for a later one.

        Raises:
            UnexpectedGradientError: an earlier backward has shown that there would be none.
        """

    def may_skip(self, indices: Collection[int]) -> bool:  # noqa: ARG002 - the contract's
        """Whether no rank uses any of these parameters; the same answer on every rank."""
        return False

    def sync_used_map(self) -> None:  # noqa: B027 - most have nothing to agree on
        """Issue what the ranks must agree on, at the same place among the collectives of every rank."""

    def locally_unused(self, indices: Collection[int]) -> frozenset[int]:  # noqa: ARG002 - the contract's
        """Those of the parameters, which are all ready, that this rank has not used."""
        return frozenset()

    def globally_unused(self, indices: Collection[int]) -> frozenset[int]:  # noqa: ARG002 - the contract's
        """Those of the parameters that no rank has used: their gradients stay as they are. May wait for `sync_used_map`."""
        return frozenset()

    def find_nodes_again(self) -> None:  # noqa: B027 - most hold none
        """Autograd may have other nodes for the parameters."""

    def reset(self) -> None:  # noqa: B027 - most remember nothing
        """Forget this backward."""


class CompleteUsage(UsageModel):
    """Every backward reaches every parameter, once."""

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
        """No: an undefined gradient counts as zeros."""
        return False

    def begin(self) -> Sequence[int]:
        return ()

    def needed(self, indices: Collection[int]) -> int:
        return len(indices)

    def arrived(self, indices: Sequence[int], undefined: Collection[int]) -> Sequence[int]:  # noqa: ARG002 - the contract's
        return indices

    def ended(self) -> Sequence[int]:
        return ()
