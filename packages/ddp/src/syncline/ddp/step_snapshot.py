"""StepSnapshot: what a step changes on a rank before it is applied, so that it can be done again."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .module_state import first_of_each, writable


def holders_of_buffers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Those of its submodules that have a buffer now, itself among them."""
    return [part for part in module.modules() if next(part.buffers(recurse=False), None) is not None]


class StepSnapshot:
    """The buffers of a module and the random state of the CPU, as they are when a step begins.

    Parameters and the optimizer's state need none: they change only when the step is applied.

    Args:
        module: whose buffers.
        holders: `holders_of_buffers` of it, found once for all steps: to walk through hundreds of modules takes a millisecond.
    """

    def __init__(self, module: torch.nn.Module, holders: Iterable[torch.nn.Module]) -> None:
        self._module = module
        self._buffers = [
            (holder, name, buffer, buffer.detach().clone())
            for holder in holders
            for name, buffer in holder.named_buffers(recurse=False)
        ]
        self._random_state = torch.get_rng_state()

    @torch.no_grad()
    def restore(self) -> None:
        """Put them back, also where the step has put another tensor in a buffer's place; drop its gradients."""
        for holder, name, buffer, value in self._buffers:
            writable([buffer])[0].copy_(value[first_of_each(buffer)])
            setattr(holder, name, buffer)
        torch.set_rng_state(self._random_state)
        for parameter in self._module.parameters():
            parameter.grad = None
