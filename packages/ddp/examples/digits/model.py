"""The network: three convolutions with batch normalisation, and two linear layers."""

from __future__ import annotations

import torch
from torch import nn

BUCKET_CAP_MB = 0.05
"""Gradients of 0.35 MiB in all would fit into one bucket; this cap makes three, so that they overlap with backward."""


class DigitsNetwork(nn.Module):
    """Maps images `[batch, 1, 8, 8]` to scores `[batch, 10]`.

    Everything in it is smooth (SiLU, average pooling). Then rounding stays rounding: with ReLU or max-pooling, an activation
    that differs in its last bit may fall on the other side of a kink, and the gradient with it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(*_block(1, 16), nn.AvgPool2d(2), *_block(16, 32), *_block(32, 64))
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(64 * 4 * 4, 64), nn.SiLU(), nn.Linear(64, 10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Scores, not normalised."""
        scores: torch.Tensor = self.classifier(self.features(images))
        return scores


def _block(channels_in: int, channels_out: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(channels_out), nn.SiLU()]
