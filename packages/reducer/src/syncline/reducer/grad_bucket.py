"""The argument of a communication hook."""

from __future__ import annotations

import torch

from syncline.collectives import ProcessGroup

from .sparse_bucket import AnyBucket


class GradBucket:
    """The argument of a communication hook: a bucket of gradients.

    The bucket has all methods of `torch.distributed.GradBucket`, and also `parameter_names` and `process_group`.
    """

    def __init__(self, bucket: AnyBucket, index: int, is_last: bool, group: ProcessGroup) -> None:
        self._bucket = bucket
        self._group = group
        self._index = index
        self._is_last = is_last
        self._buffer = bucket.buffer

    def index(self) -> int:
        """Return the bucket's number. The bucket that is reduced first has number 0."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """Return all gradients of the bucket, as one flat, contiguous tensor.

        The values are this rank's own gradients, not divided by the number of ranks. For a sparse gradient, which has its own
        bucket, the buffer is a coalesced COO tensor with the parameter's shape.
        """
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Replace the tensor that `buffer()` and `gradients()` show, for example by a compressed copy in another dtype.

        `buffer` is a flat tensor with the same number of elements. The hook's result must have the dtype of the gradients or
        of `buffer`. The reducer casts the result to the dtype of the gradients.
        """
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Return views of `buffer()`, each with the shape of its parameter."""
        return self._bucket.views_into(self._buffer)

    def parameters(self) -> list[torch.Tensor]:
        """Return the parameters, in the order of `gradients()`."""
        return list(self._bucket.parameters)

    def parameter_names(self) -> list[str]:
        """Return the parameters' names in the model, in the order of `gradients()`. torch's GradBucket has no such method."""
        return list(self._bucket.names)

    def is_last(self) -> bool:
        """Whether this is the last bucket of this backward."""
        return self._is_last

    def process_group(self) -> ProcessGroup:
        """Return the group over which the reducer averages gradients. torch's GradBucket has no such method."""
        return self._group
