"""The contract of a compressor: how one rank's gradients become a message, and messages a mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from syncline.collectives import InvalidArgumentError, ProcessGroup, ReduceOp, Work

from .low_precision import math_dtype


class Compressor(ABC):
    """Makes messages of gradients. Without state: what must be remembered is the hook's state's.

    A message has the same length on all ranks, a function of the gradients' shapes and dtype, so that one collective carries
    it.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """In saved states and errors; tells all settings that change a message."""

    @abstractmethod
    def compress(self, gradients: Sequence[torch.Tensor], seed: int) -> torch.Tensor:
        """The message.

        Args:
            gradients: of one dtype, any shapes. Only read.
            seed: the same on every rank, another one at every call.

        Returns:
            A flat tensor; of uint8 unless the subclass says otherwise.
        """

    @abstractmethod
    def decompress(self, message: torch.Tensor, like: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
        """What a message stands for: tensors like the gradients, halves as float32. The same bits on every rank.

        Args:
            message: what `compress` has returned on some rank.
            like: tensors with the shapes and dtype of the gradients.
            seed: that of the call.
        """

    def exchange(self, group: ProcessGroup, message: torch.Tensor) -> tuple[Work, torch.Tensor]:
        """Start the collective. Here: every rank gets every message.

        Returns:
            The work, and a tensor [messages, length] that holds them when it has finished; the result is their mean.
        """
        messages = message.new_empty(group.size, message.numel())
        return group.all_gather_into_tensor(messages, message, async_op=True), messages

    def mean(self, messages: torch.Tensor, like: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
        """The mean of what the messages stand for, added up in the order of ranks: the same bits on every rank."""
        total = self.decompress(messages[0], like, seed)
        for message in messages[1:]:
            for into, term in zip(total, self.decompress(message, like, seed), strict=True):
                into.add_(term)
        return [tensor.div_(len(messages)) for tensor in total]


class LinearCompressor(Compressor):
    """One whose messages may be averaged instead of what they stand for, so that an all_reduce carries them."""

    def exchange(self, group: ProcessGroup, message: torch.Tensor) -> tuple[Work, torch.Tensor]:
        """Start an all_reduce that averages; there is one message in the end."""
        mean = message.clone()
        return group.all_reduce(mean, ReduceOp.AVG, async_op=True), mean.unsqueeze(0)


def check_compressor(compressor: object) -> None:
    """Refuse what is no compressor.

    Raises:
        InvalidArgumentError: it is something else, such as the class instead of an instance.
    """
    if not isinstance(compressor, Compressor):
        raise InvalidArgumentError(f"expected a Compressor, such as Int8(), found {compressor!r}")


def packed(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of some tensors, one after the other."""
    return torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in parts])


class Unpacker:
    """Reads from a packed message what was packed, in the same order."""

    def __init__(self, message: torch.Tensor) -> None:
        self._message = message
        self._read = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next tensor, flat; a copy."""
        nbytes = numel * dtype.itemsize
        part = self._message[self._read : self._read + nbytes]
        self._read += nbytes
        return part.clone().view(dtype)


def in_math_dtype(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, halves as float32."""
    return tensor.to(math_dtype(tensor.dtype))
