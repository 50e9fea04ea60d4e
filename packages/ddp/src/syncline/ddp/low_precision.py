"""A module that computes with casts of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from syncline.collectives.internal import disable_dynamo, disable_dynamo_here

from .outputs import tensors_in
from .torch_internals import call_at_end_of_backward, cast_inputs, check_low_precision, own_parameters, refresh_flat_weights

Tensors = Sequence["torch.Tensor | None"]


class LowPrecision:
    """Runs a module in another dtype than that of its parameters.

    Note [Casts in the places of parameters]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    For the time of a forward the module's attributes hold casts of its parameters, each a function of its parameter. So
    gradients reach the parameters through the casts, in the parameters' own dtype, and neither reducer nor optimizer knows of
    another. Everywhere outside the module's own computations `module.parameters()` are the parameters.

    Backward computes with the module, too: a checkpoint runs a part of it again. So the casts of a forward are put back in
    place when backward comes to one of its outputs, and stay until that backward ends. If it fails, autograd drops the
    callback without calling it, and so the callback undoes its work when it is dropped.

    Args:
        module: the module.
        parameters: those to cast; others stay. Those that are not of floating point stay, too.
        dtype: what to compute in; inputs of floating point are cast to it.

    Raises:
        MisuseError: this version of torch lacks what it needs; see `torch_internals`.
    """

    def __init__(self, module: torch.nn.Module, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
        check_low_precision(list(module.modules()))
        self._module = module
        self._dtype = dtype
        self._parameters = [parameter for parameter in parameters if parameter.is_floating_point()]
        index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        # A shared parameter has several places.
        self._places = [
            (own_parameters(part), name, index_of[id(parameter)])
            for part in module.modules()
            for name, parameter in own_parameters(part).items()
            if id(parameter) in index_of
        ]
        self._recurrent = [part for part in module.modules() if isinstance(part, torch.nn.RNNBase)]
        self._is_in_backward = False

    # A compiler gets the module, as in DistributedDataParallel.forward.
    @disable_dynamo_here
    def __call__(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module; its outputs are what it makes of inputs and parameters in that dtype."""
        inputs, kwargs = cast_inputs(self._dtype, inputs, kwargs)
        casts = [parameter.to(self._dtype) for parameter in self._parameters]
        before = self._put([casts[index] for _, _, index in self._places])
        try:
            outputs = self._module(*inputs, **kwargs)
        finally:
            self._put(before)
        for output in tensors_in(outputs):
            if output.grad_fn is not None:
                output.register_hook(lambda _: self._enter_backward(casts))  # type: ignore[no-untyped-call]
        return outputs

    def _enter_backward(self, casts: Sequence[torch.Tensor]) -> None:
        """Called by autograd, when the gradient of an output is known and before it is used."""
        if self._is_in_backward:
            return
        self._is_in_backward = True
        before = self._put([casts[index] for _, _, index in self._places])

        def leave() -> None:
            self._put(before)
            self._is_in_backward = False

        call_at_end_of_backward(_Once(leave))

    @disable_dynamo
    def _put(self, tensors: Tensors) -> Tensors:
        """Put a tensor in each place; returns those that were there."""
        before = [parameters[name] for parameters, name, _ in self._places]
        for (parameters, name, _), tensor in zip(self._places, tensors, strict=True):
            parameters[name] = tensor  # as torch.func.functional_call does
        for part in self._recurrent:  # they keep a list of their own
            refresh_flat_weights(part)
        return before


class _Once:
    """Does something when it is called, or else when nobody can call it any more."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def __call__(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()

    def __del__(self) -> None:
        self()
