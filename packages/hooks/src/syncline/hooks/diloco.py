"""DiLoCo: replicas take many steps without communication between two averages."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex

import torch

from syncline.collectives import InvalidArgumentError, MisuseError, broadcast_coalesced

from .compressor import Compressor, check_compressor
from .fragments import balanced_fragments, starts_at
from .low_precision import math_dtype
from .model_averaging import group_of_ranks
from .outer_exchange import KnownAverage, OuterExchange, PendingAverage
from .parameter_names import by_name
from .saved_state import FORMAT, Origin, check_kind, check_parameters, plain_number
from .seeds import check_seed
from .sites import Sites
from .statistics import HookStatistics
from .wrapping_optimizer import WrappingOptimizer

_KIND = "DiLoCo"


class DiLoCoOptimizer(WrappingOptimizer):
    """An optimizer that steps an inner optimizer, and moves all replicas towards their average every `sync_every` steps.

        inner steps 1 .. H      each replica alone, on its own data: nothing is communicated
        outer gradient          the parameters after the latest synchronisation, minus the present average of all replicas
        outer step              SGD with Nesterov momentum; every replica continues from the result

    Wrap the model in DDP only if you pass `sites`. Buffers are not synchronised.

    Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023; Douillard et al.,
    "Streaming DiLoCo with overlapping communication", 2025. The defaults are the values of the first paper.

    Args:
        optim: the inner optimizer, AdamW in the papers.
        named_parameters: pairs of a name and a parameter of a floating-point dtype, with the same names on all ranks. The
            constructor is a collective that gives all ranks the first rank's values.
        process_group: a group of Syncline or torch, with one rank of each replica; None: torch's default group.
        sites: the `Sites` of all ranks, in place of `process_group`. Each site has one replica: wrap the model in DDP over
            `sites.inside`. Only the first rank of each site communicates with other sites.
        sync_every: H, the number of inner steps between two outer steps, the same on all ranks.
        outer_lr: the learning rate of the outer optimizer, above 0.
        outer_momentum: the momentum of the outer optimizer, at least 0 and below 1.
        fragments: the number of parts (fragments) into which the parameters are divided. The fragments are synchronised in turn
            (Streaming DiLoCo). Or a list with one list of parameter names for each fragment. 1: all parameters are synchronised
            together.
        overlap_steps: the number of inner steps during which an average runs in the background, from 0 to `sync_every` - 1. 0:
            `step` waits for the average.
        mixing: at the end of an outer step, a parameter becomes `mixing` times its present value, plus `1 - mixing` times the
            result of the outer step. At least 0 and below 1. Must be 0 if `overlap_steps` is 0. With overlap, the second paper
            recommends 0.5.
        compressor: for example `Int8()`. The ranks send only the changes since the latest synchronisation, compressed with
            error feedback. None: the ranks send whole parameters.
        seed: the seed for compressors that choose at random, 0 to 2**32 - 1, the same on all ranks. Must be 0 without a
            compressor.

    Bytes sent by each rank for each step, on average: one all_reduce of all parameters (16-bit parameters as float32), divided
    by H. With a compressor: one all_gather of its message (one for each of float32 and float64), divided by H.

    Extra memory: two copies of the parameters in float32 or float64 (one copy without momentum), and a copy of each fragment
    whose average is in progress. With a compressor, one more copy of the parameters.

    Raises:
        InvalidArgumentError: a setting is out of its range, two parameters have one name, or a name in `fragments` is missing,
            unknown or given twice.
        MisuseError: a dtype is not a floating-point dtype, there is no parameter, or both `process_group` and `sites` are
            given.
    """

    # Note [Bitwise outer steps]
    # ~~~~~~~~~~~~~~~~~~~~~~~~~~
    # The anchors are the parameters after the latest synchronisation. Without a compressor the ranks average the parameters
    # themselves, not the differences from the anchors. So with `outer_lr=1` and without momentum, an outer step gives exactly
    # the average. In a group of one rank, this average is exactly the inner optimizer's result.

    def __init__(
        self,
        optim: torch.optim.Optimizer,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        process_group: Any = None,
        *,
        sites: Sites | None = None,
        sync_every: int = 500,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.9,
        fragments: int | Sequence[Sequence[str]] = 1,
        overlap_steps: int = 0,
        mixing: float = 0.0,
        compressor: Compressor | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__(optim)
        _check(sync_every, outer_lr, outer_momentum, overlap_steps, mixing)
        if compressor is not None:
            check_compressor(compressor)
            check_seed("seed", seed)
        elif seed:
            raise InvalidArgumentError(
                f"expected a compressor, which uses seed={seed}, found None: pass a compressor, or leave out the seed"
            )
        parameters = by_name(named_parameters)
        _check_dtypes(parameters)
        if sites is not None and process_group is not None:
            raise MisuseError("expected a process_group or sites, found both: the sites say who communicates")
        group = None if sites is not None else group_of_ranks(process_group)
        self._exchange = (
            OuterExchange(group, None, compressor, seed) if sites is None else OuterExchange.between(sites, compressor, seed)
        )
        self.sync_every: int = plain_number(sync_every)
        self.overlap_steps: int = plain_number(overlap_steps)
        self.steps = 0
        # Broadcast first between sites, then inside each site. So all ranks get the values of the first site's first rank.
        self._broadcast_over = (group,) if sites is None else (sites.between, sites.inside)
        outer = _OuterSGD(outer_lr, outer_momentum, plain_number(mixing))
        self._fragments = [_Fragment(part, outer, self._exchange) for part in _divided(parameters, fragments)]
        self._begin()

    @property
    def fragments(self) -> list[list[str]]:
        """The names of the parameters in each fragment, one list for each fragment. A fragment is synchronised as a whole."""
        return [list(fragment.parameters) for fragment in self._fragments]

    @property
    def statistics(self) -> HookStatistics:
        """Counts bytes when parameters are averaged: the bytes that this rank has sent, and the bytes without compression.

        Broadcasts do not count. `seconds_by_stage` stays empty.
        """
        return self._exchange.statistics

    def __repr__(self) -> str:
        return f"DiLoCoOptimizer({self.optim!r}, sync_every={self.sync_every}, fragments={len(self._fragments)})"

    def step(self, closure: Any = None) -> Any:
        """Step the inner optimizer, and communicate if an outer step is due. Return what the inner optimizer's `step` returns.

        All ranks must take the same number of steps. After the inner step, this method takes the outer steps that are due, and
        starts the averages that are due. The first step copies the first rank's parameters to all ranks once more, so you may
        load weights between the construction and the first step. Do not load weights later.
        """
        if self.steps == 0:
            self._begin()
        loss = self.optim.step(closure)
        self.steps += 1
        # Finish everything that is due before anything starts: a fragment must not start again before its outer step.
        for fragment in self._fragments:
            fragment.finish_if_due(self.steps)
        for number, fragment in enumerate(self._fragments):
            if starts_at(self.steps, number, len(self._fragments), self.sync_every):
                fragment.start(self.steps + self.overlap_steps)
                # Without overlap the outer step is due at once.
                fragment.finish_if_due(self.steps)
        return loss

    def _begin(self) -> None:
        """Copy the first rank's parameters to all ranks. Use the copied values as anchors (see `_Fragment`)."""
        values = [parameter.detach() for fragment in self._fragments for parameter in fragment.parameters.values()]
        for ranks in self._broadcast_over:
            if ranks is not None:
                broadcast_coalesced(values, group=ranks)
        for fragment in self._fragments:
            fragment.set_anchors()

    def synchronize(self) -> None:
        """Make all replicas equal, for example at the end of training. A collective.

        This method finishes all averages in progress. Then it takes one more outer step of every fragment, without mixing.

        With one fragment and no overlap, the replicas are equal after every outer step. In this case, do not call `synchronize`
        right after a `step` that took an outer step: the additional outer step would only move all replicas further by the
        outer momentum.
        """
        for fragment in self._fragments:
            fragment.finish_if_due(None)
        for fragment in self._fragments:
            # All fragments start before the first wait, so that their averages overlap.
            fragment.start(self.steps, mixes=False)
        for fragment in self._fragments:
            fragment.finish_if_due(None)

    def state_dict(self) -> dict[str, Any]:
        """Return the inner optimizer's state, with the outer optimizer's state under the additional key "outer".

        The method waits for averages in progress. With sites, all ranks of a site must call this method. With a compressor,
        save the state on every rank, because each rank has its own error feedback. To continue with another number of ranks,
        pass the entries "outer" of all ranks' states to `merge_states`.
        """
        exchange = self._exchange
        outer = {
            "kind": _KIND,
            "format": FORMAT,
            "iter": self.steps,
            "rank": exchange.origin.rank,
            "world_size": exchange.origin.world_size,
            "seeds": exchange.seeds.state(),
            "errors": exchange.error_feedback.state_dict(),
            "fragments": [fragment.state_dict() for fragment in self._fragments],
        }
        return {**self.optim.state_dict(), "outer": outer}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state. The state does not contain the model's parameters; load them separately.

        Raises:
            MisuseError: the "outer" state is missing or belongs to another model. Or it has errors of error feedback, and this
                optimizer has no compressor. (Any compressor can continue with the errors of another compressor.) Or the state
                was saved while an average was in progress, and this optimizer has other fragments.
        """
        outer = state_dict.get("outer", {})
        check_kind(outer, _KIND)
        # Without a compressor, the errors would never be sent. Every compressor sends them, also those that another one left.
        if outer["errors"] and self._exchange.compressor is None:
            raise MisuseError(
                "the saved state has error feedback, and this optimizer has compressor=None; pass a compressor, or load "
                "{**state, 'outer': {**state['outer'], 'errors': {}}} to drop the errors"
            )
        saved = {name: tensors for entry in outer["fragments"] for name, tensors in entry["parameters"].items()}
        mine = {name: parameter for fragment in self._fragments for name, parameter in fragment.parameters.items()}
        check_parameters({name: tensors["anchor"] for name, tensors in saved.items()}, _shapes(mine))
        missing = mine.keys() - saved.keys()
        if missing:
            raise MisuseError(f"the saved state is of another model: it lacks parameter '{min(missing)}'")
        under_way = {tuple(entry["parameters"]): entry["due"] for entry in outer["fragments"] if entry["due"] is not None}
        if under_way.keys() - {tuple(fragment.parameters) for fragment in self._fragments}:
            raise MisuseError("the state was saved while a fragment was under way, and this optimizer has other fragments")
        self.optim.load_state_dict({name: value for name, value in state_dict.items() if name != "outer"})
        self.steps = outer["iter"]
        self._exchange.seeds.restore(outer["seeds"])
        self._exchange.error_feedback.load_state_dict(outer["errors"])
        self._exchange.origin = Origin(outer["rank"], outer["world_size"])
        for fragment in self._fragments:
            fragment.load(saved, under_way.get(tuple(fragment.parameters)))

    def add_param_group(self, param_group: dict[str, Any]) -> None:  # noqa: ARG002 - always refused
        """Raise an error, because the parameters of this optimizer are fixed. Make a new optimizer for more parameters.

        Raises:
            MisuseError: always.
        """
        raise MisuseError(
            "a DiLoCoOptimizer takes no further parameters: add them to the inner optimizer, and make a new DiLoCoOptimizer"
        )


class _OuterSGD:
    def __init__(self, lr: float, momentum: float, mixing: float) -> None:
        self.lr = lr
        self.momentum = momentum
        self.mixing = mixing

    def moved(self, anchor: torch.Tensor, average: torch.Tensor, velocity: torch.Tensor | None) -> torch.Tensor:
        """Return the parameter's value after the outer step, and update `velocity`. See Note [Bitwise outer steps]."""
        result = torch.lerp(anchor, average, self.lr)  # exactly the average if the rate is 1
        if velocity is not None:
            velocity.mul_(self.momentum).add_(anchor - average)
            result.sub_(velocity, alpha=self.lr * self.momentum)
        return result


