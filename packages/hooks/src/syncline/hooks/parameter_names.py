"""Names for the parameters in buckets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from syncline.collectives import InvalidArgumentError, MisuseError

from .contract import Bucket, names_in

Parameter = TypeVar("Parameter", bound=torch.Tensor)


def by_name(named_parameters: Iterable[tuple[str, Parameter]]) -> dict[str, Parameter]:
    """Return a dict from each name to its parameter.

    Raises:
        InvalidArgumentError: two parameters have one name, for example because two modules are trained together.
    """
    found: dict[str, Parameter] = {}
    for name, parameter in named_parameters:
        if found.setdefault(name, parameter) is not parameter:
            raise InvalidArgumentError(
                f"expected one parameter for each name, found two with the name '{name}': put all modules into one, and pass "
                "its named_parameters()"
            )
    return found


class ParameterNames:
    """Names for the parameters of buckets. A parameter keeps its name when DDP makes new buckets.

    A parameter's name comes from the first of these sources that exists:

    1. `named_parameters`.
    2. The bucket. The buckets of Syncline's DDP have the model's own names.
    3. A number, in the order in which parameters first appear in buckets. See Note [Numbers and a resumed run].

    Args:
        named_parameters: pairs of a name and a parameter, or None.

    Attributes:
        are_given: whether the constructor got names.
        shapes: the parameters' shapes, by name. If a saved state was loaded (see `expect`), `shapes` also has the shapes in
            that state, as soon as a step has shown that the state fits the model.

    Raises:
        InvalidArgumentError: `named_parameters` has two parameters with one name.
    """

    # Note [Numbers and a resumed run]
    # ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    # A number must mean the same parameter in the run that saves a state and in the run that loads the state. This condition
    # holds if both runs number all parameters in their first step. (After this step, DDP changes the order of its buckets.) So:
    #
    # [1] Hooks call `of` in every step, also in steps without compression.
    # [2] `ScheduleState` also numbers the parameters for the states of later phases.
    # [3] A state that has given numbers in several steps cannot be loaded: its numbers depend on the step in which each
    #     parameter was added.
    # [4] After loading, the first step must have exactly the parameters of the saved state, with the same shapes. If the run
    #     saves its state before this step, it saves the loaded names and shapes again, so that the next run can compare them.

    def __init__(self, named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
        self.are_given = named_parameters is not None
        self.shapes: dict[str, torch.Size] = {}
        # Look parameters up by identity, because `==` compares tensors element by element.
        self._names = WeakIdKeyDictionary()
        self._latest: WeakValueDictionary[str, torch.Tensor] = WeakValueDictionary()
        self._numberings = 0  # the number of steps in which parameters got numbers
        self._is_step_numbered = False
        self._source: ParameterNames | None = None  # the object whose numbers this object uses, if any
        self._loaded: dict[str, torch.Size] = {}  # empty as soon as a step has shown that the loaded state fits
        self._loaded_numberings = 0  # of the state in `_loaded`
        self._met: set[str] = set()
        for name, parameter in by_name(named_parameters or ()).items():
            self._note(name, parameter)

    def of(self, bucket: Bucket, numbers: ParameterNames | None = None) -> list[str]:
        """Return the names of `bucket.parameters()`, in their order. Call `of` with every bucket of a step.

        If parameters need numbers, and this object has given no numbers so far, it uses the numbers of the other object
        `numbers`.

        Raises:
            MisuseError: `named_parameters` was given, but lacks a parameter. Or a parameter's shape has changed. Or the loaded
                state belongs to other parameters. Or two models have a parameter with the same name.
        """
        parameters = bucket.parameters()
        names = None if self.are_given else names_in(bucket)
        if names is None:
            names = [self._name_of(parameter, numbers) for parameter in parameters]
        else:
            for name, parameter in zip(names, parameters, strict=True):
                if self._latest.get(name) is not parameter:
                    self._note_models(name, parameter)
        if self._loaded:
            self._compare_with_loaded(names, is_last=bucket.is_last())
        if bucket.is_last():
            self._is_step_numbered = False
        return names

    # ---- saving ----

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters' shapes by name, and the number of steps in which parameters got numbers.

        If no step has shown yet that a loaded state fits, return the shapes and the number of the loaded state.
        """
        shapes, numberings = (self._loaded, self._loaded_numberings) if self._loaded else (self.shapes, self._numberings)
        return {"shapes": {name: list(shape) for name, shape in shapes.items()}, "numberings": numberings}

    def check(self, state: Mapping[str, Any]) -> None:
        """Check that a saved state fits the parameters that are known in this run so far. Change nothing.

        Raises:
            MisuseError: the numbers in the saved state may mean other parameters in this run, or a parameter has another shape.
        """
        if state["numberings"] > 1:
            raise MisuseError(
                "the saved state numbered parameters in several steps, so its numbers may mean other parameters here: begin "
                "without it, and pass named_parameters"
            )
        if self.are_given:
            if state["numberings"]:
                raise MisuseError(
                    "the saved state has numbers for its parameters, this one names: load it into a state without "
                    "named_parameters, or begin without it"
                )
        else:
            _check_shapes(_shapes_in(state), self.shapes)

    def expect(self, state: Mapping[str, Any]) -> None:
        """Store a loaded state. Without given names, later calls of `of` check that the buckets fit this state.

        Raises:
            MisuseError: the state does not pass `check`, and is not stored.
        """
        self.check(state)
        if not self.are_given:
            self._loaded = _shapes_in(state)
            self._loaded_numberings = state["numberings"]
            self._met = set()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle names and shapes, but no parameters."""
        return _copy_that_expects, (self.state_dict(),)

    # ---- new parameters ----

    def _name_of(self, parameter: torch.Tensor, numbers: ParameterNames | None) -> str:
        if parameter in self._names:
            return str(self._names[parameter])
        if self.are_given:
            raise MisuseError(
                f"a bucket holds a parameter of shape {list(parameter.shape)} that is not among the {len(self.shapes)} "
                "named_parameters given to the hook's state; give those of the model that is trained"
            )
        if not self._is_step_numbered:
            self._is_step_numbered = True
            self._numberings += 1
        # Take numbers from another object only if this object has given none, or two parameters could get the same number.
        if not self.shapes:
            self._source = numbers
        if self._source is None or parameter not in self._source._names:
            return self._note(f"parameter {len(self.shapes)}", parameter)
        self._numberings = max(self._numberings, self._source._numberings)
        return self._note(str(self._source._names[parameter]), parameter)

    def _note_models(self, name: str, parameter: torch.Tensor) -> None:
        """Store the model's own name of a parameter that is new, or that replaces another parameter of this name."""
        # This parameter had the name, then another parameter took the name, and now this parameter is back.
        if parameter in self._names and self._names[parameter] == name:
            raise MisuseError(
                f"the hook's state gets buckets of two models that have a parameter '{name}'; make a state for each model"
            )
        if name in self.shapes and self.shapes[name] != parameter.shape:
            raise MisuseError(
                f"parameter '{name}' is {list(parameter.shape)} now, and was {list(self.shapes[name])} before: register the "
                "hook with a new state for a changed or second model"
            )
        self._note(name, parameter)

    def _note(self, name: str, parameter: torch.Tensor) -> str:
        self._names[parameter] = name
        self._latest[name] = parameter
        self.shapes[name] = parameter.shape
        return name

    # ---- after loading ----

    def _compare_with_loaded(self, names: Sequence[str], *, is_last: bool) -> None:
        _check_shapes(self._loaded, {name: self.shapes[name] for name in names})
        self._met.update(names)
        if not is_last:
            return
        unknown, missing = sorted(self._met - self._loaded.keys()), sorted(self._loaded.keys() - self._met)
        # A user may freeze or unfreeze parameters between the two runs, or a step may use only a part of the model. So with
        # names, some parameters may be missing, and some may be new. If all are new, the names have changed. With numbers, no
        # parameter may be missing or new, because then a number may mean another parameter.
        is_known = not self._met.isdisjoint(self._loaded)
        if (unknown and missing and not is_known) or (self._numberings and (unknown or missing)):
            raise MisuseError(
                f"the loaded state is of other parameters: {_some(missing)} only there, {_some(unknown)} only here; pass "
                "named_parameters in both runs, or begin without it"
            )
        # The state still has errors of parameters that were missing in this step, so their shapes are saved, too.
        self.shapes = {**self._loaded, **self.shapes}
        self._loaded = {}


def _copy_that_expects(state: Mapping[str, Any]) -> ParameterNames:
    copy = ParameterNames()
    copy.expect(state)
    return copy


def _shapes_in(state: Mapping[str, Any]) -> dict[str, torch.Size]:
    return {name: torch.Size(shape) for name, shape in state["shapes"].items()}


def _check_shapes(loaded: Mapping[str, torch.Size], shapes: Mapping[str, torch.Size]) -> None:
    for name, shape in shapes.items():
        if loaded.get(name, shape) != shape:
            raise MisuseError(
                f"the loaded state is of another model: parameter '{name}' is {list(loaded[name])} there and {list(shape)} "
                "here; load this model's state, or pass named_parameters in both runs"
            )


def _some(names: Sequence[str]) -> str:
    if not names:
        return "none"
    return f"'{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
