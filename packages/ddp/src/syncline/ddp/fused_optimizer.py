"""Run users' hooks and optimizers in backward, as soon as a gradient is averaged."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils.hooks import RemovableHandle

from syncline.collectives import InvalidArgumentError, InvalidTypeError, MisuseError
from syncline.reducer import is_worth_a_look

from .torch_internals import IN_BACKWARD_OPTIMIZERS, IN_BACKWARD_OPTIMIZERS_MODULE

AverageHook: TypeAlias = Callable[[torch.nn.Parameter], object]


class AverageHooks:
    """Runs users' hooks on averaged gradients, in the order of registration. Then runs the fused optimizer."""

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = optimizer
        # `RemovableHandle` refers to the dict weakly, which a plain dict does not allow.
        self._hooks: OrderedDict[int, AverageHook] = OrderedDict()

    def add(self, hook: AverageHook) -> RemovableHandle:
        """Register a hook. Return a handle, whose `remove()` removes the hook."""
        if not callable(hook):
            raise InvalidTypeError(f"expected a function hook(parameter), found {type(hook).__name__}")
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = hook
        return handle

    def __call__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Call the hooks for these parameters, then run the parameters' optimizers. The gradients must be averaged."""
        if self._hooks:
            for parameter in parameters:
                for hook in tuple(self._hooks.values()):
                    hook(parameter)
        self._optimizer.step(parameters)


class FusedOptimizer:
    """Calls the optimizers of each parameter as soon as its gradient is averaged, while later buckets are being reduced.

    Attributes:
        optimizers: for each parameter, a list of its optimizers.
    """

    def __init__(self) -> None:
        self.optimizers: dict[torch.nn.Parameter, list[torch.optim.Optimizer]] = {}
        # The optimizers that `adopt` has found. A copy, because torch changes its own list.
        self._adopted: dict[torch.nn.Parameter, list[torch.optim.Optimizer]] = {}

    def register(
        self, kind: type[torch.optim.Optimizer], parameters: Iterable[torch.nn.Parameter], *args: Any, **kwargs: Any
    ) -> None:
        """Make an optimizer `kind([parameter], *args, **kwargs)` for each parameter.

        Raises:
            MisuseError: a parameter already has an optimizer here.
            InvalidArgumentError: `kind` is not a class of optimizers.
        """
        # A script without types may pass anything.
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):  # type: ignore[redundant-expr]
            raise InvalidArgumentError(f"expected a class of torch.optim.Optimizer, found {kind!r}")
        chosen = list(parameters)
        if any(parameter in self.optimizers for parameter in chosen):
            raise MisuseError("a parameter has a fused optimizer already: name other parameters in optim_params")
        self.optimizers.update({parameter: [kind([parameter], *args, **kwargs)] for parameter in chosen})

    def adopt(self, parameters: Iterable[torch.nn.Parameter], reductions: int) -> None:
        """Take over the optimizers that torch's `_apply_optimizer_in_backward` has attached to the parameters.

        Call this method in each forward with gradients. `reductions` is the number of backwards that have averaged gradients so
        far. As in torch, `parameter.grad` becomes None after the parameter's step.
        """
        # A look at all parameters costs 0.05 us for each of them. Without torch's module, optimizers can only come with
        # parameters that were unpickled, so look seldom.
        if IN_BACKWARD_OPTIMIZERS_MODULE not in sys.modules and not is_worth_a_look(reductions):
            return
        for parameter in parameters:
            attached = getattr(parameter, IN_BACKWARD_OPTIMIZERS, None)
            # No optimizer is attached, or none is new since the last look. A new optimizer has a hook, which is taken off
            # below.
            if attached is None or attached == self._adopted.get(parameter):
                continue
            if parameter in self._adopted or parameter not in self.optimizers:
                _take_off_hooks(parameter)
                self.optimizers[parameter] = attached
                self._adopted[parameter] = list(attached)

    def step(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Run the registered and adopted optimizers of these parameters. The parameters' gradients must be averaged."""
        if not self.optimizers:  # the usual case; looking up each parameter would take as long as copying its gradient
            return
        for parameter in parameters:
            for optimizer in self.optimizers.get(parameter, ()):
                optimizer.step()
            if parameter in self._adopted:
                parameter.grad = None


def _take_off_hooks(parameter: torch.nn.Parameter) -> None:
    # Imported here, because the import is slow. If a parameter has such optimizers, the script has imported the module already.
    from torch.distributed.optim import apply_optimizer_in_backward

    for handle in apply_optimizer_in_backward.param_to_optim_hook_handle_map.get(parameter, ()):  # type: ignore[no-untyped-call]
        handle.remove()
