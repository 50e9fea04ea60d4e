"""Parameters that a forward has added or unfrozen."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.collectives import MisuseError


class NewParameters:
    """Finds out whether parameters that a forward has added or unfrozen get a gradient in its backward.

    The reducer learns of these parameters only before the next forward, so it does not average this gradient.

    Args:
        named: the names and the parameters, at the end of the forward.
    """

    def __init__(self, named: Sequence[tuple[str, torch.nn.Parameter]]) -> None:
        self._names = {id(parameter): name for name, parameter in named}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]  # torch's
            for _, parameter in named
        ]
        self._first = ""  # the first parameter that has got a gradient

    @property
    def has_gradient(self) -> bool:
        """Whether a parameter has got a gradient since the end of the forward."""
        return bool(self._first)

    def _note(self, parameter: torch.Tensor) -> None:
        # Raise no error here: in the middle of its backward, this rank still has to average with the other ranks.
        self._first = self._first or self._names[id(parameter)]

    def check(self, place: str) -> None:
        """Raise a MisuseError if a parameter has got a gradient. `place` is for the error.

        Call this at the end of the backward, or in the next forward.
        """
        if self._first:
            raise MisuseError(
                f"parameter '{self._first}' was added or unfrozen within forward on {place}, so its gradient is not averaged: "
                "add or unfreeze it before the forward"
            )

    def close(self) -> None:
        """Watch the parameters no longer."""
        for handle in self._handles:
            handle.remove()
