"""The tasks over slow links: small ones, whose data are on every machine."""

from __future__ import annotations

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

Batch = tuple[torch.Tensor, torch.Tensor]


class Task(ABC):
    """Samples, a model and how long it is trained.

    Attributes:
        name: its name in tables.
        steps: number of training steps.
        lr: AdamW's at the first step; it falls to 0 along a half cosine.
        outer_lr: DiLoCo's.
        outer_momentum: DiLoCo's. The papers' 0.9 is for hundreds of outer steps; these tasks have 12 to 20, and it still
            overshoots. Both values were chosen by the validation loss.
    """

    name: str
    steps: int
    lr: float
    outer_lr: float
    outer_momentum: float

    @abstractmethod
    def model(self) -> nn.Module:
        """A new model, from torch's random numbers; its output has the scores of classes in the last dimension."""

    @abstractmethod
    def batch(self, generator: torch.Generator) -> Batch:
        """Inputs and target classes for one rank."""

    @abstractmethod
    def validation(self) -> Batch:
        """Samples that are never used for training."""

    def parameter_bytes(self) -> int:
        """Bytes of the model's parameters."""
        return sum(parameter.nbytes for parameter in self.model().parameters())

    @torch.no_grad()
    def validation_loss(self, model: nn.Module) -> float:
        """Cross entropy in nats."""
        model.eval()
        inputs, targets = self.validation()
        loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten()).item()
        model.train()
        return loss


class NextCharacter(Task):
    """Predict each next character of Python's help texts; the last tenth of the texts is for validation."""

    name = "text"
    lr = 3e-3
    # Chosen with four replicas, from twelve pairs: 0.7 to 1.4, and 0 to 0.9. With the papers' pair the loss was 7 % higher.
    outer_lr = 1.0
    outer_momentum = 0.7

    LENGTH, WIDTH, SEQUENCES = 64, 64, 16

    def __init__(self, is_quick: bool) -> None:
        self.steps = 4 if is_quick else 1000
        spec = importlib.util.find_spec("pydoc_data.topics")
        assert spec is not None
        assert spec.origin is not None
        text = Path(spec.origin).read_bytes()
        self._tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).clamp(max=127).long()
        self._split = len(self._tokens) * 9 // 10

    def model(self) -> nn.Module:
        """A causal transformer of two layers over ASCII characters."""
        return CharacterModel(self.WIDTH, self.LENGTH)

    def batch(self, generator: torch.Generator) -> Batch:
        """[SEQUENCES, LENGTH] characters, and the characters that follow them."""
        return self._at(torch.randint(self._split - self.LENGTH - 1, (self.SEQUENCES,), generator=generator))

    def validation(self) -> Batch:
        """64 sequences, evenly over the last tenth."""
        return self._at(torch.linspace(self._split, len(self._tokens) - self.LENGTH - 1, 64).long())

    def _at(self, starts: torch.Tensor) -> Batch:
        places = starts.unsqueeze(1) + torch.arange(self.LENGTH + 1)
        sequences = self._tokens[places]
        return sequences[:, :-1], sequences[:, 1:]


class CharacterModel(nn.Module):
    """Characters `[batch, length]` to scores `[batch, length, 128]`; each position sees only earlier ones."""

    mask: torch.Tensor

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.embedding = nn.Embedding(128, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.encoder(self.embedding(characters) + self.places, mask=self.mask, is_causal=True))
        return scores


class Digits(Task):
    """The task of packages/ddp/examples/digits."""

    name = "digits"
    lr = 3e-3
    # Chosen with two replicas, from 0, 0.5 and 0.9.
    outer_lr = 0.7
    outer_momentum = 0.0

    IMAGES = 24

    def __init__(self, is_quick: bool) -> None:
        sys.path.insert(0, str(Path(__file__).parents[2] / "packages" / "ddp" / "examples" / "digits"))
        from data import load
        from model import DigitsNetwork

        self.steps = 4 if is_quick else 600
        self._network: Callable[[], nn.Module] = DigitsNetwork
        self._train, self._test = (dataset.tensors for dataset in load())

    def model(self) -> nn.Module:
        """Three convolutions with batch normalisation, two linear layers."""
        return self._network()

    def batch(self, generator: torch.Generator) -> Batch:
        """Images [IMAGES, 1, 8, 8] and digits."""
        images, digits = self._train
        chosen = torch.randint(len(images), (self.IMAGES,), generator=generator)
        return images[chosen], digits[chosen]

    def validation(self) -> Batch:
        """The 360 test images."""
        images, digits = self._test
        return images, digits


TASKS: dict[str, Callable[[bool], Task]] = {"text": NextCharacter, "digits": Digits}
