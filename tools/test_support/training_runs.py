"""Small training runs that tests compare with each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

SHARE = 4  # the rows of a rank's part of a batch
VIEWS = [pytest.param(False, id="copied"), pytest.param(True, id="as-view")]


def make_data(steps: int, rows: int, shape: tuple[int, ...] = (5,)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(steps, rows, *shape, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(steps, rows, 3, generator=generator, dtype=torch.float64)


def loss_of(model: Callable[[torch.Tensor], torch.Tensor], inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(inputs), targets)


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def state(model: torch.nn.Module) -> list[torch.Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def train(
    model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> tuple[list[torch.Tensor], list[list[torch.Tensor]]]:
    """The trained state, and the gradients of every step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = []
    for step_inputs, step_targets in zip(inputs, targets, strict=True):
        optimizer.zero_grad()
        loss_of(model, step_inputs, step_targets).backward()  # type: ignore[no-untyped-call]
        history.append(gradients(model))
        optimizer.step()
    return state(model), history
