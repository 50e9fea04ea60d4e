"""Detect changes of the wrapped module's parameters, after which other gradients must be averaged."""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from syncline.collectives.internal import disable_dynamo
from syncline.reducer import is_worth_a_look

from .module_state import ModuleState
from .torch_internals import given_to_functional_call, own_children, own_parameters

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_requires_grad_of = operator.attrgetter("requires_grad")


class ModelWatch:
    """Remembers a module's parameters, and detects when the module has changed.

    Note [What tells that a model has changed]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    A walk over a model costs a microsecond for each of its submodules. So the watch walks over the model only after a sign of a
    change:

    - torch reports when a parameter or a module is registered with a submodule, for example by an assignment to an attribute,
      or by an adapter. This sign costs nothing in a step.
    - `_apply` of the wrapper, which `ddp.double()` calls, may replace parameters. So the wrapper itself sets `has_sign`.
    - Each forward checks whether parameters were frozen or unfrozen. The check costs 0.03 us for each parameter, and twice as
      much for each frozen parameter: after the forward, the watch looks again for parameters that the forward has unfrozen.
    - torch does not report layers that `insert` puts into a container, or layers that are taken out. So each forward checks the
      layers of the containers. The check costs 0.3 us for each container, and 0.03 us for each layer.
    - Some changes give no sign, such as `ddp.module.to(memory_format=...)`, or `ddp.module.double()` after a call of
      `torch.__future__.set_overwrite_module_params_on_conversion(True)`. So the watch also checks all attributes that hold
      parameters or modules (0.05 us each), and the shapes and strides of the parameters that need gradients. These checks
      come after 0, 1, 2, 4, 8, 16 and 32 backwards that average gradients, and then after every 32 of these backwards. All
      ranks check in the same forward.

    If the whole module is frozen, there are no gradients to average, so the watch reports no change. If unused parameters are
    allowed, parameters that were frozen or taken out count as unused.

    Note [Tensors that stand in for parameters]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    During one call, `torch.func.functional_call` replaces the module's parameters by tensors of the caller. The module has not
    changed, and its own parameters are out of reach. So the watch looks for changes only in the next forward that uses the
    module's own parameters.

    Args:
        owner: the wrapper, whose module may be replaced.
        allows_unused: see below.

    Attributes:
        allows_unused: whether a backward may leave out parameters. If True, freezing a parameter and taking out a layer do not
            count as changes.
        has_sign: whether there was a sign of a change since the last `take_note` or `take_note_of_structure`.
    """

    def __init__(self, state: ModuleState, owner: torch.nn.Module, *, allows_unused: bool) -> None:
        self._state = state
        self._owner = id(owner)
        self.allows_unused = allows_unused
        self._looked_after = -1
        self.take_note()
        _listen()
        with _lock:
            _watches.add(self)

    def take_note(self) -> None:
        """Remember the module's parameters and buffers for later comparisons."""
        parameters = self._state.parameters()
        self._kinds = [_kind(name, parameter) for name, parameter in parameters]
        self._frozen = [parameter for _, parameter in parameters if not parameter.requires_grad]
        self._averaged = [parameter for _, parameter in parameters if parameter.requires_grad]
        self._known = {id(parameter) for _, parameter in parameters}
        self.take_note_of_structure()
        # Remember each buffer's module and name, not its tensor: a forward may assign a new tensor, on some ranks only.
        # The module is kept with its id, because a new module may get the id of a module that is gone.
        self._buffer_places = {
            (id(part), name): part for part in self._state.module.modules() for name, _ in part.named_buffers(recurse=False)
        }

    def take_note_of_structure(self) -> None:
        """Remember the module's submodules, and the attributes that hold parameters, for later comparisons."""
        self.has_sign = False
        parameters: list[Any] = [parameter for _, parameter in self._state.parameters()]
        # A lazy parameter has no shape yet. Frozen parameters have no gradients, so their shapes and strides do not count.
        self._shapes = [(p, p.shape, p.stride()) for p in parameters if p.requires_grad and not is_lazy(p)]
        parts = list(self._state.module.modules())
        self._parts = {self._owner, id(None), *map(id, parts)}  # a container may hold None in place of a layer
        places: Iterable[Any] = map(own_parameters, parts)
        self._places = [
            (place, name, parameter)
            for place in places
            if isinstance(place, dict)  # a ScriptModule has another type of object here
            for name, parameter in place.items()
        ]
        self._wrapped = self._state.module
        self._children = [(part, list(own_children(part).values())) for part in parts]
        self._containers = [(part, len(own_children(part))) for part in parts if isinstance(part, _CONTAINERS)]

    def is_due(self, reductions: int) -> bool:
        """Whether the caller must call `has_changed` before this forward.

        `reductions` is the number of backwards that have averaged gradients so far.
        """
        if self.has_sign or self._others_need_gradients():
            return not self._has_stand_ins()
        if any(self._has_other_layers(part, count) for part, count in self._containers):
            self.has_sign = True
            return not self._has_stand_ins()
        # Several forwards may come between two backwards that average gradients; one look is enough.
        if reductions == self._looked_after or not is_worth_a_look(reductions):
            return False
        differs = not (
            all(place.get(name) is parameter for place, name, parameter in self._places)
            and self._wrapped is self._state.module
            and all(_has_children(part, children) for part, children in self._children)
            and all(one.shape == shape and one.stride() == strides for one, shape, strides in self._shapes)
        )
        if differs and self._has_stand_ins():  # the module's own parameters are hidden, so look in the next forward
            return False
        self._looked_after = reductions
        self.has_sign = differs
        return self.has_sign

    def _has_other_layers(self, container: torch.nn.Module, count: int) -> bool:
        """Whether the container has other layers than at the last `take_note_of_structure`, when it had `count` layers."""
        layers = own_children(container)
        if len(layers) != count and not self.allows_unused:
            return True
        return not self._parts.issuperset(map(id, layers.values()))

    def _has_stand_ins(self) -> bool:
        """Whether tensors stand in for the module's parameters. See Note [Tensors that stand in for parameters]."""
        noted = {(id(place), name): parameter for place, name, parameter in self._places}
        given = given_to_functional_call()
        return any(
            noted.get((id(place), name)) is not tensor and (id(tensor) in given or not _is_own(tensor))
            for place in map(own_parameters, self._state.module.modules())
            for name, tensor in place.items()
            if tensor is not None
        )

    def has_changed(self) -> bool:
        """Whether the module's parameters have changed since the last `take_note`.

        A change is another set of parameters, another dtype, device, shape or strides of a parameter, or a parameter that was
        frozen or unfrozen.
        """
        if self._others_need_gradients():
            return True
        kinds = [_kind(name, parameter) for name, parameter in self._state.parameters()]
        if self.allows_unused:  # parameters that were taken out count as unused, and others may have new names then
            return not {kind[1:] for kind in kinds}.issubset(kind[1:] for kind in self._kinds)
        return kinds != self._kinds

    def _others_need_gradients(self) -> bool:
        """Whether the set of parameters that need gradients has changed since the last `take_note`, and is not empty."""
        if any(map(_requires_grad_of, self._frozen)):
            return True
        if self.allows_unused or all(map(_requires_grad_of, self._averaged)):
            return False
        return self.needs_gradients()

    def needs_gradients(self) -> bool:
        """Whether a parameter requires a gradient. Parameters that are new since the last `take_note` may be overlooked."""
        # If unused parameters are allowed, taking a layer out is no change, so `_averaged` may still hold the layer's
        # parameters.
        return self._state.needs_gradients() if self.allows_unused else any(map(_requires_grad_of, self._averaged))

    def new(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters that are new since the last `take_note`, or were frozen then and require a gradient now."""
        thawed = {id(parameter) for parameter in self._frozen if parameter.requires_grad}
        return [(name, p) for name, p in self._state.parameters() if id(p) not in self._known or id(p) in thawed]

    def new_within_forward(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Return the parameters that require a gradient, and did not when the forward began. Call this after a forward."""
        if not (self.has_sign or any(map(_requires_grad_of, self._frozen))) or self._has_stand_ins():
            return []
        return [(name, p) for name, p in self.new() if p.requires_grad and not is_lazy(p)]

    def new_buffers(self) -> list[tuple[str, torch.Tensor]]:
        """Return the buffers whose module or name is new since the last `take_note`."""
        new = {
            f"{prefix}.{name}" if prefix else name
            for prefix, part in self._state.module.named_modules()
            for name, _ in part.named_buffers(recurse=False)
            if (id(part), name) not in self._buffer_places
        }
        return [(name, buffer) for name, buffer in self._state.buffers() if name in new]

    def state(self) -> dict[str, Any]:
        """Return what the watch remembers, for `restore`."""
        return dict(vars(self))  # no method changes a value in place

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to an earlier result of `state`, and report changes of the module since that time again."""
        vars(self).update(state)
        self.has_sign = True

    def note_registration(self, part: torch.nn.Module) -> None:
        """Set `has_sign` if `part` belongs to the watched module. torch calls this function after each registration."""
        if id(part) in self._parts:
            self.has_sign = True


def _kind(name: str, parameter: Any) -> tuple[object, ...]:
    if is_lazy(parameter):  # a lazy parameter has no shape yet
        return name, id(parameter)
    return name, id(parameter), parameter.dtype, parameter.device, parameter.shape, parameter.stride()


def _has_children(part: torch.nn.Module, children: Sequence[Any]) -> bool:
    # Get the dict again, because a container makes a new dict when a layer is deleted.
    found = own_children(part)
    return len(found) == len(children) and all(map(operator.is_, found.values(), children))


def _is_own(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and tensor.is_leaf


_lock = threading.RLock()  # reentrant: the garbage collector may run while the lock is held, and may call into this module
_watches: weakref.WeakSet[ModelWatch] = weakref.WeakSet()
_handles: list[Any] = []


def _listen() -> None:
    with _lock:
        if not _handles:
            _handles.append(register_module_parameter_registration_hook(_note))
            _handles.append(register_module_module_registration_hook(_note))


@disable_dynamo  # a compiler that traces the construction of a module must not trace this function
def _note(part: torch.nn.Module, _name: str, _what: object) -> None:
    with _lock:
        for watch in _watches:
            watch.note_registration(part)