class _Fragment:
    """Parameters that are synchronised together.

    The anchor of a parameter is its value after the latest synchronisation. The velocity is the momentum of the outer
    optimizer.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], outer: _OuterSGD, exchange: OuterExchange) -> None:
        self.parameters = dict(parameters)
        self._outer = outer
        self._exchange = exchange
        values = [parameter.detach() for parameter in parameters.values()]
        self._anchors = [value.to(math_dtype(value.dtype), copy=True) for value in values]
        has_velocity = outer.momentum > 0
        self._velocities = [torch.zeros_like(anchor) if has_velocity else None for anchor in self._anchors]
        self._pending: PendingAverage | None = None
        self._due = 0
        self._mixing = outer.mixing

    def set_anchors(self) -> None:
        """Store the present values of the parameters as anchors (see `_Fragment`)."""
        for anchor, parameter in zip(self._anchors, self.parameters.values(), strict=True):
            anchor.copy_(parameter.detach())

    def start(self, due: int, *, mixes: bool = True) -> None:
        # A loaded state may have an average whose outer step is due later, if this run has a smaller `sync_every`.
        self.finish_if_due(None)
        values = [parameter.detach() for parameter in self.parameters.values()]
        self._pending = self._exchange.start(list(self.parameters), values, self._anchors)
        self._due = due
        self._mixing = self._outer.mixing if mixes else 0.0

    @torch.no_grad()
    def finish_if_due(self, step: int | None) -> None:
        """If the outer step is due after step number `step`, wait for the average and take the outer step.

        With None as `step`, an average in progress always counts as due.
        """
        if self._pending is None or (step is not None and step < self._due):
            # No average is in progress, or its outer step is due later.
            return
        averages, self._pending = self._pending.wait(), None
        places = zip(self.parameters.values(), self._anchors, averages, self._velocities, strict=True)
        for parameter, anchor, average, velocity in places:
            anchor.copy_(self._outer.moved(anchor, average, velocity))
            if self._mixing:
                parameter.lerp_(anchor.to(parameter.dtype), 1 - self._mixing)
            else:
                parameter.copy_(anchor)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of anchors, velocities and the average in progress, by name. First, wait for this average."""
        averages = [None] * len(self._anchors) if self._pending is None else self._pending.wait()
        saved = zip(self.parameters, self._anchors, self._velocities, averages, strict=True)
        return {
            "due": None if self._pending is None else [self._due, self._mixing],
            "parameters": {
                name: {key: tensor.clone() for key, tensor in zip(_SAVED, tensors, strict=True) if tensor is not None}
                for name, *tensors in saved
            },
        }

    def load(self, saved: Mapping[str, Mapping[str, torch.Tensor]], due: Sequence[Any] | None) -> None:
        """Continue from saved tensors, by name. `due` is [step, mixing] if an average was in progress, else None."""
        mine = [saved[name] for name in self.parameters]
        for anchor, velocity, tensors in zip(self._anchors, self._velocities, mine, strict=True):
            anchor.copy_(tensors["anchor"])
            if velocity is not None:
                # A state that was saved without momentum has no velocities.
                velocity.copy_(tensors.get("velocity", torch.zeros_like(anchor)))
        # Drop an average in progress, because it belongs to the state that is replaced here.
        self._pending = None
        if due is not None:
            self._due, self._mixing = due
            averages = [tensors["average"].to(anchor) for tensors, anchor in zip(mine, self._anchors, strict=True)]
            self._pending = KnownAverage(averages)


