"""GradBucket: what a communication hook may see of a bucket."""

from __future__ import annotations

import torch

from syncline.collectives import ProcessGroup

from .sparse_bucket import AnyBucket


class GradBucket:
    """The argument of a communication hook; the methods of `torch.distributed.GradBucket`, and the group."""

    def __init__(self, bucket: AnyBucket, index: int, is_last: bool, group: ProcessGroup) -> None:
        self._bucket = bucket
        self._group = group
        self._index = index
        self._is_last = is_last
        self._buffer = bucket.buffer

    def index(self) -> int:
        """The bucket's number, 0 for the one that is reduced first."""
        return self._index

    def buffer(self) -> torch.Tensor:
        """All gradients of the bucket: flat, contiguous, this rank's own values, not divided.

        The bucket of a sparse gradient holds one parameter, and its buffer is that gradient: COO, coalesced, not flat.
        """
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        """Let `buffer()` and `gradients()` show another flat tensor with as many elements.

        While it is in place, the hook's result may have its dtype, and is cast to the bucket's own.
        """
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        """Views of `buffer()`, each with the shape of its parameter."""
        return self._bucket.views_into(self._buffer)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters, in the order of `gradients()`."""
        return list(self._bucket.parameters)

    def is_last(self) -> bool:
        """Whether this is the last bucket that is reduced in this iteration."""
        return self._is_last

    def process_group(self) -> ProcessGroup:
        """The group over which the reducer averages (torch's GradBucket does not have this)."""
        return self._group
