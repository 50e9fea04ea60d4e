"""Error feedback: keep the part of a gradient that compression leaves out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from syncline.collectives import MisuseError


class ErrorFeedback:
    """Stores the errors of compression on this rank, so that a hook can add them to the next step's gradients.

    An error is the part of a gradient that the latest compression left out. Each parameter name has at most one error.

    Source: Seide et al., "1-bit stochastic gradient descent", 2014; Karimireddy et al., "Error feedback fixes SignSGD", 2019.

    Memory: the size of the gradients that are compressed.
    """

    def __init__(self) -> None:
        self._errors: dict[str, torch.Tensor] = {}

    def __len__(self) -> int:
        return len(self._errors)

    def add_to(self, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Add each parameter's stored error to its gradient, in place. A parameter without a stored error keeps its gradient.

        A hook calls this method before it compresses the gradients.

        Args:
            names: the parameters' names.
            tensors: the parameters' gradients, in any shapes, for example flat.

        Raises:
            MisuseError: an error and its gradient differ in size, because the error was loaded from another model's state.
        """
        pairs = [(name, tensor) for name, tensor in zip(names, tensors, strict=True) if name in self._errors]
        for name, tensor in pairs:
            self._check_size(name, tensor)
            # An error that was loaded may be on another device.
            tensor.add_(self._errors[name].to(tensor.device).view(tensor.shape))

    def take(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's error, and remove it from this object. None if no error is stored.

        The returned tensor belongs to the caller, who may overwrite it. The tensor has the shape and the device of `like`.

        Args:
            name: the parameter's name.
            like: the parameter's gradient, in any shape.

        Raises:
            MisuseError: the error and the gradient differ in size, because the error was loaded from another model's state.
        """
        if name not in self._errors:
            return None
        self._check_size(name, like)
        return self._errors.pop(name).to(like.device).view(like.shape)

    def remember(
        self, names: Sequence[str], errors: Sequence[torch.Tensor], shapes: Sequence[torch.Size] | None = None
    ) -> None:
        """Store the parts of gradients that compression left out, in place of earlier errors of these parameters.

        The tensors in `errors` are not copied, so do not write to them after this call.

        Args:
            names: the parameters' names.
            errors: for each parameter, the part that was left out. All numbers must be finite.
            shapes: the parameters' shapes. None: the errors already have these shapes.
        """
        for number, (name, error) in enumerate(zip(names, errors, strict=True)):
            self._errors[name] = error if shapes is None else error.view(shapes[number])

    def forget(self, names: Sequence[str]) -> None:
        """Drop the errors of these parameters. Names without a stored error are ignored."""
        for name in names:
            self._errors.pop(name, None)

    def clear(self) -> None:
        """Drop all errors."""
        self._errors.clear()

    def norm(self) -> float:
        """The Euclidean norm of all errors together."""
        return math.sqrt(sum(float(torch.linalg.vector_norm(error)) ** 2 for error in self._errors.values()))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return copies of the errors by parameter name. Each error has the shape of its parameter."""
        return {name: error.detach().clone() for name, error in self._errors.items()}

    def load_state_dict(self, errors: Mapping[str, torch.Tensor]) -> None:
        """Replace all remembered errors by copies of `errors`."""
        self._errors = {name: error.detach().clone() for name, error in errors.items()}

    def _check_size(self, name: str, tensor: torch.Tensor) -> None:
        if self._errors[name].numel() != tensor.numel():
            raise MisuseError(
                f"the state holds error feedback of {self._errors[name].numel()} elements for parameter '{name}', whose "
                f"gradient has {tensor.numel()}: it is the state of another model. Load this model's state, or start with a "
                "new state"
            )
