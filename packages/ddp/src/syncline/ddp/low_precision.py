"""Run a module with its parameters cast to another dtype."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from syncline.collectives import MisuseError
from syncline.collectives.internal import bytes_of, disable_dynamo, disable_dynamo_here, in_plain_order

from .module_state import ModuleState
from .outputs import tensors_in
from .torch_internals import (
    call_at_end_of_backward,
    cast_inputs,
    check_low_precision,
    current_backward,
    own_parameters,
    refresh_flat_weights,
    was_written,
)

Tensors = Sequence["torch.Tensor | None"]

_entering = threading.Lock()  # two threads may run parts of one backward


class _Found(NamedTuple):
    """The parameters of a module that need a cast in a forward."""

    parameters: list[torch.Tensor]
    places: list[tuple[dict[str, Any], str, int]]
    """For each attribute: the dict that holds it, its name, and the parameter's position in `parameters`.

    A shared parameter has several attributes.
    """
    recurrent: list[torch.nn.RNNBase]

    @disable_dynamo
    def put(self, tensors: Tensors) -> Tensors:
        """Put a tensor into each of the attributes, and return the tensors that were there before.

        In the argument and in the result, None stands for a missing attribute.
        """
        before = [holder.get(name) for holder, name, _ in self.places]
        for (holder, name, _), tensor in zip(self.places, tensors, strict=True):
            if tensor is None:
                holder.pop(name, None)
            else:
                holder[name] = tensor  # as torch.func.functional_call does
        for layer in self.recurrent:  # a recurrent layer keeps its own list of parameters
            refresh_flat_weights(layer)
        return before


class LowPrecision:
    """Runs a module in a dtype that differs from the dtype of its parameters.

    Note [Casts in the places of parameters]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    During a forward, the module's attributes hold casts of its parameters. Gradients flow through the casts to the parameters,
    and have the parameters' own dtype. Reducer and optimizer see only this dtype. Each forward lists the parameters again,
    because the script may have changed the module.

    Backward also computes with the module, because a checkpoint runs a part of the forward again. So when backward reaches an
    output of a forward, the attributes get the casts of this forward again. A callback at the end of backward removes the
    casts. If the backward fails, autograd drops this callback without calling it. So the casts are also removed when the
    callback is dropped.

    Note [Forwards that write into parameters]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    A forward may write to a parameter, for example in an embedding with `max_norm`. This write goes to the cast. So after the
    forward, the changed elements of a cast are copied to its parameter. If the other elements were copied, too, their values
    would be rounded. A cast is compared with its parameter only in two cases: the cast's version has changed, or code has read
    `cast.data`. (Writes to `cast.data` do not change the version.)

    Args:
        state: the state of the module to run. All floating point parameters are cast, except ignored parameters.
        dtype: the dtype of the computation. Floating point inputs are cast to this dtype.

    Raises:
        MisuseError: this version of torch lacks private parts that are necessary. Or the module has a ScriptModule with
            parameters to cast.
    """

    def __init__(self, state: ModuleState, dtype: torch.dtype) -> None:
        check_low_precision(list(state.module.modules()))
        _refuse_scripts(state)
        self._state = state
        self._dtype = dtype
        self._has_warned = False
        self._backward: tuple[int, int] | None = None  # the backward that has put casts in place, and its thread
        self._threads_inside: list[int] = []  # the thread of each forward or backward that runs now

    # A compiler gets only the module, as in DistributedDataParallel.forward.
    @disable_dynamo_here
    def __call__(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module in the lower dtype and return its outputs.

        Raises:
            MisuseError: the forward has replaced a parameter by another tensor. Or another thread runs the module now.
        """
        inputs, kwargs = cast_inputs(self._dtype, inputs, kwargs)
        thread = self._begin("forward")
        try:
            found = self._look()
            casts = self._cast_all(found.parameters)
            in_place = [casts[index] for _, _, index in found.places]
            left = before = found.put(in_place)
            try:
                outputs = self._state.module(*inputs, **kwargs)
            finally:
                left = found.put(before)
        finally:
            self._threads_inside.remove(thread)
        self._keep_what_was_written(found, casts, left)
        for output in tensors_in(outputs):
            if output.grad_fn is not None:
                output.register_hook(lambda _: self._enter_backward(found, in_place))  # type: ignore[no-untyped-call]
        return outputs

    @disable_dynamo
    def _begin(self, what: str) -> int:
        """Record that this thread uses the module's attributes, and return the thread's number.

        Only one thread may use the attributes at a time.
        """
        thread = threading.get_ident()
        self._threads_inside.append(thread)
        if any(other != thread for other in list(self._threads_inside)):
            self._threads_inside.remove(thread)
            raise MisuseError(
                f"two threads run a module with mixed_precision at once (this one a {what}): let one thread run it at a time, "
                "or use torch.autocast, which changes nothing in the module"
            )
        return thread

    @disable_dynamo
    def _look(self) -> _Found:
        ignored = self._state.ignored_parameters()
        index_of: dict[int, int] = {}
        found = _Found([], [], [])
        for part in self._state.module.modules():
            if isinstance(part, torch.nn.RNNBase):
                found.recurrent.append(part)
            holder = own_parameters(part)
            for name, tensor in holder.items():
                # A tensor that already has the dtype needs no cast: forward finds the tensor itself.
                if tensor is None or not tensor.is_floating_point() or tensor.dtype is self._dtype or id(tensor) in ignored:
                    continue
                index = index_of.setdefault(id(tensor), len(index_of))
                if index == len(found.parameters):
                    found.parameters.append(tensor)
                found.places.append((holder, name, index))
        return found

    @disable_dynamo  # a compiler would compile the cast anew for each shape
    def _cast_all(self, parameters: Sequence[torch.Tensor]) -> list[_Cast]:
        if torch.is_inference_mode_enabled():  # a tensor made in this mode has no version
            with torch.inference_mode(False), torch.no_grad():
                return [_cast(parameter, self._dtype) for parameter in parameters]
        return [_cast(parameter, self._dtype) for parameter in parameters]

    def _name(self, parameter: torch.Tensor) -> str:
        return next((name for name, known in self._state.parameters() if known is parameter), "?")

    @disable_dynamo
    def _keep_what_was_written(self, found: _Found, casts: Sequence[_Cast], left: Tensors) -> None:
        """Copy to the parameters what the forward has written into casts. See Note [Forwards that write into parameters].

        `left` are the tensors in the attributes after the forward.
        """
        for (_, _, index), tensor in zip(found.places, left, strict=True):
            if tensor is not casts[index]:
                raise MisuseError(
                    f"forward puts another tensor in the place of parameter '{self._name(found.parameters[index])}', which "
                    "mixed_precision would lose: write into the parameter (copy_), or use torch.autocast in place of "
                    "mixed_precision"
                )
        for parameter, cast in zip(found.parameters, casts, strict=True):
            if (cast.was_data_asked_for or was_written(cast)) and _write_changes(parameter, cast):
                self._warn_of_rounding(parameter)

    def _warn_of_rounding(self, parameter: torch.Tensor) -> None:
        # Warn only once, not in each step.
        if self._has_warned:
            return
        self._has_warned = True
        warnings.warn(
            f"forward writes into parameter '{self._name(parameter)}', which mixed_precision rounds to {self._dtype}: small "
            "changes, such as those of a momentum encoder, are lost in it. Write after the optimizer's step, outside of "
            "forward, or use torch.autocast, which leaves parameters in full precision",
            stacklevel=5,
        )

    def _enter_backward(self, found: _Found, casts: Tensors) -> None:
        """Put the casts into the module's attributes until the running backward ends.

        Autograd calls this method before it uses the gradient of an output.
        """
        thread, backward = threading.get_ident(), current_backward()
        with _entering:
            # Another output of this backward, or a backward around this one, has put the casts in place already.
            if self._backward is not None and (backward == self._backward[0] or thread == self._backward[1]):
                return
            self._begin("backward")
            try:
                before = found.put(casts)
            except BaseException:
                self._threads_inside.remove(thread)
                raise
            self._backward = backward, thread

        def leave() -> None:
            found.put(before)
            self._backward = None
            self._threads_inside.remove(thread)

        call_at_end_of_backward(_Once(leave))


def _refuse_scripts(state: ModuleState) -> None:
    ignored = state.ignored_parameters()
    for name, part in state.module.named_modules():
        if isinstance(part, torch.jit.ScriptModule) and any(id(p) not in ignored for p in part.parameters(recurse=False)):
            raise MisuseError(
                f"layer '{name}' is a ScriptModule, whose parameters mixed_precision cannot replace: use torch.autocast, or "
                "leave the layer unscripted"
            )


class _Cast(torch.nn.Parameter):
    """A cast in the place of a parameter. The cast records whether code has used `data`, which may change the cast."""

    was_data_asked_for = False

    @property
    def data(self) -> torch.Tensor:
        self.was_data_asked_for = True
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]  # it is a descriptor

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        self.was_data_asked_for = True
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]


def _cast(parameter: torch.Tensor, dtype: torch.dtype) -> _Cast:
    cast = parameter.to(dtype)
    cast.__class__ = _Cast  # `as_subclass` would add a node to the graph
    assert isinstance(cast, _Cast)
    return cast


@torch.no_grad()
def _write_changes(parameter: torch.Tensor, cast: torch.Tensor) -> bool:
    """Copy elements from `cast` to `parameter` if the forward has changed them. Return whether there are such elements."""
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