_SAVED = ("anchor", "velocity", "average")


def _shapes(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in parameters.items()}


def _check(sync_every: int, outer_lr: float, outer_momentum: float, overlap_steps: int, mixing: float) -> None:
    if sync_every < 1:
        raise InvalidArgumentError(f"expected sync_every of 1 step or above, found {sync_every}")
    if not outer_lr > 0:
        raise InvalidArgumentError(f"expected an outer_lr above 0, found {outer_lr}")
    if not 0 <= outer_momentum < 1:
        raise InvalidArgumentError(f"expected an outer_momentum of 0 or above and below 1, found {outer_momentum}")
    if not 0 <= overlap_steps < sync_every:
        raise InvalidArgumentError(f"expected overlap_steps of 0 to {sync_every - 1}, below sync_every, found {overlap_steps}")
    if not 0 <= mixing < 1:
        raise InvalidArgumentError(f"expected a mixing of 0 or above and below 1, found {mixing}")
    if mixing and not overlap_steps:
        raise InvalidArgumentError(f"mixing={mixing} without overlap_steps: replicas would never be equal; leave it out")


def _check_dtypes(parameters: Mapping[str, torch.Tensor]) -> None:
    if not parameters:
        raise MisuseError("expected named parameters to synchronise, found none")
    for name, parameter in parameters.items():
        if not parameter.is_floating_point():
            raise MisuseError(f"expected parameters of a floating-point dtype, found '{name}' of {parameter.dtype}")


def _divided(
    parameters: Mapping[str, torch.nn.Parameter], fragments: int | Sequence[Sequence[str]]
) -> list[dict[str, torch.nn.Parameter]]:
    names = list(parameters)
    if isinstance(fragments, SupportsIndex):
        sizes = [parameter.nbytes for parameter in parameters.values()]
        divided = [[names[index] for index in part] for part in balanced_fragments(sizes, operator.index(fragments))]
    else:
        divided = [list(part) for part in fragments]
        given = sorted(name for part in divided for name in part)
        if given != sorted(names) or not all(divided):
            # Name the missing and unknown parameters; if there are none, the parameters that are given twice.
            wrong = sorted(set(given) ^ set(names)) or sorted({name for name in given if given.count(name) > 1})
            raise InvalidArgumentError(
                f"expected each parameter in exactly one fragment, and none empty; look at {', '.join(map(repr, wrong[:5]))}"
            )
    return [{name: parameters[name] for name in part} for part in divided]
