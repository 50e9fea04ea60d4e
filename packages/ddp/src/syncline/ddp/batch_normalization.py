"""Batch normalisation over several ranks, as an autograd function."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from syncline.collectives import ProcessGroup

from .batch_statistics import BatchStatistics, channel_shape, reduced_dims, working_dtype


class BatchNormalization(torch.autograd.Function):
    """Computes y = (x - mean) / sqrt(variance + eps) * weight + bias, with the mean and variance of x over all ranks.

    Let n be the number of values of a channel over all ranks, g the gradient of y, and x' = (x - mean) / sqrt(variance + eps).
    Then the gradient of x is

        weight / sqrt(variance + eps) * (g - sum(g) / n - x' * sum(g * x') / n)

    The sums are over all ranks, by one all_reduce of 16 bytes for each channel. The gradients of weight and bias cover only
    this rank's part of the batch, because the reducer averages them later.
    """

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        statistics: BatchStatistics,
        eps: float,
        group: ProcessGroup,
    ) -> torch.Tensor:
        """Normalise this rank's part of the batch. The result has the dtype and the memory format of the inputs."""
        dtype = working_dtype(inputs)
        mean, variance = statistics.mean.to(dtype), statistics.variance.to(dtype)
        ctx.save_for_backward(inputs, weight, mean, (variance + eps).rsqrt())
        ctx.count, ctx.group = statistics.count, group
        weight, bias = (None if parameter is None else parameter.to(dtype) for parameter in (weight, bias))
        return torch.nn.functional.batch_norm(inputs, mean, variance, weight, bias, training=False, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Compute the gradients of inputs, weight and bias. If the inputs require a gradient, this is a collective."""
        inputs, weight, mean, scale = ctx.saved_tensors
        dims, shape = reduced_dims(inputs), channel_shape(inputs)
        gradient = gradients[0].to(mean.dtype)
        normalized = (inputs.to(mean.dtype) - mean.view(shape)).mul_(scale.view(shape))
        sums = torch.stack([gradient.sum(dims), (gradient * normalized).sum(dims)])
        needs_inputs, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_weight = sums[1].to(weight.dtype) if needs_weight else None
        of_bias = sums[0].to(inputs.dtype if weight is None else weight.dtype) if needs_bias else None
        of_inputs = None
        # Only the gradient of the inputs depends on the other ranks.
        if needs_inputs:
            # Reduce a copy, because the gradients of weight and bias may be views of `sums`.
            everywhere = sums.to(torch.float64, copy=True)
            ctx.group.all_reduce(everywhere)
            of_1, of_normalized = (everywhere / ctx.count).to(mean.dtype)
            factor = scale if weight is None else scale * weight.to(mean.dtype)
            centred = gradient - of_1.view(shape) - normalized.mul_(of_normalized.view(shape))
            of_inputs = centred.mul_(factor.view(shape)).to(inputs.dtype)
        return of_inputs, of_weight, of_bias, None, None, None
