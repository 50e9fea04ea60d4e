"""Gradients that lie in a bucket's memory as long as the bucket does not need it."""

from __future__ import annotations

import operator
import sys
import weakref
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch

# For how many backwards, at first, nothing is lent after a gradient had to be moved.
FIRST_PAUSE = 16
# Below it takes about as long to lend a gradient as to copy it (measured: 12 us, and 10 GB/s).
LEAST_LENT_BYTES = 256 << 10

_is_possible = hasattr(torch.Tensor, "_use_count") and hasattr(torch._C, "_storage_Use_Count")
_storage_holders = getattr(torch._C, "_storage_Use_Count", None)
Holders: TypeAlias = tuple[int, ...]


class _Loan(NamedTuple):
    """A lent gradient.

    Attributes:
        gradient: what the parameter got.
        storage: its memory.
    """

    gradient: weakref.ref[torch.Tensor]
    storage: torch.UntypedStorage

    @classmethod
    def of(cls, gradient: torch.Tensor) -> _Loan:
        """Of what a parameter will get."""
        return cls(weakref.ref(gradient), gradient.untyped_storage())

    def is_returned(self) -> bool:
        """Whether nobody can read or write there any more."""
        return all(map(operator.le, self.holders(), _holders_if_returned()))

    def holders(self) -> Holders:
        """How many refer to the memory: in Python, and in all."""
        return _holders_of(self.storage)


class Lending:
    """Makes the memory of a bucket's large gradients those gradients, instead of copying them back.

    Note [Lent gradients]
    ~~~~~~~~~~~~~~~~~~~~~
    To copy what was reduced back to the parameters takes about as long as to reduce it. But mostly nobody needs both, for the
    gradients of one backward are gone (`zero_grad`) when the next one fills the bucket. So at the end of backward a parameter
    gets a tensor in the bucket's memory for its gradient, with a storage and a version of its own, and what autograd has
    accumulated is freed. Unlike with `gradient_as_bucket_view` nobody sees a difference:

    - A gradient that somebody else holds, or a view of it, or a graph, is written in place: they expect to see the average.
      So is one of a type of its own, or in memory that is not torch's.
    - What was lent and is not gone when the bucket collects (gradients that are kept, or added up, or that somebody has put
      into a list) gets memory of its own, the same object as before. Then the bucket lends nothing for a while, each time
      for twice as long.
    - A view of a lent gradient, or a NumPy array, cannot be moved. As long as it lives the bucket uses other memory, in which
      it takes longer to reduce (it is not shared with the other ranks).

    Each rank decides for itself. Only on CPUs, and only gradients that are worth it.

    Args:
        views: of the bucket's memory, one for each parameter.
    """

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        self._views = views
        self._large = [position for position, view in enumerate(views) if view.nbytes >= LEAST_LENT_BYTES]
        self._loans: list[_Loan] = []
        self._pause, self._next_pause = 0, FIRST_PAUSE

    @classmethod
    def of(cls, views: Sequence[torch.Tensor]) -> Lending | None:
        """None if there is nothing to lend."""
        lending = cls(views)
        return lending if lending._large and views[0].is_cpu and _is_possible else None

    def lend(
        self,
        parameters: Sequence[torch.nn.Parameter],
        gradients: list[torch.Tensor | None],
        excluded: Collection[int] = (),
    ) -> frozenset[int]:
        """Give parameters the bucket's memory for their gradients, where that is worth it and nobody sees a difference.

        Args:
            parameters: the bucket's.
            gradients: theirs; nobody else may refer to these but the parameters. Those that are replaced are forgotten.
            excluded: positions of those that shall stay as they are.

        Returns:
            The positions of those that were lent.
        """
        if self._pause:
            return frozenset()
        lent = [position for position in self._large if position not in excluded and is_nobody_elses(gradients, position)]
        for position in lent:
            gradient = torch.from_dlpack(self._views[position])  # type: ignore[attr-defined]  # it is there
            self._loans.append(_Loan.of(gradient))
            parameters[position].grad = gradient
            gradients[position] = None
        return frozenset(lent)

    def take_back(self) -> bool:
        """The bucket needs its memory: move what still lies there, if it can be moved.

        Returns:
            Whether the memory is free.
        """
        outstanding = [loan for loan in self._loans if not loan.is_returned()]
        for loan in outstanding:
            gradient = loan.gradient()
            if gradient is not None:
                gradient.data = gradient.detach().clone()
        if outstanding:
            if not self._pause:
                self._pause, self._next_pause = self._next_pause, 2 * self._next_pause
        elif self._pause:
            self._pause -= 1
        self._loans = [loan for loan in outstanding if not loan.is_returned()]
        return not self._loans


def is_nobody_elses(gradients: Sequence[torch.Tensor | None], position: int) -> bool:
    """Whether a parameter's gradient is referred to by nothing but the parameter and this list.

    And whether it is a plain tensor, in memory of torch's: of other memory nobody knows who else reads it.
    """
    return (
        type(gradients[position]) is torch.Tensor
        and _is_of_torch(gradients, position)
        and all(map(operator.le, _holders(gradients, position), _holders_if_alone()))
    )


def _is_of_torch(gradients: Sequence[torch.Tensor | None], position: int) -> bool:
    gradient = gradients[position]
    assert gradient is not None
    return gradient.untyped_storage().resizable()


def _holders(gradients: Sequence[torch.Tensor | None], position: int) -> Holders:
    """How many refer to a gradient in Python, to what autograd has of it, and to its memory."""
    gradient = gradients[position]
    assert gradient is not None
    return sys.getrefcount(gradient), gradient._use_count(), *_holders_of(gradient.untyped_storage())  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _holders_if_alone() -> Holders:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    return _holders([parameter.grad], 0)


@lru_cache(maxsize=1)
def _holders_if_returned() -> Holders:
    return _Loan.of(torch.zeros(1)).holders()


def _holders_of(storage: torch.UntypedStorage) -> Holders:
    assert _storage_holders is not None
    return sys.getrefcount(storage), _storage_holders(storage._cdata)
