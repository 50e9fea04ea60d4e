"""Parameters that a forward has added or unfrozen."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.collectives import MisuseError
from syncline.reducer.torch_internals import version_of


class NewParameters:
    """Finds out whether parameters that a forward has added or unfrozen get a gradient in its backward.

    The reducer learns of these parameters only before the next forward, so it does not average this gradient.

    Args:
        named: the names and the parameters, at the end of the forward.
    """

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self._found = [(name, parameter, _state(parameter)) for name, parameter in named]

    def check(self, place: str) -> None:
        """After the backward: raise a MisuseError if a parameter has got a gradient. `place` is for the error."""
        for name, parameter, before in self._found:
            now = _state(parameter)
            if now is not None and (before is None or now[0] is not before[0] or now[1] != before[1]):
                raise MisuseError(
                    f"parameter '{name}' was added or unfrozen within forward on {place}, so its gradient is not averaged: add "
                    "or unfreeze it before the forward"
                )


def _state(parameter: torch.nn.Parameter) -> tuple[torch.Tensor, int] | None:
    """Return the gradient and its version, or None."""
    gradient = parameter.grad
    return None if gradient is None else (gradient, version_of(gradient))
