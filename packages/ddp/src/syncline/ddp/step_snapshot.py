"""StepSnapshot saves a module's buffers and the random state at the beginning of a step, so that the step can be repeated."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .module_state import first_of_each, writable


def holders_of_buffers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the submodules (and the module itself) that directly hold at least one buffer now."""
    return [part for part in module.modules() if next(part.buffers(recurse=False), None) is not None]


class StepSnapshot:
    """The buffers of a module and the random state of the CPU at the beginning of a step.

    Parameters and the optimizer's state need no copy, because they change only in `optimizer.step()`.

    Args:
        module: the module with the buffers.
        holders: the result of `holders_of_buffers(module)`. The caller keeps this list for all steps, because a walk over
            hundreds of modules takes a millisecond.
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
        """Give the buffers and the random state their earlier values, and drop the gradients."""
        for holder, name, buffer, value in self._buffers:
            # Put the old buffer back, too, because the step may have put another tensor in the buffer's place.
            writable([buffer])[0].copy_(value[first_of_each(buffer)])
            setattr(holder, name, buffer)
        torch.set_rng_state(self._random_state)
        for parameter in self._module.parameters():
            parameter.grad = None
