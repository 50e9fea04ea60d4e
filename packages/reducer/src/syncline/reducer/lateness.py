"""Gradients that come when their bucket is being reduced already."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from . import complaints

_version_of = operator.attrgetter("_version")


class LatenessGuard:
    """What gradients were when their bucket's reduction was issued: what is added later changes a version, or replaces one.

    Args:
        names: the parameters'.
        place: of this rank, for errors.
        advice: for errors.
    """

    def __init__(self, names: Sequence[str], place: str, advice: str) -> None:
        self._names = names
        self._place = place
        self._advice = advice
        self._gradients: Sequence[torch.Tensor | None] = ()
        self._witness: torch.Tensor | None = None
        self._versions: Sequence[int] = ()
        self._may_be_replaced = False

    def collected(
        self, gradients: Sequence[torch.Tensor | None], witness: torch.Tensor | None = None, *, versions: Sequence[int] = ()
    ) -> None:
        """These are the parameters' gradients from now on.

        Args:
            gradients: these.
            witness: what changes any of them changes its version.
            versions: theirs, if these are known.
        """
        self._gradients = gradients
        self._witness = witness
        self._versions = versions

    def remember(self, *, may_be_replaced: bool) -> None:
        """As they are now they shall stay, or be replaced if that is allowed.

        Versions that are known hold still, if the first one does: only a communication hook can have changed any, and one that
        changes gradients in place (it is of no use) is served if it changes all.
        """
        first = self._gradients[0] if self._versions else None
        if first is None or first._version != self._versions[0]:
            self._versions = self._versions_now()
        self._may_be_replaced = may_be_replaced

    def check_versions(self) -> None:
        """Before any gradient is written back, for the gradients of several buckets may be pieces of one tensor.

        Raises:
            MisuseError: something was added to one.
        """
        now = self._versions_now()
        if not self._versions or now == self._versions:
            return
        if self._witness is not None:
            self._complain(self._names)
        rows = zip(self._names, self._gradients, self._versions, now, strict=False)
        changed = [name for name, gradient, was, version in rows if version != was and _is_alone(gradient)]
        if changed:
            self._complain(changed)

    def check_places(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """In the end, and forget them. One that somebody took away is not late.

        Raises:
            MisuseError: a gradient is another tensor than the one that was collected.
        """
        before = self._gradients
        self.forget()
        if not self._may_be_replaced and not all(map(operator.is_, gradients, before)):
            pairs = zip(self._names, gradients, before, strict=False)
            replaced = [name for name, gradient, was in pairs if gradient is not was and gradient is not None]
            if replaced:
                self._complain(replaced)

    def _complain(self, names: Sequence[str]) -> None:
        raise complaints.came_late(names, self._place, self._advice)

    def forget(self) -> None:
        """Hold no gradient any more."""
        self._gradients, self._witness, self._versions = (), None, ()

    def _versions_now(self) -> list[int]:
        if self._witness is not None:
            return [self._witness._version]
        try:
            return list(map(_version_of, self._gradients))
        except AttributeError:  # some are None
            return [-1 if gradient is None else gradient._version for gradient in self._gradients]


def _is_alone(gradient: torch.Tensor | None) -> bool:
    """Whether nothing else lies in its memory, which would share its version: a gradient may be a piece of another tensor."""
    return gradient is not None and gradient.untyped_storage().nbytes() == gradient.nbytes
