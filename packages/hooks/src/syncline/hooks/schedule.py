"""A schedule of hooks: different hooks run in different parts of the training."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from syncline.collectives import InvalidArgumentError, MisuseError

from .contract import Bucket, TensorFuture, communication_hook, names_in
from .parameter_names import ParameterNames
from .saved_state import FORMAT, check_kind, plain_number

_KIND = "schedule"


@dataclass(frozen=True)
class Phase:
    """A part of a training run, in which one hook runs. The phase lasts from `first_step` until the next phase.

    Attributes:
        first_step: the first step that calls the hook, counted from 0.
        hook: any communication hook, including a hook of torch.
        state: the hook's first argument.
    """

    first_step: int
    hook: Callable[[Any, Any], TensorFuture]
    state: Any = None


class ScheduleState:
    """The state of `schedule_hook`: the phases of a training run, and the present step. Every rank passes the same phases.

    `ScheduleState([Phase(0, allreduce_hook), Phase(5000, powerSGD_hook, PowerSGDState(...))])` averages without compression for
    5,000 steps, then with PowerSGD. The state of a phase counts only the steps of this phase. So in this example, PowerSGD
    begins to compress in step 5,000 + `start_powerSGD_iter`.

    Args:
        phases: the phases. The first phase has `first_step` 0, and each later phase has a larger `first_step`.

    Raises:
        InvalidArgumentError: there is no phase, the phases have other first steps than described, or a hook is not callable.
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
        """Return the phase whose hook reduces this bucket. If the bucket is the last bucket of a step, count the step.

        `schedule_hook` calls `enter` once for each bucket, in the order of the buckets.
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
        """End the present step early, because the phase's hook has raised an error. Then `switch` is allowed again.

        `schedule_hook` calls this method. The failed step counts only if the hook failed at the last bucket.
        """
        self._is_between_steps = True

    def switch(self, hook: Callable[[Any, Any], TensorFuture], state: Any = None) -> None:
        """Use another hook from the next step on, until the end of training. All later phases are dropped.

        Every rank must call `switch` between the same two steps. If a backward has failed outside of a hook, this object
        still waits for the last bucket of the failed backward. In this case, first load the object's own `state_dict()`
        with `load_state_dict`, then call `switch`.

        Args:
            hook: any communication hook, including a hook of torch.
            state: the hook's first argument.

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
        """Return what a checkpoint needs: the number of steps so far, and the results of the phases' own `state_dict`.

        A phase whose `state` lacks the methods `state_dict` and `load_state_dict` is left out. See `saved_state`.
        """
        saved = {str(number): phase.state.state_dict() for number, phase in enumerate(self.phases) if _can_be_saved(phase)}
        return {"kind": _KIND, "format": FORMAT, "iter": self.iter, "first_steps": self._first_steps(), "states": saved}

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check whether this object can load a saved state. If it can, return None. Nothing changes in either case.

        This method also calls the method `check_state_dict` of each phase's state. If a phase's state has no such method, its
        saved state is not checked.

        Raises:
            MisuseError: `load_state_dict` would refuse the saved state, for the reason that the text names.
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
        """Continue from a saved state. If `check_state_dict` finds a fault, raise its error and change nothing.

        If the state of a phase has no method `check_state_dict`, its own `load_state_dict` may refuse the saved state later.
        Then the states of earlier phases are loaded already.

        Raises:
            MisuseError: the saved state is not of a schedule, the saved phases have other first steps, or the state of a phase
                does not accept its saved state.
        """
        # Check the states of all phases before the first of them changes.
        self.check_state_dict(state)
        for number, saved in state["states"].items():
            self.phases[int(number)].state.load_state_dict(saved)
        self.iter = state["iter"]
        # After loading, no step is under way, even if a user loads a state because a step has failed.
        self._is_between_steps = True

    def _first_steps(self) -> list[int]:
        return [plain_number(phase.first_step) for phase in self.phases]


@communication_hook
def schedule_hook(state: ScheduleState, bucket: Bucket) -> TensorFuture:
    """Reduce the bucket with the hook of the schedule's present phase. Use `schedule_hook` to change hooks during training.

    Args:
        state: the phases, each with its hook and this hook's first argument.
        bucket: the gradients.

    Returns:
        The future that the phase's hook returns.

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
