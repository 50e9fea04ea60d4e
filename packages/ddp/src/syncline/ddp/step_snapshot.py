"""Save the values that a step may change, so that the step can be repeated."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .module_state import first_of_each, put_buffer, writable
from .training_state import HookState, Stateful


class StepSnapshot:
    """A copy of the values that a step may change, made at the beginning of the step.

    The copy contains parameters, buffers, `requires_grad` of each parameter, `training` of each module, the random state of the
    CPU, the options of the optimizers' parameter groups, and the hook's error feedback. The states of optimizers change only in
    `optimizer.step()`, so they need no copy.

    Args:
        optimizers: the optimizers whose options are saved. If an optimizer has parameters of other modules, these parameters
            are saved, too.
        stateful: other objects that change with the steps, such as schedulers or a GradScaler.
        hook_state: the state of the communication hook. The error feedback in this state is saved.
        accumulated: parameters whose gradients are accumulated for a later `optimizer.step()`. These gradients are saved.
        earlier: the snapshot of the previous step. The new snapshot takes over the memory of `earlier`, so do not use `earlier`
            any more.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        stateful: Sequence[Stateful] = (),
        hook_state: Any = None,
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
        # Walk over the modules in each step (0.5 us for each module), because the script may have added modules.
        modules = list(module.modules())
        self._buffers = [(each, _buffers_of(each)) for each in modules]
        # A module of TorchScript that was frozen has no mode.
        self._training = [(each, each.training) for each in modules if hasattr(each, "training")]
        self._random_state = torch.get_rng_state()
        self._options = [
            (group, copy.deepcopy({name: value for name, value in group.items() if name != "params"}))
            for optimizer in optimizers
            for group in optimizer.param_groups
        ]
        self._states = [(each, copy.deepcopy(each.state_dict())) for each in stateful]
        # A backward that fails may already have replaced the hook's errors.
        self._hook_state = HookState(hook_state)
        if earlier is not None:
            earlier._hook_values = {}  # errors may be as large as the model, so never keep two copies of them
        self._hook_values: dict[str, Any] = self._hook_state.copy()
        # The script may have set gradients to None since the latest step.
        self._gradients = [(each, each.grad.detach().clone()) for each in accumulated if each.grad is not None]
        self._layouts = [(each, each.grad.layout) for each in stepped if each.grad is not None]

    @torch.no_grad()
    def restore(self) -> None:
        """Restore all saved values.

        A gradient that is not saved becomes None if it was None when the snapshot was made, and zeros otherwise.
        """
        for parameter, value, requires_grad in self._parameters:
            writable([parameter])[0].copy_(value[first_of_each(parameter)])
            parameter.requires_grad_(requires_grad)
            parameter.grad = None
        for holder, buffers in self._buffers:
            # `keys`, because a module of TorchScript has no plain dict here.
            for name in set(holder._buffers.keys()) - {buffer.name for buffer in buffers}:
                delattr(holder, name)
            for buffer in buffers:
                buffer.restore(holder)
        for part, is_training in self._training:
            part.training = is_training
        torch.set_rng_state(self._random_state)
        for each, state in self._states:
            # If the step ended between `scaler.unscale_()` and `scaler.update()`, the scaler remembers that it has unscaled the
            # gradients. The scaler's state_dict does not contain this memory, and only `update` clears it. `update` needs an
            # earlier `scale`.
            if isinstance(each, torch.amp.GradScaler):
                each.scale(torch.zeros((), device="cpu"))
                each.update(1.0)
            each.load_state_dict(copy.deepcopy(state))
        for group, options in self._options:
            group.update(options)
        self._hook_state.restore_errors(self._hook_values)
        for parameter in self._module.parameters():  # the step may have added parameters
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


@dataclass(frozen=True)
class _Buffer:
    """A buffer of a module, and a copy of its values. If the module has None as buffer, the buffer and the copy are None."""

    name: str
    is_persistent: bool
    tensor: torch.Tensor | None
    values: torch.Tensor | None

    def restore(self, holder: torch.nn.Module) -> None:
        if self.tensor is not None and self.values is not None:
            writable([self.tensor])[0].copy_(self.values[first_of_each(self.tensor)])
        # The step may have put another tensor in the buffer's place, or deleted the buffer.
        put_buffer(holder, self.name, self.tensor, persistent=self.is_persistent)


def _buffers_of(holder: torch.nn.Module) -> list[_Buffer]:
    return [
        _Buffer(
            name,
            name not in holder._non_persistent_buffers_set,
            tensor,
            None if tensor is None else tensor.detach().clone(),
        )
        for name, tensor in holder._buffers.items()
    ]
