"""StepSnapshot saves what a step changes before it is applied, so that the step can be repeated."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence

import torch

from .module_state import first_of_each, writable
from .training_state import Stateful


class StepSnapshot:
    """The parameters, buffers and modes of a module, the random state of the CPU, and other states at the beginning of a step.

    Parameters are copied, because a script may change them before `optimizer.step()`. For example, a momentum encoder changes
    them in its forward, and sharpness-aware minimisation changes them between two backwards. The states of optimizers need no
    copy, because they change only in `optimizer.step()`. The options of the parameter groups, such as the learning rate, need a
    copy, because a scheduler may change them. The modes are `requires_grad` of each parameter, and `training` of each module: a
    step that freezes a part of the model, or calls `eval()`, may end before the line that undoes this.

    Args:
        module: the module with the parameters and buffers.
        optimizers: the optimizers whose options are saved. If they have parameters of other modules, these are saved, too.
        stateful: other objects that change with the steps, such as schedulers or a GradScaler.
        accumulated: the parameters whose present gradients, if there are any, belong to an optimizer's step that is still to
            come.
        earlier: the snapshot of the previous step. It must not be used any more. The new snapshot takes over the memory of the
            previous snapshot, because new memory for the parameters would cost several times as much as the copy.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        stateful: Sequence[Stateful] = (),
        accumulated: Iterable[torch.nn.Parameter] = (),
        earlier: StepSnapshot | None = None,
    ) -> None:
        self._module = module
        kept = {} if earlier is None else {id(parameter): value for parameter, value, _ in earlier._parameters}
        stepped = {each: None for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]}
        with torch.no_grad():
            self._parameters: list[tuple[torch.nn.Parameter, torch.Tensor, bool]] = [
                (each, _copied(each, kept.get(id(each))), each.requires_grad)
                for each in {**dict.fromkeys(module.parameters()), **stepped}
            ]
        # Walk over the modules in each step (0.5 us for each module), because the script may have added some.
        modules = list(module.modules())
        self._buffers = [
            (holder, name, buffer, buffer.detach().clone())
            for holder in modules
            for name, buffer in holder.named_buffers(recurse=False)
        ]
        # A module of TorchScript that was frozen has no mode.
        self._training = [(each, each.training) for each in modules if hasattr(each, "training")]
        self._random_state = torch.get_rng_state()
        self._options = [
            (group, copy.deepcopy({name: value for name, value in group.items() if name != "params"}))
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        self._states = [(each, copy.deepcopy(each.state_dict())) for each in stateful]
        # The script may have set gradients to None since the latest step.
        self._gradients = [(each, each.grad.detach().clone()) for each in accumulated if each.grad is not None]
        self._layouts = [(each, each.grad.layout) for each in stepped if each.grad is not None]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all values that the snapshot has saved. All other gradients become zeros, or None if they were None."""
        for parameter, value, requires_grad in self._parameters:
            writable([parameter])[0].copy_(value[first_of_each(parameter)])
            parameter.requires_grad_(requires_grad)
            parameter.grad = None
        for holder, name, buffer, value in self._buffers:
            # Put the old buffer back, too, because the step may have put another tensor in the buffer's place.
            writable([buffer])[0].copy_(value[first_of_each(buffer)])
            setattr(holder, name, buffer)
        for part, is_training in self._training:
            part.training = is_training
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
        for parameter in self._module.parameters():  # the step may have added some
            parameter.grad = None
        # An optimizer has used these gradients already, so the step begins by clearing them. If the step clears them to zeros,
        # an optimizer with momentum still moves the parameters. If a gradient is None, an optimizer does not move its
        # parameter.
        for parameter, layout in self._layouts:
            parameter.grad = torch.zeros_like(parameter, layout=layout)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient.clone()  # a copy, so that the snapshot can be restored again


def _copied(parameter: torch.nn.Parameter, memory: torch.Tensor | None) -> torch.Tensor:
    if memory is None or memory.shape != parameter.shape or memory.dtype != parameter.dtype:
        return parameter.detach().clone()
    return memory.copy_(parameter)
