"""The models that are trained, with their data.

Every rank has its own data. The models are the same on all ranks, because they follow from the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

LENGTH = 32
"""Tokens in a sequence."""


@dataclass(frozen=True)
class Case:
    """A model and a batch.

    Attributes:
        name: its name in tables.
        model: makes the model.
        batch: makes one rank's batch.
        loss: takes the model's output and the batch.
    """

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda output, _: output.square().mean()


@dataclass(frozen=True)
class Scale:
    """The size of the models: full size to measure, small to show only that a benchmark runs."""

    width: int = 1024
    model_width: int = 256
    vocabulary: int = 8000
    layers: int = 4
    channels: int = 32
    image_side: int = 32
    many: int = 500


FULL = Scale()
QUICK = Scale(width=16, model_width=16, vocabulary=50, channels=1, layers=1, image_side=8, many=8)


def mlp(batch_size: int, scale: Scale = FULL) -> Case:
    """Six square layers: 24 MiB of gradients."""

    def model() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(scale.width, scale.width), nn.ReLU())))

    return Case(f"MLP 6 x {scale.width}, batch {batch_size}", model, lambda: torch.randn(batch_size, scale.width))


class TokenModel(nn.Module):
    """Token ids `[batch, length]` to scores `[batch, length, vocabulary]`: embedding, encoder layers, a linear head."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
        self.embedding = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoder(layer, num_layers=layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.encoder(self.embedding(tokens)))
        return scores


def transformer(sequences: int, scale: Scale = FULL) -> Case:
    """An encoder that repeats every token: 28 MiB of gradients, more than half of them in embedding and head."""
    return Case(
        f"transformer d {scale.model_width}, {sequences} x {LENGTH}",
        lambda: TokenModel(scale.vocabulary, scale.model_width, scale.layers),
        lambda: torch.randint(scale.vocabulary, (sequences, LENGTH)),
        lambda scores, tokens: F.cross_entropy(scores.flatten(0, 1), tokens.flatten()),
    )


class Residual(nn.Module):
    """Two convolutions beside a shortcut, each with batch normalisation."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.branch = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(),
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.branch(images) + self.shortcut(images))


def residual_cnn(batch_size: int, scale: Scale = FULL) -> Case:
    """Six residual blocks in three resolutions on 32 x 32 images: 2.8 MiB of gradients."""

    def model() -> nn.Module:
        first, second, third = (factor * scale.channels for factor in (1, 2, 4))
        ways = [
            (3, first, 1),
            (first, first, 1),
            (first, second, 2),
            (second, second, 1),
            (second, third, 2),
            (third, third, 1),
        ]
        blocks = [Residual(*way) for way in ways]
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(third, 10))

    side = scale.image_side
    name = f"residual CNN {side} x {side}, batch {batch_size}"
    return Case(name, model, lambda: torch.randn(batch_size, 3, side, side))


class Bottleneck(nn.Module):
    """The block of ResNet-50 (He et al. 2015): 1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = 4 * channels
        self.branch = nn.Sequential(
            nn.Conv2d(channels_in, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels_out, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels_out, 1, stride, bias=False), nn.BatchNorm2d(channels_out)
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.branch(images) + self.shortcut(images))


def resnet50(batch_size: int, scale: Scale = FULL) -> Case:
    """ResNet-50, 161 parameters, at a quarter of its width (1.6 million elements), on images of 64 x 64."""

    def model() -> nn.Module:
        width = scale.channels // 2 or 1
        layers: list[nn.Module] = [
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        channels_in = width
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                layers.append(Bottleneck(channels_in, width << stage, 2 if stage and not block else 1))
                channels_in = 4 * (width << stage)
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, 1000))

    side = 2 * scale.image_side
    return Case(
        f"ResNet-50 at a quarter, {side} x {side}, batch {batch_size}", model, lambda: torch.randn(batch_size, 3, side, side)
    )


def deep_transformer(layers: int, scale: Scale = FULL) -> Case:
    """An encoder of 12 parameters a layer, and three more; half as wide as `transformer`, with a quarter of its vocabulary."""
    case = transformer(4, replace(scale, model_width=scale.model_width // 2, vocabulary=scale.vocabulary // 4, layers=layers))
    return replace(case, name=f"transformer, {layers} layers, {12 * layers + 3} parameters")


def realistic_cases(scale: Scale = FULL) -> list[Case]:
    """The cases of the overhead benchmark: 51 to 495 parameters."""
    return [resnet50(4, scale), *(deep_transformer(layers, scale) for layers in (4, 12, 24, 41))]


class ManyTiny(nn.Module):
    """Square layers, each beside a shortcut, scaled so that outputs neither vanish nor grow with the number of layers."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(count))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            values = torch.add(values, layer(values), alpha=1 / len(self.layers))
        return values


def many_tiny(scale: Scale = FULL) -> Case:
    """500 parameters of 16 elements: shows the cost of the reducer itself."""
    return Case(f"{scale.many} tiny parameters", lambda: ManyTiny(scale.many), lambda: torch.randn(4, 4))


class WithUnused(nn.Module):
    """A module, and a layer that nothing reaches."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.unused = nn.Linear(64, 64)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.module(values)
        return output


def with_unused(case: Case) -> Case:
    """The case with additional parameters that get no gradient."""
    return replace(case, name=f"{case.name}, some unused", model=lambda: WithUnused(case.model()))


def all_cases(scale: Scale = FULL) -> list[Case]:
    """The cases of the step benchmark."""
    return [
        *(mlp(batch_size, scale) for batch_size in (4, 16, 64)),
        *(transformer(sequences, scale) for sequences in (2, 8)),
        *(residual_cnn(batch_size, scale) for batch_size in (4, 16)),
        many_tiny(scale),
    ]
