"""Describe communication hooks: the bytes that a hook sends for a bucket, and the time of its computation."""

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
_BYTES = 4  # bytes of a number on the wire, unless a hook casts the numbers


@dataclass(frozen=True)
class Compression:
    """One way to send a bucket.

    Attributes:
        name: the compression's name in tables.
        messages: a function that takes a bucket, and returns the bytes of each of its all-reduces, in their order.
        speed: the bytes of gradients that are compressed and decompressed per second.
    """

    name: str
    messages: Callable[[ReadyBucket], list[float]]
    speed: float

    def reduce_s(self, bucket: ReadyBucket, all_reduce_s: Callable[[float], float]) -> float:
        """Return the seconds that a bucket takes: the computation, followed by the all-reduces one after the other."""
        return bucket.nbytes / self.speed + sum(all_reduce_s(nbytes) for nbytes in self.messages(bucket))


NONE = Compression("none", lambda bucket: [bucket.nbytes], math.inf)
BF16, POWER_SGD = "bf16", f"powersgd-{_RANK}"


def compressions(speeds: Mapping[str, float]) -> list[Compression]:
    """Return all known compressions. The first one sends uncompressed gradients.

    Args:
        speeds: the speeds of some compressions by name, in bytes of gradients per second. All other speeds are measured on the
            CPU.

    Raises:
        InvalidArgumentError: a name is unknown.
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
    """Return the bytes of PowerSGD's messages: first uncompressed gradients and left factors, then right factors."""
    plain, left, right = 0.0, 0, 0
    for gradient in bucket.gradients:
        rows = gradient.shape[0] if gradient.shape else 1
        columns = math.prod(gradient.shape[1:])
        if len(gradient.shape) > 1 and 2 * _RANK * (rows + columns) < rows * columns:
            left, right = left + rows * _RANK, right + columns * _RANK
        else:
            plain += gradient.nbytes
    first = plain + _BYTES * left
    return [first, float(_BYTES * right)] if right else [first]


def _cast(gradients: torch.Tensor) -> None:
    gradients.copy_(gradients.to(torch.bfloat16))


def _factorize(gradients: torch.Tensor) -> None:
    """Do the computation of PowerSGD on a square matrix, without orthogonalisation, to measure its speed."""
    matrix = gradients.view(math.isqrt(_NUMEL), -1)
    left = matrix @ matrix[:, :_RANK]
    right = matrix.t() @ left
    torch.sub(matrix, left @ right.t())  # error feedback


def _speed(compress: Callable[[torch.Tensor], None]) -> float:
    gradients = torch.ones(_NUMEL)
    compress(gradients)
    # The first call above is not measured, because it is slower than later calls.
    least = math.inf
    for _ in range(_TRIALS):
        began = time.perf_counter()
        compress(gradients)
        least = min(least, time.perf_counter() - began)
    return gradients.nbytes / least
