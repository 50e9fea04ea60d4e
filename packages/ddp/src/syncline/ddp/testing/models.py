"""Ten small models that data-parallel training must support. The models' inputs have shape (rows, 12) and float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

FEATURES = 12
CLASSES = 3
_WORDS = 11


@dataclass(frozen=True)
class Model:
    """A model, and the options for its training.

    Attributes:
        build: a function that makes the model. The training replaces the initial values of the parameters.
        options: the options for `DistributedDataParallel`.
        momentum: the momentum of SGD. Must be 0 if gradients are sparse.
        prediction: a function that takes the model's outputs and the step's number, and returns the logits for the loss, with
            shape (rows, 3).
    """

    build: Callable[[], torch.nn.Module]
    options: Mapping[str, Any] = field(default_factory=dict)
    momentum: float = 0.9
    prediction: Callable[[Any, int], torch.Tensor] = lambda outputs, _: outputs


class Convolutional(torch.nn.Module):
    """Has batch normalisation, whose statistics must be computed over the whole batch of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 2, bias=False),
            torch.nn.BatchNorm2d(4),
            torch.nn.ReLU(),
            torch.nn.Conv2d(4, 5, 2, bias=False),
            torch.nn.BatchNorm2d(5, momentum=None),
            torch.nn.Flatten(),
            torch.nn.Linear(10, CLASSES),
        )

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layers(inputs.view(-1, 1, 3, 4))


class ChannelsLast(torch.nn.Module):
    """Has parameters and activations in channels-last order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 2), torch.nn.GroupNorm(2, 4), torch.nn.Tanh(), torch.nn.Conv2d(4, 6, (1, 2))
        ).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch lacks this overload
        self.head = torch.nn.Linear(6, CLASSES)

    def forward(self, inputs: torch.Tensor) -> Any:
        images = inputs.view(-1, 2, 2, 3).contiguous(memory_format=torch.channels_last)
        return self.head(self.layers(images).flatten(1))


class Transformer(torch.nn.Module):
    """Has self-attention and layer norms."""

    def __init__(self) -> None:
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = torch.nn.Linear(4, CLASSES)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.head(self.encoder(inputs.view(-1, 3, 4)).mean(1))


class Recurrent(torch.nn.Module):
    """Has an LSTM of two layers, over sequences of length 3."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = torch.nn.LSTM(4, 5, num_layers=2, batch_first=True)
        self.head = torch.nn.Linear(5, CLASSES)

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.head(self.lstm(inputs.view(-1, 3, 4))[0][:, -1])


class Mixture(torch.nn.Module):
    """Sends each row to one expert. So the ranks use different experts, which change in each step. One expert is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(FEATURES, 6)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(6))
        self.head = torch.nn.Linear(6, CLASSES)

    def forward(self, inputs: torch.Tensor) -> Any:
        hidden = torch.tanh(self.trunk(inputs))
        chosen = (inputs[:, 0].abs() * 7).long() % 5
        mixed = torch.zeros_like(hidden)
        for number in set(chosen.tolist()):
            rows = chosen == number
            mixed = mixed.index_put((rows,), self.experts[number](hidden[rows]))
        return self.head(mixed)


class Tied(torch.nn.Module):
    """Shares one weight between embedding and head, and uses one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(CLASSES, 6)
        self.layer = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, inputs: torch.Tensor) -> Any:
        hidden = self.embedding((inputs.abs() * 7).long() % CLASSES).mean(1)
        return self.head(torch.tanh(self.layer(torch.tanh(self.layer(hidden)))))


class SparseEmbedding(torch.nn.Module):
    """Has sparse gradients, which contain only the rows of the words in this rank's inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(_WORDS, 6, sparse=True)
        self.bag = torch.nn.EmbeddingBag(_WORDS, 6, mode="mean", sparse=True)
        self.head = torch.nn.Linear(6, CLASSES)

    def forward(self, inputs: torch.Tensor) -> Any:
        words = (inputs.abs() * 7).long() % _WORDS
        return self.head(self.table(words[:, :3]).mean(1) + self.bag(words))


class Checkpointed(torch.nn.Module):
    """Has re-entrant and non-re-entrant activation checkpoints. One block runs twice, and two parameters are never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(FEATURES, 6)
        self.block = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh())
        self.head, self.unused = torch.nn.Linear(6, CLASSES), torch.nn.Linear(2, 2)

    def forward(self, inputs: torch.Tensor) -> Any:
        hidden = checkpoint(self.first, inputs, use_reentrant=False)
        for _ in range(2):
            hidden = checkpoint(self.block, hidden, use_reentrant=True)
        return self.head(hidden)


@dataclass
class Outputs:
    """The outputs of `SeveralOutputs`."""

    first: torch.Tensor
    rest: dict[str, tuple[torch.Tensor, ...]]


class SeveralOutputs(torch.nn.Module):
    """Has nested outputs. The loss uses a different output in each step, and never uses one of the outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = torch.nn.Linear(FEATURES, 6)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(6, CLASSES) for _ in range(4))

    def forward(self, inputs: torch.Tensor) -> Any:
        hidden = torch.tanh(self.trunk(inputs))
        first, *rest = [head(hidden) for head in self.heads]
        return Outputs(first, {"rest": tuple(rest)})


def _one_of_several(outputs: Outputs, step: int) -> torch.Tensor:
    return [outputs.first, *outputs.rest["rest"]][step % 3]


class Nested(torch.nn.Module):
    """Has modules and parameters in nested lists and dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"layers": torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))}) for _ in range(3)
        )
        self.scales = torch.nn.ParameterList(torch.nn.Parameter(torch.ones(4)) for _ in range(3))
        self.shifts = torch.nn.ParameterDict({"head": torch.nn.Parameter(torch.zeros(CLASSES))})
        self.head = torch.nn.Linear(12, CLASSES, bias=False)

    def forward(self, inputs: torch.Tensor) -> Any:
        outputs = []
        for tower, scale, part in zip(self.towers, self.scales, inputs.view(-1, 3, 4).unbind(1), strict=True):
            for layer in tower["layers"]:  # type: ignore[index]
                part = torch.tanh(layer(part))
            outputs.append(part * scale)
        return [[self.head(torch.cat(outputs, 1)) + self.shifts["head"]]]


_UNUSED = {"find_unused_parameters": True}
MODELS: dict[str, Model] = {
    "convolutional with batch norm": Model(Convolutional),
    "channels-last": Model(ChannelsLast),
    "transformer encoder": Model(Transformer),
    "lstm": Model(Recurrent),
    "mixture with unused experts": Model(Mixture, _UNUSED),
    "tied embeddings": Model(Tied),
    "sparse embedding": Model(SparseEmbedding, momentum=0.0),
    "checkpointed blocks": Model(Checkpointed, {"static_graph": True}),
    "several outputs": Model(SeveralOutputs, _UNUSED, prediction=_one_of_several),
    "nested lists": Model(Nested, prediction=lambda outputs, _: outputs[0][0]),
}
