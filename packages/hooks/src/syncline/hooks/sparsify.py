# ruff: noqa: ARG002 - every compressor gets a seed, even if it does not use one
"""Sparsification: compressors that send only some numbers of each gradient, unchanged."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from syncline.collectives import InvalidArgumentError

from .compressor import Compressor, LinearCompressor, Unpacker, in_math_dtype, packed


class TopK(Compressor):
    """Sends the numbers of largest magnitude in each tensor, with their indices. This compressor needs error feedback.

    The receiver gets zeros for all other numbers. A NaN counts as the largest number.

    Source: Aji and Heafield, "Sparse communication for distributed gradient descent", 2017; Stich et al., "Sparsified SGD with
    memory", 2018.

    Args:
        fraction: the part of each tensor's numbers that is sent, above 0 and at most 1. The count is rounded up, so at least
            one number of each tensor is sent.

    Bytes sent by each rank for each chosen number: 4 for the index (8 in a tensor of more than 2^31 numbers), and the size of
    the number's dtype. A rank receives the same number of bytes from every other rank.

    Raises:
        InvalidArgumentError: the fraction is out of its range.
    """

    uses_seed = False

    def __init__(self, fraction: float) -> None:
        self._fraction = _checked(fraction)

    @property
    def name(self) -> str:
        """The name for saved states and errors, which contains the fraction, such as "top 0.01"."""
        return f"top {self._fraction:g}"

    def compress(self, gradients: Sequence[torch.Tensor], seed: int) -> torch.Tensor:
        """Compress gradients to a message: the chosen numbers of all gradients, then their indices."""
        values, indices = [], []
        for gradient in gradients:
            flat = gradient.reshape(-1)
            chosen = torch.topk(in_math_dtype(flat).abs(), _count(flat.numel(), self._fraction), sorted=False).indices
            values.append(flat[chosen])
            indices.append(chosen.to(_index_dtype(flat.numel())))
        return packed([*values, *indices])

    def decompress(self, message: torch.Tensor, like: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
        """Restore tensors from a message. The tensors have the sent numbers at the sent indices, and zeros elsewhere."""
        unpacker = Unpacker(message)
        counts = [_count(tensor.numel(), self._fraction) for tensor in like]
        values = [unpacker.take(count, tensor.dtype) for count, tensor in zip(counts, like, strict=True)]
        return [
            _scattered(tensor, unpacker.take(count, _index_dtype(tensor.numel())).long(), value)
            for tensor, count, value in zip(like, counts, values, strict=True)
        ]


class RandomK(LinearCompressor):
    """Sends numbers at random positions of each tensor. This compressor needs error feedback.

    All ranks choose the same positions, so no indices are sent. Every message has new positions. The receiver gets zeros for
    all other numbers. If a number of a tensor is NaN or infinite, all numbers sent for this tensor become NaN.

    Source: Stich et al., "Sparsified SGD with memory", 2018.

    Args:
        fraction: the part of each tensor's numbers that is sent, above 0 and at most 1. The count is rounded up, so at least
            one number of each tensor is sent.

    Bytes: one all_reduce of the chosen numbers, in the gradients' dtype.

    Raises:
        InvalidArgumentError: the fraction is out of its range.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = _checked(fraction)

    @property
    def name(self) -> str:
        """The name for saved states and errors, which contains the fraction, such as "random 0.01"."""
        return f"random {self._fraction:g}"

    def compress(self, gradients: Sequence[torch.Tensor], seed: int) -> torch.Tensor:
        """Compress gradients to a message: the numbers at the positions that follow from `seed`, in the gradients' dtype."""
        places = self._places(gradients, seed)
        # NaN or infinity at a position that is not chosen must show, too: 0 times such a number is NaN. The product comes
        # first, because a sum of finite numbers could overflow.
        return torch.cat(
            [gradient.reshape(-1)[chosen] + (0 * gradient).sum() for gradient, chosen in zip(gradients, places, strict=True)]
        )

    def decompress(self, message: torch.Tensor, like: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
        """Restore tensors from a message: the sent numbers at the chosen positions, and zeros elsewhere."""
        places = self._places(like, seed)
        values = torch.split(message, [len(chosen) for chosen in places])
        return [_scattered(*triple) for triple in zip(like, places, values, strict=True)]

    def _places(self, like: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def places(tensor: torch.Tensor) -> torch.Tensor:
            order = torch.randperm(tensor.numel(), generator=generator, device="cpu")
            return order[: _count(tensor.numel(), self._fraction)].to(tensor.device)

        return [places(tensor) for tensor in like]


_MOST_IN_INT32 = 2**31


def _index_dtype(numel: int) -> torch.dtype:
    # The sender and the receiver both know `numel`, so the dtype is not sent.
    return torch.int32 if numel <= _MOST_IN_INT32 else torch.int64


def _scattered(like: torch.Tensor, indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    flat = torch.zeros(like.numel(), dtype=values.dtype, device=values.device)
    flat[indices] = values
    return in_math_dtype(flat).view(like.shape)


def _count(numel: int, fraction: float) -> int:
    return min(numel, max(1, math.ceil(numel * fraction)))


def _checked(fraction: float) -> float:
    if not 0 < fraction <= 1:
        raise InvalidArgumentError(f"expected a fraction above 0 and up to 1, found {fraction}")
    return fraction
