"""The interface of compressors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from syncline.collectives import InvalidArgumentError, ProcessGroup, ReduceOp, Work

from .low_precision import math_dtype


class Compressor(ABC):
    """Compresses gradients to messages, and computes mean gradients from the messages of all ranks.

    Write a subclass for a compression of your own, and pass an instance to `CompressionState`. A compressor keeps no state
    between calls. The length of a message must depend only on the gradients' shapes and dtype, because one collective transfers
    the messages of all ranks.

    Attributes:
        uses_seed: whether the results depend on the seed. If True, the ranks compare their seeds when they exchange messages.
    """

    uses_seed = True

    @property
    @abstractmethod
    def name(self) -> str:
        """A text that names the compressor and all settings that affect its messages, such as "top 0.01".

        A saved state can be loaded only with a compressor of the same name. Error messages also show the name.
        """

    @abstractmethod
    def compress(self, gradients: Sequence[torch.Tensor], seed: int) -> torch.Tensor:
        """Compress this rank's gradients to a message.

        Args:
            gradients: tensors of one dtype and any shapes, each with at least one element. `compress` does not change the
                tensors.
            seed: a number for random choices, the same on every rank, and different in every call.

        Returns:
            The message, a flat uint8 tensor. If the messages of a subclass have another dtype, the subclass's docstring names
            this dtype.
        """

    @abstractmethod
    def decompress(self, message: torch.Tensor, like: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
        """Compute approximate gradients from a message. Every rank must compute the same bits from the same message.

        Args:
            message: a result of `compress` on any rank.
            like: tensors with the shapes and dtype of the gradients. The tensors' values have no effect.
            seed: the seed that `compress` got for this message.

        Returns:
            New tensors with the shapes of the tensors in `like`. The new tensors have the dtype of `like`, or float32 if the
            dtype of `like` has 16 bits.
        """

    def exchange(self, group: ProcessGroup, message: torch.Tensor) -> tuple[Work, torch.Tensor]:
        """Start the collective by which each rank gets the messages of all ranks. Every rank must call this method.

        A subclass may use another collective that combines the messages; see `LinearCompressor`.

        Returns:
            The work, and a tensor with one row for each message. Read the tensor only after the work has finished.
        """
        messages = message.new_empty(group.size, message.numel())
        return group.all_gather_into_tensor(messages, message, async_op=True), messages

    def mean(self, messages: torch.Tensor, like: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
        """Return the mean of the gradients in all messages, one tensor for each gradient.

        All ranks add in the same order, so they get the same bits.

        Args:
            messages: the tensor that `exchange` has returned.
            like: tensors with the shapes and dtype of the gradients.
            seed: the seed that `compress` got for these messages.
        """
        total = self.decompress(messages[0], like, seed)
        for message in messages[1:]:
            for into, term in zip(total, self.decompress(message, like, seed), strict=True):
                into.add_(term)
        return [tensor.div_(len(messages)) for tensor in total]


class LinearCompressor(Compressor):
    """A compressor whose messages can be averaged without decompression, by one all_reduce."""

    def exchange(self, group: ProcessGroup, message: torch.Tensor) -> tuple[Work, torch.Tensor]:
        """Start an all_reduce that averages the messages of all ranks.

        Returns:
            The work, and a tensor with a single row, the mean message. Read the tensor only after the work has finished.
        """
        mean = message.clone()
        return group.all_reduce(mean, ReduceOp.AVG, async_op=True), mean.unsqueeze(0)


def start_exchange(compressor: Compressor, group: ProcessGroup, message: torch.Tensor, seed: int) -> tuple[Work, torch.Tensor]:
    """Call `compressor.exchange`. If the compressor uses seeds, the ranks also compare their seeds.

    If the seeds differ, for example because only one rank has loaded a saved state, the ranks would get different means. Over a
    group of torch, only Syncline's DDP makes this comparison.
    """
    if not compressor.uses_seed:
        return compressor.exchange(group, message)
    with group.marked(f"random seed {seed}"):
        return compressor.exchange(group, message)


def check_compressor(compressor: object) -> None:
    """Check that the argument is a compressor.

    Raises:
        InvalidArgumentError: the argument is something else, for example the class `Int8` instead of `Int8()`.
    """
    if not isinstance(compressor, Compressor):
        raise InvalidArgumentError(f"expected a Compressor, such as Int8(), found {compressor!r}")


def packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a flat uint8 tensor with the bytes of all these tensors."""
    return torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in parts])


class Unpacker:
    """Reads the tensors of a packed message, in the order in which they were packed."""

    def __init__(self, message: torch.Tensor) -> None:
        self._message = message
        self._read = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat copy of the next tensor in the message, which has `numel` elements."""
        nbytes = numel * dtype.itemsize
        part = self._message[self._read : self._read + nbytes]
        self._read += nbytes
        # A copy, because bytes in the middle of a message may not be aligned for the dtype.
        return part.clone().view(dtype)


def in_math_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """Return a float32 copy if the tensor's dtype has 16 bits. Otherwise return the tensor itself."""
    return tensor.to(math_dtype(tensor.dtype))
