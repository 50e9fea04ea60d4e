"""Gradients that came since their bucket was delivered, told from those that were there already."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import repeat

import torch

_dtype_of = operator.attrgetter("dtype")
_version_of = operator.attrgetter("_version")


class Newness:
    """What new gradients of a bucket look like.

    Note [Gradients that are new]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    That a gradient is there proves that it came in this backward if it was None in forward. To see that of many small ones
    takes as long as to copy them. But most show it themselves. What autograd hands over is a new tensor, with the version that
    new ones have had before, mostly 0. What was there already has been made a view by the latest delivery, or written to, as is
    what is added to: it has a later version than it had when it was new.

    So what is learnt from gradients that are known to be new tells others, as long as this is asked of all that come, and each
    bucket of them is delivered before the next one is asked about. As soon as any does not look new (it was kept, added up, or
    changed by a user's hook), nothing is known any more. A tensor that a user has put there by hand may look new, and counts
    as come.

    Args:
        dtype: of all of them.

    Attributes:
        versions: those that new ones have; none if views are what tells them.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtypes = {dtype}
        self.versions: Sequence[int] = ()

    def learn(self, gradients: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor] | None) -> bool:
        """These came after forward, if they are there. Returns whether `shows` tells others like these."""
        self.versions = () if views is not None else [-1 if gradient is None else gradient._version for gradient in gradients]
        return self.shows(gradients, views)

    def shows(self, gradients: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor] | None) -> bool:
        """Whether all are there, are new, and may be copied.

        Args:
            gradients: of all parameters.
            views: what delivered ones are; None if delivered ones are written to instead. (Of another dtype than its gradient
                a parameter refuses the view.)
        """
        if torch._C._any_requires_grad(*gradients):
            return False
        if views is not None:
            return not any(map(operator.is_, gradients, views)) and not any(map(operator.is_, gradients, repeat(None)))
        try:
            return set(map(_dtype_of, gradients)) == self._dtypes and list(map(_version_of, gradients)) == self.versions
        except AttributeError:  # some are None
            return False

    def shows_one(self, position: int, gradient: torch.Tensor | None, views: Sequence[torch.Tensor] | None) -> bool:
        """Whether the gradient at this position of the bucket is there and new."""
        if gradient is None or views is not None:
            return gradient is not None and views is not None and gradient is not views[position]
        return gradient._version == self.versions[position]
