"""UsersHooks: post-accumulate-grad hooks of the user, which see a gradient before it is averaged."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch

from . import error_messages
from .torch_internals import hookable, hooks_after_accumulation, version_of

_LOOK_EVERY = 32


def is_worth_a_look(reductions: int) -> bool:
    """Whether to look, after so many reduced backwards, for what nobody tells of: often at first, and on all ranks alike."""
    return reductions % _LOOK_EVERY == 0 or reductions & (reductions - 1) == 0


class UsersHooks:
    """Finds the parameters that have such hooks, and what a hook does that would make the average wrong in silence.

    Note [A gradient that is used too early]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    A hook may change a gradient: the average is that of changed ones. But a hook that steps the parameter steps it with this
    rank's own gradient, and one that drops the gradient leaves none to average. Of parameters with such hooks two things are
    therefore compared when their bucket starts: whether a gradient that had come is still there, and whether the parameter
    still has the version that it had when backward began. Parameters without hooks are not looked at.

    Args:
        names: of the parameters, for errors.
        parameters: the reducer's.
        place: for errors.

    Attributes:
        indices: the parameters that have hooks of the user, as of the last look.
    """

    def __init__(self, names: Sequence[str], parameters: Sequence[torch.nn.Parameter], place: str) -> None:
        self._names = names
        self._parameters = parameters
        self._place = place
        self.indices: Sequence[int] = ()
        self._versions: dict[int, int] = {}
        self._came: set[int] = set()
        self._handles: dict[int, Any] = {}

    def look(self, ours: str) -> None:
        """Find the parameters.

        Args:
            ours: the module whose functions are hooks of a reducer.
        """
        self.indices = [
            index
            for index, parameter in enumerate(self._parameters)
            if any(getattr(hook, "__module__", None) != ours for hook in hooks_after_accumulation(parameter))
        ]
        for index in self.indices:
            if index not in self._handles:
                with hookable(self._parameters[index]):
                    hook = partial(_note, self._came, index)
                    self._handles[index] = self._parameters[index].register_hook(hook)  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        """A backward begins that will be reduced. A step with its very first gradient is seen only if the gradient is gone."""
        self._versions = {index: version_of(self._parameters[index]) for index in self.indices}

    def check(self, members: Collection[int]) -> None:
        """The bucket of these is about to be collected.

        Raises:
            MisuseError: a hook of the user has used a gradient before it is averaged.
        """
        for index in self._versions.keys() & members:
            parameter = self._parameters[index]
            if parameter.grad is None and index in self._came:
                raise error_messages.gone_before_average(self._names[index], self._place)
            if version_of(parameter) != self._versions[index]:
                raise error_messages.changed_before_average(self._names[index], self._place)

    def reset(self) -> None:
        """The backward has ended."""
        self._came.clear()

    def close(self) -> None:
        """Take off what was put on the parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()


def _note(came: set[int], index: int, gradient: torch.Tensor | None) -> None:
    if gradient is not None:
        came.add(index)
