"""An optimizer that averages the model after some of its steps."""

from __future__ import annotations

from typing import Any

import torch

from syncline.collectives import MisuseError

from .model_averaging import ModelAverager
from .wrapping_optimizer import WrappingOptimizer


class PostLocalSGDOptimizer(WrappingOptimizer):
    """An optimizer that steps a local optimizer, and averages the replicas after some of the steps.

    Use this optimizer together with `post_localSGD_hook`.

    The averager's `warmup_steps` must be equal to `start_localSGD_iter` of the `PostLocalSGDState`.

    Args:
        optim: the local optimizer, which changes only this rank's replica.
        averager: decides after which steps the replicas are averaged.
    """

    def __init__(self, optim: torch.optim.Optimizer, averager: ModelAverager) -> None:
        super().__init__(optim)
        self.averager = averager

    def __repr__(self) -> str:
        return repr(self.optim)

    def state_dict(self) -> dict[str, Any]:
        """Return the local optimizer's state, with the averager's `step` under the additional key "step"."""
        return {**self.optim.state_dict(), "step": self.averager.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state of the local optimizer, and the averager's `step`.

        Raises:
            MisuseError: the state has no "step". (torch gives a warning and starts the warm-up again.)
        """
        if "step" not in state_dict:
            raise MisuseError(
                'expected the state of a PostLocalSGDOptimizer, found none with the averager\'s "step"; load it into the local '
                "optimizer, and set averager.step"
            )
        self.optim.load_state_dict({name: value for name, value in state_dict.items() if name != "step"})
        self.averager.step = state_dict["step"]

    def step(self, closure: Any = None) -> Any:
        """Step the local optimizer, then average the replicas if an average is due. Every rank must call `step`."""
        loss = self.optim.step(closure)
        self.averager.average_parameters(self.param_groups)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Call the local optimizer's `add_param_group`."""
        self.optim.add_param_group(param_group)
