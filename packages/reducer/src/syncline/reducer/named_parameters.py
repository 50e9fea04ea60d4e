"""The parameters of a reducer, with their names, by index."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.collectives import InvalidArgumentError, MisuseError


class NamedParameters:
    """The names and parameters of a reducer, checked at construction. A parameter's index is its position, equal on all ranks.

    Raises:
        MisuseError: there is no parameter, or a parameter does not require a gradient.
        InvalidArgumentError: `sparse` does not fit the parameters.
    """

    def __init__(self, named_parameters: Sequence[tuple[str, torch.nn.Parameter]], sparse: Sequence[bool] | None) -> None:
        self.names = [name for name, _ in named_parameters]
        self.parameters = [parameter for _, parameter in named_parameters]
        self.sparse = [False] * len(self.parameters) if sparse is None else list(sparse)
        self._check()

    def index(self, name: str) -> int:
        """Return the index of a parameter.

        Raises:
            InvalidArgumentError: no parameter has this name.
        """
        if name not in self.names:
            raise InvalidArgumentError(f"expected names of parameters that are averaged, found '{name}'")
        return self.names.index(name)

    def _check(self) -> None:
        if not self.parameters:
            raise MisuseError("expected at least one parameter that requires a gradient, found none")
        if len(self.sparse) != len(self.parameters):
            raise InvalidArgumentError(
                f"expected a `sparse` flag for each of {len(self.parameters)} parameters, found {len(self.sparse)}"
            )
        for name, parameter, is_sparse in zip(self.names, self.parameters, self.sparse, strict=True):
            if not parameter.requires_grad:
                raise MisuseError(f"parameter '{name}' does not require a gradient; leave it out")
            if is_sparse and parameter.dim() == 0:
                raise InvalidArgumentError(f"parameter '{name}' has no dimension, so its gradient cannot be sparse")
