# ruff: noqa: ARG002 - every compressor gets a seed, even if it does not use one
"""Compressors that send 8 bits, 4 bits or 1 bit for each number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from .compressor import Compressor, Unpacker, in_math_dtype, packed
from .low_precision import math_dtype


class _Symmetric(Compressor):
    """Symmetric quantization: `round(x / scale)`, with a scale for which the largest magnitude becomes `_largest`."""

    _bits: int
    _largest: int

    uses_seed = False

    def __init__(self, *, per_channel: bool = False) -> None:
        self._per_channel = per_channel

    @property
    def name(self) -> str:
        return f"int{self._bits} per {'channel' if self._per_channel else 'tensor'}"

    def compress(self, gradients: Sequence[torch.Tensor], seed: int) -> torch.Tensor:
        """Make a message with the scales first, then the quantized numbers."""
        rows = [in_math_dtype(gradient).reshape(self._channels(gradient), -1) for gradient in gradients]
        scales = [row.abs().amax(dim=1) / self._largest for row in rows]
        numbers = [self._packed(_quantized(row, scale, self._largest)) for row, scale in zip(rows, scales, strict=True)]
        return packed([*scales, *numbers])

    def decompress(self, message: torch.Tensor, like: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
        unpacker = Unpacker(message)
        scales = [unpacker.take(self._channels(tensor), math_dtype(tensor.dtype)) for tensor in like]
        return [
            (self._unpacked(unpacker, tensor.numel()).view(len(scale), -1) * scale.unsqueeze(1)).view(tensor.shape)
            for tensor, scale in zip(like, scales, strict=True)
        ]

    def _packed(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers

    def _unpacked(self, unpacker: Unpacker, numel: int) -> torch.Tensor:
        return unpacker.take(numel, torch.int8)

    def _channels(self, tensor: torch.Tensor) -> int:
        # A vector has no channels: one scale for each number would send more than the vector itself.
        return tensor.shape[0] if self._per_channel and tensor.dim() > 1 else 1


class Int8(_Symmetric):
    """8-bit quantization: sends each number x as `round(x / scale)`. The scale makes the largest magnitude of a tensor 127.

    Source: Dettmers, "8-bit approximations for parallelism in deep learning", 2015 (linear variant).

    The rounding error of a number is at most half of the scale. If a number is NaN or infinite, all numbers with the same scale
    become NaN or infinite.

    Args:
        per_channel: use one scale for each index of the first dimension, instead of one scale for each tensor. Several scales
            are more accurate if magnitudes differ between channels. A vector always has one scale.

    Bytes sent by each rank: 1 for each number, and 4 (8 for float64) for each scale. A rank receives the same number of bytes
    from every other rank.
    """

    _bits, _largest = 8, 127


class Int4(_Symmetric):
    """4-bit quantization: like `Int8`, but the largest magnitude becomes 7, and one byte contains two numbers.

    Use error feedback, because the rounding errors of 4 bits are large.

    Args:
        per_channel: see `Int8`.

    Bytes sent by each rank: 1 for 2 numbers, rounded up for each tensor, and 4 (8 for float64) for each scale. A rank receives
    the same number of bytes from every other rank.
    """

    _bits, _largest = 4, 7

    def _packed(self, numbers: torch.Tensor) -> torch.Tensor:
        # Adding 8 moves -7 .. 7 to 1 .. 15, which fits into four bits without a sign. With an odd number of numbers, half of
        # the last byte is empty.
        flat = (numbers.reshape(-1) + 8).view(torch.uint8)
        pairs = torch.nn.functional.pad(flat, (0, flat.numel() % 2)).view(-1, 2)
        return pairs[:, 0] | (pairs[:, 1] << 4)

    def _unpacked(self, unpacker: Unpacker, numel: int) -> torch.Tensor:
        pairs = unpacker.take(math.ceil(numel / 2), torch.uint8)
        return torch.stack([pairs & 15, pairs >> 4], dim=1).view(torch.int8).reshape(-1)[:numel] - 8


def _quantized(rows: torch.Tensor, scale: torch.Tensor, largest: int) -> torch.Tensor:
    # If all numbers are 0, any divisor will do. If the scale is not finite, any divisor will do, too: the receiver multiplies
    # by the scale, so the result is not finite.
    divisor = torch.where((scale > 0) & scale.isfinite(), scale, 1).unsqueeze(1)
    # int8 has no NaN. But a NaN in `rows` has made the scale NaN, and the scale makes the received numbers NaN.
    return torch.nan_to_num(rows / divisor).round().clamp(-largest, largest).to(torch.int8)


class OneBit(Compressor):
    """Sends the sign of each number, and the mean magnitude of each tensor. This compressor needs error feedback.

    The receiver gives each number the tensor's mean magnitude, with the sign of the original number. Zero counts as positive.
    If a number is NaN or infinite, the whole tensor becomes NaN or infinite.

    Source: Seide et al., "1-bit stochastic gradient descent and its application to data-parallel distributed training of speech
    DNNs", 2014; the mean magnitude follows Karimireddy et al., "Error feedback fixes SignSGD", 2019.

    Bytes sent by each rank: 1 for 8 numbers, rounded up for each tensor, and 4 (8 for float64) for each mean magnitude. A rank
    receives the same number of bytes from every other rank.
    """

    uses_seed = False

    @property
    def name(self) -> str:
        """The name for saved states and errors. The name is fixed, because this compressor has no settings."""
        return "one bit"

    def compress(self, gradients: Sequence[torch.Tensor], seed: int) -> torch.Tensor:
        """Compress gradients to a message: the mean magnitudes of all gradients, then the sign of each number."""
        scales = [in_math_dtype(gradient).abs().mean() for gradient in gradients]
        return packed([*scales, *(_bits(gradient.reshape(-1) >= 0) for gradient in gradients)])

    def decompress(self, message: torch.Tensor, like: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
        """Restore tensors from a message. Each number is its tensor's mean magnitude, with the sign of the original number."""
        unpacker = Unpacker(message)
        scales = [unpacker.take(1, math_dtype(tensor.dtype)) for tensor in like]
        found = []
        for tensor, scale in zip(like, scales, strict=True):
            is_positive = _bools(unpacker.take(math.ceil(tensor.numel() / 8), torch.uint8))[: tensor.numel()]
            found.append(torch.where(is_positive, scale, -scale).view(tensor.shape))
        return found


def _powers(device: torch.device) -> torch.Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)


def _bits(flags: torch.Tensor) -> torch.Tensor:
    full = torch.nn.functional.pad(flags.to(torch.uint8), (0, -len(flags) % 8))
    return (full.view(-1, 8) * _powers(flags.device)).sum(dim=1).to(torch.uint8)


def _bools(message: torch.Tensor) -> torch.Tensor:
    return ((message.unsqueeze(1) & _powers(message.device)) != 0).view(-1)
