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
        self._share_version = False
        self._versions: list[int] = []

    def collected(self, gradients: Sequence[torch.Tensor | None], *, share_version: bool) -> None:
        """These are the gradients from now on, of each parameter; `share_version` if what changes one changes that of all."""
        self._gradients = gradients
        self._share_version = share_version

    def remember(self) -> None:
        """As they are now they shall stay."""
        self._versions = self._versions_now()

    def check_versions(self) -> None:
        """Before any gradient is written back, for the gradients of several buckets may be pieces of one tensor.

        Raises:
            MisuseError: something was added to one.
        """
        now = self._versions_now()
        if self._versions and now != self._versions:
            pairs = zip(self._names, self._versions, now, strict=False)
            self._complain(self._names if self._share_version else [name for name, was, version in pairs if version != was])

    def check_places(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """In the end, and forget them. One that somebody took away is not late.

        Raises:
            MisuseError: a gradient is another tensor than the one that was collected.
        """
        before, self._gradients, self._versions = self._gradients, (), []
        if not all(map(operator.is_, gradients, before)):
            pairs = zip(self._names, gradients, before, strict=False)
            replaced = [name for name, gradient, was in pairs if gradient is not was and gradient is not None]
            if replaced:
                self._complain(replaced)

    def _complain(self, names: Sequence[str]) -> None:
        raise complaints.came_late(names, self._place, self._advice)

    def _versions_now(self) -> list[int]:
        gradients = self._gradients[:1] if self._share_version else self._gradients
        try:
            return list(map(_version_of, gradients))
        except AttributeError:  # some are None
            return [-1 if gradient is None else gradient._version for gradient in gradients]
