"""Gradients that come when their bucket has been collected already."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from . import complaints

_version_of = operator.attrgetter("_version")


class LatenessGuard:
    """What a bucket's gradients were when it collected them: a gradient that is added to them later changes their version.

    Args:
        names: the parameters'.
        place: of this rank, for errors.
        advice: for errors.
    """

    def __init__(self, names: Sequence[str], place: str, advice: str) -> None:
        self._names = names
        self._place = place
        self._advice = advice
        self._tensors: list[torch.Tensor | None] = []
        self._versions: list[int] = []

    def note(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """They were collected: the gradient of each parameter, or one tensor that shares its version with all of them."""
        self._tensors = list(tensors)
        self._versions = self._versions_now()

    def check(self) -> None:
        """Forget them, if they are as they were.

        Raises:
            MisuseError: something was added to one.
        """
        versions, now = self._versions, self._versions_now()
        self._tensors, self._versions = [], []
        if now != versions:
            changed = [name for name, was, version in zip(self._names, versions, now, strict=False) if version != was]
            raise complaints.came_late(changed if len(now) == len(self._names) else self._names, self._place, self._advice)

    def _versions_now(self) -> list[int]:
        try:
            return list(map(_version_of, self._tensors))
        except AttributeError:  # some are None
            return [-1 if tensor is None else tensor._version for tensor in self._tensors]
