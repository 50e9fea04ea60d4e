"""A schedule of hooks: different hooks run in different parts of the training."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.collectives import InvalidArgumentError, MisuseError

from .contract import Bucket, TensorFuture, communication_hook, names_in
from .parameter_names import ParameterNames
from .saved_state import FORMAT, check_kind

_KIND = "schedule"


@dataclass(frozen=True)
class Phase:
    """A part of a training run, in which one hook runs. The phase lasts from `first_step` until the next phase.

    Attributes:
        first_step: the first step that calls the hook, counted from 0.
        hook: any hook, including a hook of torch.
        state: the hook's first argument.
    """

    first_step: int
    hook: Callable[[Any, Any], TensorFuture]
    state: Any = None


class ScheduleState:
    """The phases of a training run, and the present step, the same on every rank.

    `ScheduleState([Phase(0, allreduce_hook), Phase(5000, powerSGD_hook, PowerSGDState(...))])` averages without compression for
    5,000 steps, then with PowerSGD. The state of a phase counts only its own steps. So here, PowerSGD begins to compress in
    step 5,000 + `start_powerSGD_iter`.

    Args:
        phases: the phases. The first phase has `first_step` 0, and each later phase has a larger `first_step`.

    Raises:
        InvalidArgumentError: the first steps do not have this form, or a hook is not callable.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        steps = [phase.first_step for phase in phases]
        if not steps or steps[0] != 0:
            raise InvalidArgumentError(f"expected phases of which the first has first_step=0, found first steps {steps}")
        if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
            raise InvalidArgumentError(f"expected phases whose first steps rise, found {steps}")
        for phase in phases:
            if not callable(phase.hook):
                raise InvalidArgumentError(f"expected a function hook(state, bucket), found {type(phase.hook).__name__}")
        self.phases = list(phases)
        self.iter = 0
        self._is_between_steps = True
        self._numbers = ParameterNames()

    @property
    def current(self) -> Phase:
        """The phase of the present step. Between two steps, the phase of the next step."""
        return [phase for phase in self.phases if phase.first_step <= self.iter][-1]

    def enter(self, bucket: Bucket) -> Phase:
        """Return the phase of this bucket's step. After the last bucket of a step, count the step.

        `schedule_hook` calls `enter` with every bucket.
        """
        phase = self.current
        # Under torch's DDP, parameters get numbers in the first step of a run. The schedule numbers the parameters for the
        # states of all phases, also of phases that begin later or that `switch` adds. See Note [Numbers and a resumed run] in
        # `syncline.hooks.parameter_names`.
        if names_in(bucket) is None:
            self._numbers.of(bucket)
            for other in self.phases:
                names = getattr(other.state, "names", None)
                if isinstance(names, ParameterNames):
                    names.of(bucket, self._numbers)
        self._is_between_steps = bucket.is_last()
        if bucket.is_last():
            self.iter += 1
        return phase

    def abandon_step(self) -> None:
        """End the present step before its last bucket, because the phase's hook has raised an error."""
        self._is_between_steps = True

    def switch(self, hook: Callable[[Any, Any], TensorFuture], state: Any = None) -> None:
        """From the next step on, use another hook. Drop all later phases.

        Every rank must call `switch` between the same two steps. If a backward has failed outside of a hook, call
        `load_state_dict(state_dict())` before `switch`.

        Raises:
            MisuseError: a step has begun and has not ended.
        """
        if not self._is_between_steps:
            raise MisuseError(
                f"expected switch() between steps, found step {self.iter} under way: call it after backward. "
                "If backward failed, call load_state_dict(state_dict()) first"
            )
        # A phase that begins at the next step is dropped, too: the new hook takes its place.
        self.phases = [phase for phase in self.phases if phase.first_step < self.iter]
        self.phases.append(Phase(self.iter, hook, state))

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps so far, and the states of all phases whose state can be saved. See `saved_state`."""
        saved = {str(number): phase.state.state_dict() for number, phase in enumerate(self.phases) if _can_be_saved(phase)}
        return {"kind": _KIND, "format": FORMAT, "iter": self.iter, "first_steps": self._first_steps(), "states": saved}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise the error that `load_state_dict` would raise for this state. Change nothing.

        For each phase, this method calls `phase.state.check_state_dict`, if it exists.
        """
        check_kind(state, _KIND)
        if state["first_steps"] != self._first_steps():
            raise MisuseError(
                f"the saved schedule has phases from steps {state['first_steps']}, this one from {self._first_steps()}; "
                "construct it with the saved ones"
            )
        for number, saved in state["states"].items():
            phase = self.phases[int(number)]
            if not _can_be_saved(phase):
                raise MisuseError(f"the saved schedule holds a state for phase {number}, whose state here cannot be loaded")
            if hasattr(phase.state, "check_state_dict"):
                phase.state.check_state_dict(saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state. If the saved state does not fit, raise an error and change nothing.

        If the state of a phase has a method `check_state_dict`, the method can refuse a wrong state before any phase is loaded.

        Raises:
            MisuseError: the saved phases have other first steps, or the state of a phase does not accept its saved state.
        """
        # Check the states of all phases before the first of them changes.
        self.check_state_dict(state)
        for number, saved in state["states"].items():
            self.phases[int(number)].state.load_state_dict(saved)
        self.iter = state["iter"]
        # After loading, no step is under way, even if a user loads a state because a step has failed.
        self._is_between_steps = True

    def _first_steps(self) -> list[int]:
        return [phase.first_step for phase in self.phases]


@communication_hook
def schedule_hook(state: ScheduleState, bucket: Bucket) -> TensorFuture:
    """Call the hook of the present phase, with the phase's state and the bucket. Return the future of the phase's hook.

    Cost: the cost of the phase's hook.

    Raises:
        MisuseError: the state is not a ScheduleState.
    """
    if not isinstance(state, ScheduleState):
        raise MisuseError(f"expected a ScheduleState as the hook's state, found {type(state).__name__}")
    phase = state.enter(bucket)
    try:
        return phase.hook(phase.state, bucket)
    except BaseException:
        state.abandon_step()
        raise


def _can_be_saved(phase: Phase) -> bool:
    return hasattr(phase.state, "state_dict") and hasattr(phase.state, "load_state_dict")
