"""StepSnapshot saves what a step changes before it is applied, so that the step can be repeated."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch

from .module_state import first_of_each, writable
from .training_state import Stateful


def holders_of_buffers(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the submodules (and the module itself) that directly hold at least one buffer now."""
    return [part for part in module.modules() if next(part.buffers(recurse=False), None) is not None]


class StepSnapshot:
    """The buffers of a module, the random state of the CPU, and the states of other objects at the beginning of a step.

    Parameters and the optimizers' states need no copy, because they change only in `optimizer.step()`. The options of the
    optimizers' groups, such as the learning rate, need a copy: a scheduler may change them.

    Args:
        module: the module with the buffers.
        holders: the result of `holders_of_buffers(module)`. The caller keeps this list for all steps, because a walk over
            hundreds of modules takes a millisecond.
        optimizers: the optimizers whose options are saved.
        stateful: other objects that change with the steps, such as schedulers or a GradScaler.
        accumulated: the parameters whose present gradients, if there are any, belong to an optimizer's step that is still to
            come.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        holders: Iterable[torch.nn.Module],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        stateful: Sequence[Stateful] = (),
        accumulated: Iterable[torch.nn.Parameter] = (),
    ) -> None:
        self._module = module
        self._buffers = [
            (holder, name, buffer, buffer.detach().clone())
            for holder in holders
            for name, buffer in holder.named_buffers(recurse=False)
        ]
        self._random_state = torch.get_rng_state()
        self._options = [
            (group, copy.deepcopy({name: value for name, value in group.items() if name != "params"}))
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        self._states = [(each, copy.deepcopy(each.state_dict())) for each in stateful]
        # The script may have set gradients to None since the latest step.
        self._gradients = [(each, each.grad.detach().clone()) for each in accumulated if each.grad is not None]

    @torch.no_grad()
    def restore(self) -> None:
        """Give everything that the snapshot holds its earlier value, and drop all other gradients."""
        for holder, name, buffer, value in self._buffers:
            # Put the old buffer back, too, because the step may have put another tensor in the buffer's place.
            writable([buffer])[0].copy_(value[first_of_each(buffer)])
            setattr(holder, name, buffer)
        torch.set_rng_state(self._random_state)
        for each, state in self._states:
            # If the step ended between `scaler.unscale_()` and `scaler.update()`, the scaler remembers that it has unscaled the
            # gradients. This is not part of its state_dict, and only `update` forgets it. `update` needs an earlier `scale`.
            if isinstance(each, torch.amp.GradScaler):
                each.scale(torch.zeros(()))
                each.update(1.0)
            each.load_state_dict(copy.deepcopy(state))
        for group, options in self._options:
            group.update(options)
        for parameter in self._module.parameters():
            parameter.grad = None
        for parameter, gradient in self._gradients:
            parameter.grad = gradient.clone()  # a copy, so that the snapshot can be restored again
