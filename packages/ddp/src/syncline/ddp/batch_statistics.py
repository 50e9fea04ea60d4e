"""The mean and variance of each channel, over one rank's batch or over the batches of all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from syncline.collectives import ProcessGroup


@dataclass(frozen=True)
class BatchStatistics:
    """The mean and the variance of each channel, in a form that the ranks can combine.

    Attributes:
        count: number of values in each channel.
        mean: mean of each channel; float64, (channels,).
        squares: sum of (value - mean)**2 in each channel; float64, (channels,).
    """

    count: int
    mean: torch.Tensor
    squares: torch.Tensor

    @property
    def variance(self) -> torch.Tensor:
        """The mean squared distance from the mean. Batch normalisation divides by the square root of this value."""
        return self.squares / self.count

    @property
    def unbiased_variance(self) -> torch.Tensor:
        """The variance with the divisor `count` - 1, for running estimates. `count` must be at least 2."""
        return self.squares / (self.count - 1)


def statistics_of(inputs: torch.Tensor) -> BatchStatistics:
    """Return the statistics of this rank's batch.

    Args:
        inputs: (batch, channels, ...); the batch may be empty. Sums of 16-bit values are computed in float32.
    """
    count = inputs.numel() // inputs.shape[1]
    # The mean of an empty batch would be NaN. Statistics with a count of 0 change nothing when all ranks are combined.
    if count == 0:
        nothing = inputs.new_zeros(inputs.shape[1], dtype=torch.float64)
        return BatchStatistics(0, nothing, nothing)
    # The first mean is rounded. Its rounding error is the mean of the differences from this mean. Add this error in float64.
    values, dims = inputs.to(working_dtype(inputs)), reduced_dims(inputs)
    rounded = values.mean(dims, keepdim=True)
    rest = values - rounded
    error = rest.mean(dims).double()
    squares = rest.square_().sum(dims).double() - count * error.square()
    return BatchStatistics(count, rounded.flatten().double() + error, squares)


def gather_statistics(own: BatchStatistics, group: ProcessGroup) -> BatchStatistics:
    """Return the statistics over the batches of all ranks, the same bits on every rank. This is a collective.

    Sums of values and of squares would lose digits if the mean is large compared with the standard deviation. So the ranks
    combine means and squared distances from the means (T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a
    pairwise algorithm for computing sample variances", 1982).

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
    """Return the dtype of the computation: float64 for a batch in float64, else float32."""
    return torch.float64 if inputs.dtype is torch.float64 else torch.float32


def reduced_dims(inputs: torch.Tensor) -> list[int]:
    """Return the indices of all dimensions except the dimension of the channels."""
    return [dim for dim in range(inputs.dim()) if dim != 1]


def channel_shape(inputs: torch.Tensor) -> list[int]:
    """Return the shape (1, -1, 1, ...), in which a vector with one value per channel broadcasts to the batch."""
    return [-1 if dim == 1 else 1 for dim in range(inputs.dim())]
