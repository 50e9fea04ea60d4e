"""TrainingState: what a rank needs to go on with a training that others have begun."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from .distributed_data_parallel import DistributedDataParallel
from .elastic_sampler import ElasticSampler

logger = logging.getLogger("syncline.ddp")


class TrainingState:
    """Model, optimizers, sampler, random state of the CPU and state of the communication hook, as one object to send.

    Args:
        model: its parameters and buffers, and its hook.
        optimizers: in the same order on all ranks.
        sampler: where the epoch is.
    """

    def __init__(
        self, model: DistributedDataParallel, optimizers: Sequence[torch.optim.Optimizer], sampler: ElasticSampler
    ) -> None:
        self._model = model
        self._optimizers = optimizers
        self._sampler = sampler

    def collect(self) -> dict[str, Any]:
        """That of this rank; its tensors are those in use."""
        hook = self._hook_state()
        return {
            "model": self._model.module.state_dict(),
            "buffers": dict(self._model.module.named_buffers()),  # the state_dict has only those that are persistent
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "sampler": self._sampler.state_dict(),
            "random": torch.get_rng_state(),
            "hook": None if hook is None else _without_errors(hook.state_dict()),
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Take that of another rank."""
        self._model.module.load_state_dict(state["model"])
        for name, buffer in self._model.module.named_buffers():
            buffer.copy_(state["buffers"][name])
        for optimizer, its in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(its)
        self._sampler.load_state_dict(state["sampler"])
        torch.set_rng_state(state["random"])
        hook = self._hook_state()
        if hook is not None and state["hook"] is not None:
            hook.load_state_dict(state["hook"])
            logger.info("the hook's state is that of the others; what its error feedback has kept begins at zero")

    def _hook_state(self) -> Any:
        _, state = self._model.communication_hook
        return state if hasattr(state, "state_dict") and hasattr(state, "load_state_dict") else None


def _without_errors(state: dict[str, Any]) -> dict[str, Any]:
    """A saved state of `syncline.hooks`, good for any rank of any number of ranks: errors are each rank's own."""
    if "errors" not in state:
        return state
    zeros = {name: torch.zeros_like(error) for name, error in state["errors"].items()}
    return {**state, "errors": zeros, "rank": None, "world_size": None}
