"""A model whose layers sleep instead of computing, like a processor that waits for an accelerator."""

from __future__ import annotations

import time
from typing import Any

import torch

from .cases import Case

LAYERS, LAYER_BYTES = 16, 1 << 20


class SleepingModel(torch.nn.Module):
    """Layers of equal size. The matrix of each layer serves only as a place for a gradient.

    Args:
        layers: how many.
        layer_bytes: bytes of each layer's parameter, float32.
        forward_s: seconds that a layer sleeps in forward.
        backward_s: seconds that it sleeps in backward, before its gradient is there.
    """

    def __init__(self, layers: int, layer_bytes: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(layer_bytes // 4 // 256, 256) for _ in range(layers))
        self._times = forward_s, backward_s

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        """A scalar."""
        for weight in self.weights:
            value = _Sleep.apply(value, weight, *self._times)  # type: ignore[no-untyped-call]  # torch's
        return value


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, weight: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        time.sleep(forward_s)
        ctx.backward_s = backward_s
        ctx.save_for_backward(weight)
        return value + 1

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        time.sleep(ctx.backward_s)
        (weight,) = ctx.saved_tensors
        return gradient, torch.zeros_like(weight), None, None


def sleeping_layers(backward_s: float, layers: int = LAYERS, layer_bytes: int = LAYER_BYTES) -> Case:
    """Layers with gradients of 1 MiB each, by default; forward takes a third as long as backward."""
    return Case(
        f"{layers} layers that sleep",
        lambda: SleepingModel(layers, layer_bytes, backward_s / 3, backward_s),
        lambda: torch.zeros((), requires_grad=True),
        lambda output, _: output,
    )
