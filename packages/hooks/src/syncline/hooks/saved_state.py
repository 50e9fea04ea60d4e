"""Saved states are dictionaries of numbers, texts and tensors, which `torch.load(..., weights_only=True)` can load.

Only the errors of error feedback (the parts of gradients that compression left out) differ between ranks. A state with errors
fits only a job with the same number of ranks. For another number of ranks, `merge_states` makes one state that has the mean of
all ranks' errors. The mean is enough, because training depends only on the mean.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from syncline.collectives import InvalidArgumentError, MisuseError

from .error_feedback import ErrorFeedback

FORMAT = 2


def merge_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Make one state from the saved states of all ranks, to continue training with another number of ranks.

    Every rank of the new job loads the result.

    Args:
        states: results of `state_dict()`, one for each rank. For a DiLoCoOptimizer, the entries "outer" of these results.

    Returns:
        A copy of the first rank's state, with new errors (the parts of gradients that compression left out). The new errors are
        the means of all ranks' errors, in float32 for 16-bit gradients. With `Sites`, only the first rank of each site has
        errors, so the mean is over these ranks.

    Raises:
        InvalidArgumentError: there is no state, a state does not belong to a hook of this package, or the states are not from
            the same step of the same job. Or the state of a rank that has errors is missing, or is given twice.
    """
    if not states:
        raise InvalidArgumentError("expected the saved state of at least one rank, found none")
    for state in states:
        if "kind" not in state:
            raise InvalidArgumentError(
                f"expected the saved state of a hook, found a dict with {', '.join(map(repr, list(state)[:5])) or 'no entry'}; "
                "of a DiLoCoOptimizer's state pass state['outer']"
            )
    for alike, place in ((states, _place), (_holders(states), _errors)):
        for state in alike:
            if place(state) != place(alike[0]):
                raise InvalidArgumentError(
                    f"expected states of one kind, step and model, found {_in_words(alike[0])} and {_in_words(state)}"
                )
    merged = dict(states[0])
    # Some hooks keep no errors.
    if "errors" in merged:
        holders = _holders(states)
        _check_complete(holders)
        errors = {
            # `torch.load` puts each state on the GPU of the rank that saved it.
            name: torch.stack([state["errors"][name].to(first.device) for state in holders]).mean(0)
            for name, first in holders[0]["errors"].items()
        }
        # If "world_size" is None, `Origin.settle` accepts the errors on every rank.
        merged.update(errors=errors, rank=None, world_size=None)
    if "states" in merged:  # the state of a schedule
        merged["states"] = {name: _merged_phase([state["states"][name] for state in states]) for name in merged["states"]}
    return merged


def _merged_phase(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    # The program may have a class of its own for the state of a phase. Only states of this package have errors to merge.
    return merge_states(states) if "kind" in states[0] else states[0]


def _holders(states: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    # In the state of a rank that has never communicated, "rank" is None. If such a state has errors, they were loaded and never
    # used. With `Sites`, only the first rank of each site has errors.
    return [state for state in states if state.get("rank") is not None] or states


def _check_complete(holders: Sequence[Mapping[str, Any]]) -> None:
    # Several groups of ranks, also of different sizes, may have averaged separately: each site averages its own gradients.
    found: dict[int, list[int]] = {}  # for each size of a group, the numbers of its ranks
    for state in holders:
        # In states that were merged or that have never communicated, "world_size" is None.
        if state["errors"] and state["world_size"] is not None:
            found.setdefault(state["world_size"], []).append(state["rank"])
    for world_size, ranks in found.items():
        # In several groups of one size, each rank's number occurs equally often.
        if sorted(ranks) != sorted([*range(world_size)] * max(1, len(ranks) // world_size)):
            raise InvalidArgumentError(
                f"expected the states of all {world_size} ranks that have errors, found those of rank(s) "
                f"{', '.join(map(str, sorted(ranks)))}: pass the state of every rank once"
            )


def _place(state: Mapping[str, Any]) -> tuple[Any, ...]:
    return state["kind"], state["iter"], state.get("states", {}).keys()


def _errors(state: Mapping[str, Any]) -> Any:
    return state.get("errors", {}).keys()


def _in_words(state: Mapping[str, Any]) -> str:
    return f"'{state['kind']}' of step {state['iter']} with {len(state.get('errors', ()))} errors"


def check_kind(state: Mapping[str, Any], kind: str) -> None:
    """Check that a saved state was made by a `state_dict()` of this kind, such as "PowerSGD".

    Raises:
        MisuseError: the state has another kind or another format.
    """
    if state.get("kind") != kind or state.get("format") != FORMAT:
        raise MisuseError(
            f"expected a state of kind '{kind}' in format {FORMAT}, found kind {state.get('kind')!r} in format "
            f"{state.get('format')!r}; pass what state_dict() of the same kind of state has returned"
        )


def check_parameters(saved: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size]) -> None:
    """Check that the saved errors fit the shapes of the model's parameters. Both arguments have parameter names as keys.

    Raises:
        MisuseError: a name is unknown, or a shape differs.
    """
    for name, error in saved.items():
        if name not in shapes:
            raise MisuseError(
                f"the saved state is of another model: it knows parameter '{name}', this one has only "
                f"{', '.join(repr(known) for known in list(shapes)[:5])}{', ...' if len(shapes) > 5 else ''}"
            )
        if error.shape != shapes[name]:
            raise MisuseError(
                f"the saved state is of another model: parameter '{name}' is {list(error.shape)} there and "
                f"{list(shapes[name])} here"
            )


def plain_number(number: Any) -> Any:
    """Convert a number of NumPy to an int or a float, because `torch.load(..., weights_only=True)` refuses NumPy's numbers."""
    # Try the conversion: all arrays and tensors have `__index__`, even if their numbers have fractions.
    try:
        return operator.index(number)
    except TypeError:
        return float(number)


class Origin:
    """The rank and the number of ranks to which a state belongs. Both numbers are None in a new and in a merged state."""

    def __init__(self, rank: int | None = None, world_size: int | None = None) -> None:
        self.rank = rank
        self.world_size = world_size
        self._is_settled = False

    def __reduce__(self) -> tuple[type[Origin], tuple[int | None, int | None]]:
        """Pickle without `_is_settled`, because another rank may load the pickle."""
        return Origin, (self.rank, self.world_size)

    def settle(self, rank: int, world_size: int, errors: ErrorFeedback) -> None:
        """Store this rank's number and the group's size. A hook calls `settle` each time it uses the state.

        If another rank saved the errors (for example, if all ranks load the state of rank 0), the first call drops the errors
        and warns.

        Raises:
            MisuseError: the loaded errors belong to another number of ranks.
        """
        if len(errors) > 0 and self.world_size is not None and not self._is_settled:
            if self.world_size != world_size:
                raise MisuseError(
                    f"the hook's state was loaded on rank {rank} of {world_size}, and holds the error feedback of rank "
                    f"{self.rank} of "
                    f"{self.world_size}; for another number of ranks, load merge_states([...]) of all ranks' saved states"
                )
            if self.rank != rank:
                errors.clear()
                warnings.warn(
                    f"rank {rank} of {world_size} loaded a hook's state that rank {self.rank} saved, and begins its own error "
                    "feedback at zero; to go on exactly, save the state on every rank and load each rank's own",
                    stacklevel=2,
                )
        self.rank, self.world_size, self._is_settled = rank, world_size, True
