"""StepSnapshot: what a step changes on a rank before it is applied, so that it can be done again."""

from __future__ import annotations

import torch


class StepSnapshot:
    """The buffers of a module and the random state of the CPU, as they are when a step begins.

    Parameters and the optimizer's state need none: they change only when the step is applied.

    Args:
        module: whose buffers.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
        self._random_state = torch.get_rng_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back, and drop what gradients the step has made."""
        for buffer, value in self._buffers:
            buffer.copy_(value)
        torch.set_rng_state(self._random_state)
        for parameter in self._module.parameters():
            parameter.grad = None
