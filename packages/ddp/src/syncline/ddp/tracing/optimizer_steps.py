"""Record when steps of optimizers begin and end."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from .events import OptimizerEvent


class OptimizerSteps:
    """Records when optimizers step, from construction until `stop`.

    Args:
        parameters: the parameters of a model. An optimizer is recorded if its first parameter is among them.
    """

    def __init__(self, parameters: Collection[torch.Tensor]) -> None:
        self._ids = {id(parameter) for parameter in parameters}
        self._began: dict[int, float] = {}
        self._seen: list[OptimizerEvent] = []
        self._handles = register_optimizer_step_pre_hook(self._begin), register_optimizer_step_post_hook(self._end)

    def take(self) -> tuple[OptimizerEvent, ...]:
        """Return the optimizer steps since the last `take`."""
        seen, self._seen = self._seen, []
        return tuple(seen)

    def stop(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # A parameter group may be empty, for example if a part of the model has no parameters.
        first = next((parameter for group in optimizer.param_groups for parameter in group["params"]), None)
        if id(first) in self._ids:
            self._began[id(optimizer)] = time.perf_counter()

    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        began = self._began.pop(id(optimizer), None)
        if began is not None:
            self._seen.append(OptimizerEvent(type(optimizer).__name__, began, time.perf_counter()))
