"""One contender: a module, its optimizer, and a step of training on a fixed batch."""

from __future__ import annotations

import time

import torch

from .cases import Case
from .timing import Phases


class Trainer:
    """Trains `module` on `batch`.

    Args:
        module: the case's model, synchronised in some way or not at all.
        case: defines the loss.
        batch: this rank's batch.
    """

    def __init__(self, module: torch.nn.Module, case: Case, batch: torch.Tensor) -> None:
        self.module = module
        self._loss = case.loss
        self._batch = batch
        self._optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)

    def step(self) -> Phases:
        """Forward, backward, optimizer."""
        started = time.perf_counter()
        loss = self._loss(self.module(self._batch), self._batch)
        forward_ended = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        backward_ended = time.perf_counter()
        self._optimizer.step()
        self._optimizer.zero_grad()
        ended = time.perf_counter()
        return Phases(forward_ended - started, backward_ended - forward_ended, ended - backward_ended)
