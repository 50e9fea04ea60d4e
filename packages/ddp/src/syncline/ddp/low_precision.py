"""LowPrecision runs a module with casts of its parameters to another dtype; see `MixedPrecision.param_dtype`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from syncline.collectives import MisuseError
from syncline.collectives.internal import bytes_of, disable_dynamo, disable_dynamo_here, in_plain_order

from .outputs import tensors_in
from .torch_internals import (
    call_at_end_of_backward,
    cast_inputs,
    check_low_precision,
    own_parameters,
    refresh_flat_weights,
    was_written,
)

Tensors = Sequence["torch.Tensor | None"]


class LowPrecision:
    """Runs a module in another dtype than its parameters have.

    Note [Casts in the places of parameters]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    During a forward the module's attributes hold casts of its parameters. Each cast is a differentiable function of its
    parameter. So gradients reach the parameters through the casts, and have the parameters' own dtype. Reducer and optimizer
    see only this dtype. Outside of the module's own computation, `module.parameters()` returns the parameters.

    Backward computes with the module, too: a checkpoint runs a part of the forward again. So when backward reaches an output of
    a forward, the module's attributes get the casts of this forward again, and keep them until this backward ends. A callback
    at the end of backward removes the casts. If the backward fails, autograd drops this callback without calling it. So the
    casts are also removed when the callback is dropped.

    Note [Forwards that write into parameters]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    A forward may write to a parameter, for example in a momentum encoder, in an initialisation from the first batch, or in
    an embedding with `max_norm`. This write goes to the cast. So after the forward, the changed elements of a cast are
    copied to its parameter. The other elements are not copied, because a copy from the cast would round them. Most casts
    need no check. A cast is checked only if its version has changed, or if code has read `cast.data`, a tensor with another
    version counter.

    Args:
        module: the module.
        parameters: the parameters to cast, with their names. Parameters that are not floating point are not cast.
        dtype: the dtype of the computation. Floating point inputs are cast to this dtype.

    Raises:
        MisuseError: this version of torch lacks private parts that this class needs. See `torch_internals`.
    """

    def __init__(
        self, module: torch.nn.Module, parameters: Iterable[tuple[str, torch.nn.Parameter]], dtype: torch.dtype
    ) -> None:
        check_low_precision(list(module.modules()))
        self._module = module
        self._dtype = dtype
        # A parameter that already has the dtype needs no cast: forward finds the parameter itself.
        chosen = [(name, p) for name, p in parameters if p.is_floating_point() and p.dtype is not dtype]
        self._names = [name for name, _ in chosen]
        self._parameters = [parameter for _, parameter in chosen]
        self._has_warned = False
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

    # A compiler gets only the module, as in DistributedDataParallel.forward.
    @disable_dynamo_here
    def __call__(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module in the lower dtype and return its outputs.

        Raises:
            MisuseError: the forward has replaced a parameter by another tensor.
        """
        inputs, kwargs = cast_inputs(self._dtype, inputs, kwargs)
        casts = self._casts()
        before = self._put([casts[index] for _, _, index in self._places])
        left = before
        try:
            outputs = self._module(*inputs, **kwargs)
        finally:
            left = self._put(before)
        self._keep_what_was_written(casts, left)
        for output in tensors_in(outputs):
            if output.grad_fn is not None:
                output.register_hook(lambda _: self._enter_backward(casts))  # type: ignore[no-untyped-call]
        return outputs

    def _casts(self) -> list[_Cast]:
        if torch.is_inference_mode_enabled():  # a tensor made in this mode has no version
            with torch.inference_mode(False), torch.no_grad():
                return [_cast(parameter, self._dtype) for parameter in self._parameters]
        return [_cast(parameter, self._dtype) for parameter in self._parameters]

    @disable_dynamo
    def _keep_what_was_written(self, casts: Sequence[_Cast], left: Tensors) -> None:
        """Copy to the parameters what the forward has written into casts. See Note [Forwards that write into parameters].

        Args:
            casts: the casts of this forward.
            left: the tensors that the module's attributes have after the forward.
        """
        for (_, _, index), tensor in zip(self._places, left, strict=True):
            if tensor is not casts[index]:
                raise MisuseError(
                    f"forward puts another tensor in the place of parameter '{self._names[index]}', which mixed_precision "
                    "would lose: write into the parameter (copy_), or use torch.autocast in place of mixed_precision"
                )
        for name, parameter, cast in zip(self._names, self._parameters, casts, strict=True):
            if (cast.was_data_asked_for or was_written(cast)) and _write_changes(parameter, cast):
                self._warn_of_rounding(name)

    def _warn_of_rounding(self, name: str) -> None:
        # Warn only once, not in each step.
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"forward writes into parameter '{name}', which mixed_precision rounds to {self._dtype}: small changes, such as "
            "those of a momentum encoder, are lost in it. Write after the optimizer's step, outside of forward, or use "
            "torch.autocast, which leaves parameters in full precision",
            stacklevel=5,
        )

    def _enter_backward(self, casts: Sequence[torch.Tensor]) -> None:
        """Put the casts into the module for this backward.

        Autograd calls this method before it uses the gradient of an output.
        """
        # Another output of the same backward has put the casts in place already.
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
        """Put a tensor into each of the module's attributes for parameters, and return the tensors that were there before."""
        before = [parameters[name] for parameters, name, _ in self._places]
        for (parameters, name, _), tensor in zip(self._places, tensors, strict=True):
            parameters[name] = tensor  # as torch.func.functional_call does
        for part in self._recurrent:  # a recurrent layer keeps its own list of parameters
            refresh_flat_weights(part)
        return before


class _Cast(torch.nn.Parameter):
    """A cast that the module has in place of a parameter.

    A cast notes whether code has read or set `data`, because this code may have changed the cast.
    """

    was_data_asked_for = False

    @property
    def data(self) -> torch.Tensor:
        self.was_data_asked_for = True
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]  # it is a descriptor

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        self.was_data_asked_for = True
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]


def _cast(parameter: torch.nn.Parameter, dtype: torch.dtype) -> _Cast:
    cast = parameter.to(dtype)
    cast.__class__ = _Cast  # `as_subclass` would add a node to the graph
    assert isinstance(cast, _Cast)
    return cast


@torch.no_grad()
def _write_changes(parameter: torch.nn.Parameter, cast: torch.Tensor) -> bool:
    """If elements of a cast differ from a new cast of the parameter, copy these elements to the parameter.

    Return whether any bit differs.
    """
    written, unwritten = cast.detach(), parameter.detach().to(cast.dtype)
    if torch.equal(bytes_of(in_plain_order(written)), bytes_of(in_plain_order(unwritten))):
        return False
    written, unwritten = written.to(parameter.dtype), unwritten.to(parameter.dtype)
    is_same = (written == unwritten) | (written.isnan() & unwritten.isnan())
    parameter.copy_(torch.where(is_same, parameter, written))
    return True


class _Once:
    """Runs an action once: when this object is called, or when the last reference to this object is dropped."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action

    def __call__(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()

    def __del__(self) -> None:
        self()
