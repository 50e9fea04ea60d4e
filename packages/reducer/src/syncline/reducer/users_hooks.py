"""Find users' post-accumulate-grad hooks, which see a gradient before it is averaged."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from . import error_messages
from .torch_internals import hook_defined_gradients, hooks_after_accumulation, version_of

_LOOK_EVERY = 32


def is_worth_a_look(reductions: int) -> bool:
    """Whether to look for users' hooks in this backward. A look at all parameters costs time, so the reducer looks seldom.

    True if `reductions`, the number of backwards with averaging so far, is 0, a power of two or a multiple of 32. All ranks
    have the same number, so they look in the same backwards.
    """
    return reductions % _LOOK_EVERY == 0 or reductions & (reductions - 1) == 0


class UsersHooks:
    """Finds the parameters with users' hooks. Raises an error if such a hook makes the average wrong.

    Note [A gradient that is used too early]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    A hook that runs an optimizer's step uses this rank's own gradient. A hook that drops the gradient leaves nothing to
    average. So when a bucket starts, the reducer checks the parameters with users' hooks. Each gradient that has come must
    still exist, and the parameter must have the same version as when backward began.

    Args:
        names: the parameters' names, for errors.
        parameters: the reducer's parameters.
        place: a description of this rank and the group, for errors.

    Attributes:
        indices: the parameters that had users' hooks at the latest call of `look`.
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
        """Find the parameters that have users' hooks now. `ours` names the Python module with the reducer's own hooks."""
        self.indices = [
            index
            for index, parameter in enumerate(self._parameters)
            if any(getattr(hook, "__module__", None) != ours for hook in hooks_after_accumulation(parameter))
        ]
        self._hook(self.indices)

    def find_nodes_again(self) -> None:
        """Hook the parameters' nodes again, because they may be other nodes now."""
        hooked = list(self._handles)
        self.close()
        self._hook(hooked)

    def _hook(self, indices: Iterable[int]) -> None:
        for index in indices:
            if index not in self._handles:
                note = partial(self._came.add, index)
                self._handles[index] = hook_defined_gradients(self._parameters[index], note)

    def begin(self) -> None:
        """Record the parameters' versions at the beginning of a backward that averages gradients.

        Hooks on the first gradient may have run before this call. An optimizer's step in such a hook is detected only if the
        hook also drops the gradient.
        """
        self._versions = {index: version_of(self._parameters[index]) for index in self.indices}

    def check(self, members: Collection[int]) -> None:
        """Check that no user's hook has used a gradient of these parameters, the members of a bucket, before it was averaged.

        Call this method before the bucket is collected.

        Raises:
            MisuseError: a user's hook has used a gradient before it was averaged.
        """
        for index in self._versions.keys() & members:
            parameter = self._parameters[index]
            # A gradient came and is gone, so a hook has dropped the gradient.
            if parameter.grad is None and index in self._came:
                raise error_messages.gone_before_average(self._names[index], self._place)
            # Something has changed the parameter since backward began, most likely an optimizer's step.
            if version_of(parameter) != self._versions[index]:
                raise error_messages.changed_before_average(self._names[index], self._place)

    def reset(self) -> None:
        """Forget the gradients of this backward, because it has ended."""
        self._came.clear()

    def close(self) -> None:
        """Remove the hooks that this object has registered. Users' hooks stay."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
