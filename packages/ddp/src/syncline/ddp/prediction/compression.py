"""Compression: what a communication hook sends of a bucket, and what it computes for that."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from syncline.collectives import InvalidArgumentError

from .replay import ReadyBucket

_NUMEL = 1 << 20
_TRIALS = 5
_RANK = 4
_BYTES = 4  # of a number on the wire, where it is not cast


@dataclass(frozen=True)
class Compression:
    """One way to send a bucket.

    Attributes:
        name: as in tables.
        messages: the bytes of each all-reduce, one after the other, for a bucket.
        speed: bytes of gradients in a second that are compressed, and brought back.
    """

    name: str
    messages: Callable[[ReadyBucket], list[float]]
    speed: float

    def reduce_s(self, bucket: ReadyBucket, all_reduce_s: Callable[[float], float]) -> float:
        """Seconds of a bucket: computing first, then all-reduces one after the other."""
        return bucket.nbytes / self.speed + sum(all_reduce_s(nbytes) for nbytes in self.messages(bucket))


NONE = Compression("none", lambda bucket: [bucket.nbytes], math.inf)
BF16, POWER_SGD = "bf16", f"powersgd-{_RANK}"


def compressions(speeds: Mapping[str, float]) -> list[Compression]:
    """All that are known, none first. Those whose speed is not given are measured here, on the CPU.

    Args:
        speeds: in bytes of gradients a second, by name.

    Raises:
        InvalidArgumentError: a name is not known.
    """
    unknown = set(speeds) - {BF16, POWER_SGD}
    if unknown:
        raise InvalidArgumentError(f"expected speeds of {BF16} and {POWER_SGD}, found {', '.join(sorted(unknown))}")
    bf16 = speeds.get(BF16) or _speed(_cast)
    power_sgd = speeds.get(POWER_SGD) or _speed(_factorize)
    return [NONE, Compression(BF16, _halves, bf16), Compression(POWER_SGD, _factors, power_sgd)]


def _halves(bucket: ReadyBucket) -> list[float]:
    return [float(2 * sum(math.prod(one.shape) for one in bucket.gradients))]


def _factors(bucket: ReadyBucket) -> list[float]:
    """Vectors, and matrices that would not shrink to half, as they are; of the others one factor, then the other."""
    plain, left, right = 0.0, 0, 0
    for gradient in bucket.gradients:
        rows = gradient.shape[0] if gradient.shape else 1
        columns = math.prod(gradient.shape[1:])
        if len(gradient.shape) > 1 and 2 * _RANK * (rows + columns) < rows * columns:
            left, right = left + rows * _RANK, right + columns * _RANK
        else:
            plain += gradient.nbytes
    return [nbytes for nbytes in (plain, float(_BYTES * left), float(_BYTES * right)) if nbytes]


def _cast(gradients: torch.Tensor) -> None:
    gradients.copy_(gradients.to(torch.bfloat16))


def _factorize(gradients: torch.Tensor) -> None:
    """What PowerSGD computes of a square matrix, but for its small factors' orthogonalisation."""
    matrix = gradients.view(math.isqrt(_NUMEL), -1)
    left = matrix @ matrix[:, :_RANK]
    right = matrix.t() @ left
    torch.sub(matrix, left @ right.t())  # error feedback


def _speed(compress: Callable[[torch.Tensor], None]) -> float:
    """Bytes of float32 a second, in the best of some trials."""
    gradients = torch.ones(_NUMEL)
    compress(gradients)
    least = math.inf
    for _ in range(_TRIALS):
        began = time.perf_counter()
        compress(gradients)
        least = min(least, time.perf_counter() - began)
    return gradients.nbytes / least
