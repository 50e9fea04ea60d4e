"""Names for the parameters in buckets: given names, or numbers."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.utils.weak import WeakIdKeyDictionary

from syncline.collectives import MisuseError

from .contract import Bucket


class ParameterNames:
    """Names for the parameters of buckets. What a hook keeps under these names stays valid when the buckets change.

    Args:
        named_parameters: as from `model.named_parameters()`. None: the parameters are numbered in the order in which
            buckets first contain them. This order is the same in every run that builds the same model and buckets.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        self.are_given = named_parameters is not None
        self.shapes: dict[str, torch.Size] = {}
        # Look parameters up by identity, because `==` compares tensors element by element.
        self._names = WeakIdKeyDictionary()
        for name, parameter in named_parameters or ():
            self._note(name, parameter)

    def of(self, bucket: Bucket) -> list[str]:
        """The names of `bucket.parameters()`, in the same order.

        Raises:
            MisuseError: the constructor got names, and a parameter is not among them.
        """
        return [self._name_of(parameter) for parameter in bucket.parameters()]

    def _name_of(self, parameter: torch.Tensor) -> str:
        if parameter in self._names:
            return str(self._names[parameter])
        if self.are_given:
            raise MisuseError(
                f"a bucket holds a parameter of shape {list(parameter.shape)} that is not among the {len(self.shapes)} "
                "named_parameters given to the hook's state; give those of the model that is trained"
            )
        return self._note(f"parameter {len(self.shapes)}", parameter)

    def _note(self, name: str, parameter: torch.Tensor) -> str:
        self._names[parameter] = name
        self.shapes[name] = parameter.shape
        return name
