"""Mean and variance of each channel, of one rank's batch and of all ranks' batches together."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from syncline.collectives import ProcessGroup


@dataclass(frozen=True)
class BatchStatistics:
    """How many values each channel has, their mean, and the sum of their squared distances from it.

    Attributes:
        count: values for each channel.
        mean: of each channel; float64, (channels,).
        squares: sum of (value - mean)**2 of each channel; float64, (channels,).
    """

    count: int
    mean: torch.Tensor
    squares: torch.Tensor

    @property
    def variance(self) -> torch.Tensor:
        """The mean squared distance, which normalises."""
        return self.squares / self.count

    @property
    def unbiased_variance(self) -> torch.Tensor:
        """What the running estimate takes in. There must be two values at least."""
        return self.squares / (self.count - 1)


def statistics_of(inputs: torch.Tensor) -> BatchStatistics:
    """Those of this rank's batch.

    A first mean, rounded to the working dtype, is taken from the values; what is left tells how far off it is, and is small
    enough to be squared and added up.

    Args:
        inputs: (batch, channels, ...), in which the batch may be empty. Halves are added up in float32.
    """
    count = inputs.numel() // inputs.shape[1]
    if count == 0:
        nothing = inputs.new_zeros(inputs.shape[1], dtype=torch.float64)
        return BatchStatistics(0, nothing, nothing)
    values, dims = inputs.to(working_dtype(inputs)), reduced_dims(inputs)
    rounded = values.mean(dims, keepdim=True)
    rest = values - rounded
    error = rest.mean(dims).double()
    squares = rest.square_().sum(dims).double() - count * error.square()
    return BatchStatistics(count, rounded.flatten().double() + error, squares)


def gather_statistics(own: BatchStatistics, group: ProcessGroup) -> BatchStatistics:
    """Those of all ranks' batches together; bitwise the same on every rank. A collective.

    The ranks' means and squares are combined, not their sums: nothing is lost where the mean is large beside the deviation
    (T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1982).

    Cost: an all-gather of 8 * (2 * channels + 1) bytes from each rank.
    """
    count = own.mean.new_tensor([own.count])
    packed = torch.cat([count, own.mean, own.squares])
    rows = packed.new_empty(group.size, packed.numel())
    group.all_gather_into_tensor(rows, packed)
    counts, means, squares = torch.split(rows, [1, own.mean.numel(), own.mean.numel()], dim=1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    between = (counts * (means - mean).square()).sum(0)
    return BatchStatistics(int(total), mean, squares.sum(0) + between)


def working_dtype(inputs: torch.Tensor) -> torch.dtype:
    """What a batch is computed in: float64 if it is of float64, else float32."""
    return torch.float64 if inputs.dtype is torch.float64 else torch.float32


def reduced_dims(inputs: torch.Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [dim for dim in range(inputs.dim()) if dim != 1]


def channel_shape(inputs: torch.Tensor) -> list[int]:
    """The shape in which a vector of channels fits the batch."""
    return [-1 if dim == 1 else 1 for dim in range(inputs.dim())]
