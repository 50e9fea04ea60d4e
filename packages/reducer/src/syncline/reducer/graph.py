"""What is known of the graph that a backward runs through: which gradients will come, how often, and which never."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence


class UnexpectedGradientError(ValueError):
    """A gradient arrived that should not have; `index` says which."""

    def __init__(self, index: int) -> None:
        super().__init__(f"gradient {index} was not expected")
        self.index = index


class Graph(ABC):
    """Tells the reducer which gradients to wait for. Parameters are named by their indices.

    The reducer asks on the thread of backward, under its lock, in this order::

        once        in forward, when the order of arrival is known
        begin       when the first gradient of a backward is seen, or else when it ends (sit_out, instead, on a rank that has
                    none)
        needed      for each bucket, then: how many gradients make it worth looking at it
        arrived     when so many have arrived, or all of a bucket that has one hook, or at the end (accumulated, instead, while
                    nothing is synchronised; used, of those whose end is known otherwise)
        ended       when the outermost backward has ended, before the buckets are waited for
        agree       when all buckets have started, on every rank: here collectives may be issued
        untouched   once for each bucket, when its reduction is over
        forget      when all is over
    """

    advice_missing: str
    advice_twice: str
    # Whether it asks which gradients are undefined.
    minds_undefined: bool = True
    # Whether the order in which gradients arrive says something about the next backward.
    order_recurs: bool = True
    # Whether one hook for a bucket may do: whether `once` may say anything.
    one_hook_may_do: bool = False
    # Whether it must hear of the gradients of backwards that are not synchronised, one by one.
    minds_unsynchronized: bool = False
    # Whether all backwards are known to be alike.
    never_changes: bool = False

    @abstractmethod
    def begin(self) -> Sequence[int]:
        """The parameters whose gradients will not come in this backward."""

    def needed(self, indices: Collection[int]) -> int:  # noqa: ARG002 - the contract's
        """How many gradients of these parameters, which share a bucket, must arrive before any may be reduced."""
        return 1

    def once(self, indices: Collection[int]) -> Sequence[int] | None:  # noqa: ARG002 - the contract's
        """Those of the parameters that get a gradient in a backward, but for the absent; None if any may get several."""
        return None

    @abstractmethod
    def arrived(self, indices: Sequence[int], undefined: Collection[int]) -> Sequence[int]:
        """Note gradients, in the order of their arrival; which are final now, so that they may be reduced.

        Args:
            indices: the parameters; one that got several gradients is there several times.
            undefined: those of them that have no gradient after all.
        """

    @abstractmethod
    def ended(self) -> Sequence[int]:
        """The parameters whose gradients are final only now that backward has ended."""

    @property
    def needs_everyone(self) -> bool:
        """Whether every rank must have gradients in the next backward."""
        return False

    def sit_out(self) -> None:  # noqa: B027 - most need not know
        """This rank has no gradients in a backward of the others, and reaches no parameter."""

    def accumulated(self, indices: Sequence[int], undefined: Collection[int]) -> None:  # noqa: B027 - most need not know
        """Note gradients of a backward that is not reduced, for a later one.

        Raises:
            UnexpectedGradientError: it was to be known already that there would be none.
        """

    def used(self, indices: Sequence[int], undefined: Collection[int]) -> None:
        """Note gradients of a backward that is reduced, of which somebody else knows when they are final.

        Raises:
            UnexpectedGradientError: as `accumulated`.
        """
        self.accumulated(indices, undefined)

    def may_skip(self, indices: Collection[int]) -> bool:  # noqa: ARG002 - the contract's
        """Whether no rank has anything to say about these parameters; the same answer on every rank."""
        return False

    def agree(self) -> None:  # noqa: B027 - most have nothing to agree on
        """Issue what the ranks must agree on, at the same place among the collectives of every rank."""

    def unused_here(self, indices: Collection[int]) -> frozenset[int]:  # noqa: ARG002 - the contract's
        """Those of the parameters, which are all ready, that this rank has not used."""
        return frozenset()

    def untouched(self, indices: Collection[int]) -> frozenset[int]:  # noqa: ARG002 - the contract's
        """Those of the parameters that no rank has used: their gradients shall stay as they are. May wait for `agree`."""
        return frozenset()

    def forget(self) -> None:  # noqa: B027 - most remember nothing
        """Forget this backward."""


class CompleteGraph(Graph):
    """Every backward reaches every parameter, once."""

    minds_undefined = False
    one_hook_may_do = True

    advice_missing = (
        "Every parameter must take part in every backward: remove those on which the loss does not depend, freeze them "
        "(requires_grad_(False)), or pass find_unused_parameters=True"
    )
    advice_twice = (
        "It happens when a part of the model runs twice in a re-entrant checkpoint (use use_reentrant=False, or "
        "static_graph=True), or when parameters are used outside the wrapped module's forward"
    )

    def begin(self) -> Sequence[int]:
        """None."""
        return ()

    def needed(self, indices: Collection[int]) -> int:
        """All."""
        return len(indices)

    def once(self, indices: Collection[int]) -> Sequence[int]:
        """All."""
        return list(indices)

    def arrived(self, indices: Sequence[int], undefined: Collection[int]) -> Sequence[int]:  # noqa: ARG002 - the contract's
        """Each is final."""
        return indices

    def ended(self) -> Sequence[int]:
        """None."""
        return ()
