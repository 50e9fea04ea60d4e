"""A bucket without a reducer, for tests of hooks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from syncline.collectives import ProcessGroup


class FakeBucket:
    """A bucket for tests, with gradients that the test chooses. The bucket has all methods of `contract.Bucket`.

    Args:
        gradients: tensors of any shapes and one dtype, which are copied into a flat buffer in this order.
        group: the result of `process_group()`.
        parameters: the parameters. None: zeros with the gradients' shapes.
        names: the parameters' names. None: the bucket has no names, like a bucket of torch.
        index: the bucket's number.
        is_last: whether this bucket is the last one of the backward.
    """

    def __init__(
        self,
        gradients: Sequence[torch.Tensor],
        group: ProcessGroup,
        *,
        parameters: Sequence[torch.Tensor] | None = None,
        names: Sequence[str] | None = None,
        index: int = 0,
        is_last: bool = True,
    ) -> None:
        self._shapes = [gradient.shape for gradient in gradients]
        self._parameters = [torch.zeros_like(gradient) for gradient in gradients] if parameters is None else list(parameters)
        self._buffer = torch.cat([gradient.reshape(-1) for gradient in gradients]) if gradients else torch.empty(0)
        self._names = names
        self._group = group
        self._index = index
        self._is_last = is_last

    def index(self) -> int:
        """The bucket's number."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients, in one flat tensor."""
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the buffer: `buffer()` then returns the new buffer, and `gradients()` returns views of the new buffer."""
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, as views of `buffer()`."""
        pieces = torch.split(self._buffer, [shape.numel() for shape in self._shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self._shapes, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of `gradients()`."""
        return list(self._parameters)

    def parameter_names(self) -> list[str] | None:
        """The names that the test gave, in the order of `gradients()`."""
        return None if self._names is None else list(self._names)

    def is_last(self) -> bool:
        """Whether this is the last bucket of the backward."""
        return self._is_last

    def process_group(self) -> ProcessGroup:
        """The group that the test gave."""
        return self._group
