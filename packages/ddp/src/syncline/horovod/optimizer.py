"""DistributedOptimizer averages gradients during backward for the optimizer that it wraps.

Note [The reductions of a step]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
In a step, all ranks take part in the same reductions, even if they run different numbers of backwards or reach different
parameters::

    1. one reduction of all gradients       in the step's last backward, or in `synchronize`
    2. an agreement                         in `synchronize`: each rank says which gradients reduction 1 has left out
    3. one reduction of the rest            in `synchronize`, only if some rank has a rest

Reduction 1 overlaps with the last backward. The optimizer cannot know which backward is the last. So it expects the largest
number of backwards that any rank has run in an earlier step, but at least `backward_passes_per_step`. A rank that runs fewer
backwards takes part in reduction 1 only when it calls `synchronize`. Reduction 1 leaves out gradients that come after the
expected last backward, gradients that the script has set, and the first gradient of a parameter.

The first step has no reduction 1. In this step, the agreement tells all ranks which parameters have a gradient, and which
gradients are sparse. Then each rank makes a reducer for these parameters. This reducer allows unused parameters.

A rank that has called `join` also takes part in 1, 2 and 3, and contributes zeros. For an `op` other than `Average` and `Sum`,
zeros would be wrong. So with such an `op`, 1 and 2 raise an error on the ranks that have not joined.
"""

from __future__ import annotations

import itertools
import operator
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch

from syncline.collectives import (
    InvalidArgumentError,
    MisuseError,
    PendingResult,
    ReduceOp,
    adasum_coalesced,
    all_reduce_coalesced,
)
from syncline.collectives.internal import message_device
from syncline.reducer import GradBucket, Reducer
from syncline.reducer.gradient_hooks import GradientHooks
from syncline.reducer.torch_internals import call_at_backward_end, current_backward, enclosing_function, hookable

from .collectives import REDUCTIONS, Adasum, Average, Compression, Compressor, Op, Sum, _announce_complete
from .world import ProcessSet, World, call_with_each_world, global_process_set, is_initialized, world

NamedParameters = list[tuple[str, torch.nn.Parameter]]

_DEFAULT_CAPS_BYTES = [1 << 20, 25 << 20]

# In the agreement, one byte holds a number of backwards. This value says that no backward may reduce gradients.
_NEVER = 255


class _Rest(IntEnum):
    """Whether and how a gradient must still be reduced. The ranks agree on the largest value of all ranks."""

    NOTHING = 0
    DENSE = 1
    SPARSE = 2
    DENSIFIED = 3
    """The gradient was sparse, and was made dense."""
    TWICE = 4
    """A backward added to a gradient that was combined already. The result cannot be combined any more."""


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Op = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer that combines the gradients of all ranks before it steps.

    Gradients are combined during a step's last backward, or in `synchronize`. A rank whose backwards do not reach a parameter
    contributes zeros. If no rank reaches a parameter, its gradient becomes zeros.

    To read or clip gradients before the step, first call `optimizer.synchronize()`. Then call `step` in the context
    `optimizer.skip_synchronize()`.

    The class of the new optimizer is derived from the class of `optimizer`. Both optimizers share options and state, so do not
    call `step` of the given optimizer any more.

    Args:
        optimizer: an optimizer of torch, with the same parameters and options on every rank.
        named_parameters: names for error messages, usually `model.named_parameters()`. All parameters of the optimizer must
            have names here.
        compression: the compressor for the gradients that are sent.
        backward_passes_per_step: the largest number of gradients that a parameter may get before a step. Only the last backward
            reduces the gradients over the ranks.
        op: `Average`, `Sum`, `Min`, `Max` or `Product` of gradients. With `Adasum`, each rank first steps with its own
            gradients. Then the ranks combine the changes of the parameters. With `Min`, `Max` or `Product`, a reduction over
            all ranks raises a `MisuseError` while some ranks have called `join`.
        gradient_predivide_factor: only with `Average`: divide gradients by this factor before the sum over the ranks, and by
            (number of ranks / factor) after the sum.
        num_groups: deprecated; the same as `groups`.
        groups: the number of buckets, or a list with one list of parameters for each bucket. None: buckets of
            HOROVOD_FUSION_THRESHOLD bytes, or by default 1 MiB for the first bucket and 25 MiB for all others.
        sparse_as_dense: convert sparse gradients to dense gradients for the reduction, and back after the reduction.
        process_set: the ranks that combine gradients. On all other ranks, the optimizer steps with this rank's own gradients.
            Only the ranks of the set need to make the optimizer.

    Raises:
        InvalidArgumentError: an argument is wrong.
    """
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise InvalidArgumentError(f"gradient_predivide_factor splits an average, found op={op.name}; leave it out")
    if backward_passes_per_step < 1:
        raise InvalidArgumentError(f"expected backward_passes_per_step of at least 1, found {backward_passes_per_step}")
    if num_groups:
        warnings.warn("num_groups is deprecated: pass groups", DeprecationWarning, stacklevel=2)
        groups = num_groups if groups is None else groups
    named = _named(optimizer, named_parameters)
    combining: _GradientCombining | _StepCombining
    if op is Adasum:
        combining = _StepCombining(named, compression, process_set, backward_passes_per_step)
    else:
        combining = _GradientCombining(
            named,
            compression=compression,
            passes=backward_passes_per_step,
            op=op,
            predivide=gradient_predivide_factor,
            groups=_checked_groups(groups),
            sparse_as_dense=sparse_as_dense,
            process_set=process_set,
        )
    kind = type(optimizer)
    made: Any = object.__new__(type(kind.__name__, (_Distributed, kind), {"__module__": __name__}))
    # Take over all attributes: state, options, hooks. Leave out `step`, which a scheduler may have replaced: the replacement
    # would bypass our `step`.
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made._combining = combining
    _keep_shared(optimizer)
    return made


def _keep_shared(optimizer: torch.optim.Optimizer) -> None:
    # torch's `load_state_dict` makes new objects for options and state, but the `DistributedOptimizer` and schedulers share
    # the old objects.
    groups, state = optimizer.param_groups, optimizer.state

    def keep(loaded: torch.optim.Optimizer) -> None:
        new_groups, new_state = loaded.param_groups, dict(loaded.state)
        for group, new_group in zip(groups, new_groups, strict=True):
            options = dict(new_group)
            group.clear()
            group.update(options)
        state.clear()
        state.update(new_state)
        loaded.param_groups, loaded.state = groups, state

    # The `DistributedOptimizer` shares the optimizer's hooks, so the hook runs in its `load_state_dict`, too.
    optimizer.register_load_state_dict_post_hook(keep)


class _Distributed:
    """The first base class of a `DistributedOptimizer`. The second base class is the class of the given optimizer."""

    _combining: _GradientCombining | _StepCombining
    _should_synchronize = True

    def synchronize(self) -> None:
        """Combine the gradients in place. A collective: every rank calls this method or `step`."""
        self._combining.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step` does not call `synchronize`, because the script has called it."""
        self._combining.check_can_skip()
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call `synchronize`, unless the script has called it in this step. Then step the optimizer.

        With a closure, call `synchronize` after each call of the closure.
        """
        if self._should_synchronize:
            if closure is not None:
                closure = self._synchronizing(closure)
            elif self._combining.is_synchronized:
                warnings.warn(
                    "optimizer.step() was called after optimizer.synchronize() outside of optimizer.skip_synchronize(): the "
                    "gradients are not combined again",
                    stacklevel=2,
                )
            else:
                self.synchronize()
        try:
            return self._combining.step(super().step, closure)  # type: ignore[misc]  # the optimizer's
        finally:
            # A backward would reset this flag, too. But possibly this rank runs no backward before the next step.
            self._combining.is_synchronized = False

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            # The optimizer may call the closure again, and the closure may run no backward on this rank.
            self._combining.is_synchronized = False
            loss = closure()
            # The closure itself may call `synchronize`, to clip gradients.
            if not self._combining.is_synchronized:
                self.synchronize()
            return loss

        return call

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Call the optimizer's `zero_grad`, and count the backwards of a step from 0 again."""
        self._combining.forget()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]  # the optimizer's

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Call the optimizer's `add_param_group`. Every rank must add the same parameters."""
        super().add_param_group(param_group)  # type: ignore[misc]  # the optimizer's
        index = len(self.param_groups) - 1  # type: ignore[attr-defined]  # the optimizer's
        added = self.param_groups[index]["params"]  # type: ignore[attr-defined]  # the optimizer's
        self._combining.add([(f"group{index}.{number}", parameter) for number, parameter in enumerate(added)])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Call the optimizer's `load_state_dict`, and count the backwards of a step from 0 again."""
        self._combining.forget()
        super().load_state_dict(state_dict)  # type: ignore[misc]  # the optimizer's

    @property
    def backward_passes_per_step(self) -> int:
        return self._combining.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backwards in a step. Call this method between two steps."""
        self._combining.set_passes(passes)


# ---- gradients, during backward ----


# All optimizers of this process. The flag says whether the optimizer combines the gradients of all ranks. Optimizers with this
# flag have the same order on all ranks. Optimizers of an added process set may exist on some ranks only. Deleted
# optimizers stay in the list until `elastic.run` changes the ranks.
_made: list[tuple[weakref.ref[_GradientCombining], bool]] = []


@call_with_each_world
def _enter_world(has_newcomers: bool) -> None:
    # A new process has no deleted optimizers, so no rank may count them.
    if has_newcomers:
        _made[:] = [entry for entry in _made if entry[0]() is not None]
    for reference, is_of_all_ranks in _made:
        combining = reference()
        if combining is not None:
            combining.enter_world()
        elif is_of_all_ranks and is_initialized():
            # Another rank may still have this optimizer, so the optimizer's step numbers stay in use.
            _add_steps(world(), _Gone())


class _GradientCombining:
    """Combines gradients through a `Reducer`. See Note [The reductions of a step].

    Parameters have numbers, in the order of the optimizer. The reducer has every parameter that has got a gradient on any rank.

    Attributes:
        passes: the number of gradients that a parameter may get in a step.
        is_synchronized: whether `synchronize` was called after the latest backward.
    """

    def __init__(
        self,
        named: NamedParameters,
        *,
        compression: type[Compressor],
        passes: int,
        op: Op,
        predivide: float,
        groups: int | list[list[torch.Tensor]] | None,
        sparse_as_dense: bool,
        process_set: ProcessSet,
    ) -> None:
        self._named: NamedParameters = []
        self._number_of: dict[int, int] = {}  # by the parameter's id
        self._compression, self._op, self._predivide, self._groups = compression, op, predivide, groups
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self._is_of_all_ranks = process_set.process_set_id == 0
        self.passes = passes
        self._world: World | None = world()
        self._reducer: Reducer | None = None
        self._latest_backward: Callable[[], _Backward | None] = lambda: None
        self._handles: list[Any] = []
        weakref.finalize(self, _remove, self._handles)
        self.enter_world()
        self.add(named)
        _made.append((weakref.ref(self), self._is_of_all_ranks))

    def enter_world(self) -> None:
        """Use the ranks of the present `world()`, if there is one."""
        before, self._world = self._world, world() if is_initialized() else None
        # Drop the gradients, which may be in the memory of a broken group. `elastic` goes back to an earlier step anyway.
        if self._reducer is not None and before is not None and self._world is not None:
            for _, parameter in self._named:
                parameter.grad = None
        self._drop_reducer()
        self._members: list[int] = []  # the numbers of the reducer's parameters, in the reducer's order
        self._sparse: set[int] = set()
        self._densified: set[int] = set()
        # The expected number of a step's last backward. 0: not known yet, so `synchronize` reduces.
        self._last = 0
        self.forget()
        # Joined ranks take part only in collectives of all ranks, so an optimizer of an added process set has no steps.
        self._reduction_step: int | None = None
        self._end_step: int | None = None
        if self._world is not None and self._is_of_all_ranks:
            self._reduction_step, self._end_step = _add_steps(self._world, self)

    def forget(self) -> None:
        """Start a new step, in which no gradient has come yet."""
        self._backwards = 0
        self._is_reentrant = False
        self._counts: Counter[int] = Counter()  # how many gradients each parameter has got
        self._has_begun = False  # whether a backward has begun reduction 1
        self._is_reduced = False  # whether reduction 1 is over
        self._combined: set[int] = set()  # parameters whose gradients a reduction of this step has combined
        self._late: set[int] = set()  # parameters that got a gradient after the latest reduction
        self._roll: PendingResult[None] | None = None
        self.is_synchronized = False
        if self._reducer is not None:
            self._reducer.keep_local(True)

    def add(self, named: NamedParameters) -> None:
        for pair in named:
            parameter = pair[1]
            # Integers have no gradients.
            if not (parameter.is_floating_point() or parameter.is_complex()):
                continue
            number = len(self._named)
            self._named.append(pair)
            self._number_of[id(parameter)] = number
            # A frozen parameter has a hook, too, because it may be unfrozen later.
            with hookable(parameter):
                hook = _weakly(self._came, number)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def set_passes(self, passes: int) -> None:
        if passes < 1:
            raise InvalidArgumentError(f"expected at least 1 backward in a step, found {passes}")
        self.passes = passes
        self._last = 0
        self.forget()

    def check_can_skip(self) -> None:
        """Do nothing, because `skip_synchronize` is allowed here."""

    def step(self, own_step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        return own_step(closure)

    def synchronize(self) -> None:
        # On a rank outside of the set the optimizer steps alone.
        if self._process_set.included() and self._process_set.group().size > 1 and self._named:
            self._densify_kept()
            # This rank has not run the expected last backward, or that backward reached none of the reducer's parameters.
            if self._reducer is not None and not self._is_reduced:
                self._announce(self._reduction_step)
                self._reduce([number for number in self._members if self._rest(number) != _Rest.NOTHING])
            rest = [self._rest(number) for number in range(len(self._named))]
            self._announce(self._end_step)
            self._end(rest, self._backwards_seen(rest))
            self._hear()
            self._fill()
        self.forget()
        self.is_synchronized = True

    # ---- during backward ----

    def _came(self, number: int, parameter: torch.Tensor) -> None:
        """Count a gradient of a parameter. With `sparse_as_dense`, convert a sparse gradient to a dense gradient.

        Autograd calls this method after it has added the gradient to `parameter.grad`, and before the reducer's hook.
        """
        if self._sparse_as_dense and parameter.grad is not None and parameter.grad.is_sparse:
            self._densified.add(number)
            parameter.grad = parameter.grad.to_dense()
        backward = self._latest_backward()
        if backward is None or backward.is_over:
            self._begin_backward()
        elif backward.number != current_backward():
            self._enter_checkpoint(number)
        self._counts[number] += 1
        if self._counts[number] > self.passes:
            raise MisuseError(
                f"parameter '{self._named[number][0]}' got more gradients before step() than "
                f"backward_passes_per_step={self.passes} allows: increase it, or call step() after each backward"
            )
        self._late.add(number)

    def _begin_backward(self) -> None:
        backward = _Backward(current_backward())
        # Only autograd keeps this object alive, so the object is also gone if the backward fails.
        self._latest_backward = weakref.ref(backward)
        call_at_backward_end(backward.end)
        self._backwards += 1
        self.is_synchronized = False
        self._densify_kept()
        # The backward of a model that is one re-entrant checkpoint begins inside the checkpoint.
        self._is_reentrant = self._is_reentrant or enclosing_function() is not None
        self._choose_whether_to_reduce()

    def _choose_whether_to_reduce(self) -> None:
        if self._reducer is not None:
            self._reducer.keep_local(self._is_reentrant or self._is_reduced or self._backwards != self._last)

    def _enter_checkpoint(self, number: int) -> None:
        # When this backward began to reduce, the reducer has counted the gradients inside of the checkpoint as unused.
        is_reducing = self._has_begun and not self._is_reduced
        if is_reducing and number in self._members and enclosing_function() is not None:
            raise MisuseError(
                f"parameter '{self._named[number][0]}' got a gradient in a re-entrant checkpoint, but the earlier steps had no "
                "such checkpoint: pass use_reentrant=False to the checkpoint, or also use the checkpoint in the first step"
            )
        self._is_reentrant = True
        self._choose_whether_to_reduce()

    def _densify_kept(self) -> None:
        # `_fill` has made these gradients of the previous step sparse, and the script may have kept them.
        for number in self._densified:
            parameter = self._named[number][1]
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    def _began(self) -> None:
        """Announce the reduction to ranks that have called `join`.

        The reducer calls this method when a backward begins to reduce.
        """
        self._announce(self._reduction_step)
        self._has_begun = True

    def _ended(self, _: object = None) -> None:
        """Record that the gradients are reduced. The reducer and `_reduce` call this method after each reduction."""
        self._hear()
        self._is_reduced = True
        self._late.difference_update(self._members)

    def _delivered(self, parameters: Sequence[torch.Tensor]) -> None:
        self._combined.update(self._number_of[id(parameter)] for parameter in parameters)

    # ---- joined ranks ----

    def _announce(self, step: int | None) -> None:
        if step is None:
            return
        if self._op in (Average, Sum):
            self._roll = world().calls.announce_step(step)
        else:
            # The zeros of a joined rank would make the result wrong. So wait to hear whether a rank has joined.
            world().calls.announce_complete(f"the reduction of DistributedOptimizer(op=hvd.{self._op.name.title()})")

    def _hear(self) -> None:
        roll, self._roll = self._roll, None
        if roll is not None:
            roll.wait()

    def shadow_reduction(self) -> None:
        """On a rank that has called `join`, take part in reduction 1. See Note [The reductions of a step]."""
        if self._reducer is None:
            raise MisuseError(
                "this rank has joined, and the others step an optimizer that has not stepped here in this world; create the "
                "same optimizers on every rank, in the same order"
            )
        self._reducer.shadow_backward(has_forward=False)

    def shadow_end(self) -> None:
        """On a rank that has called `join`, take part in agreement 2 and reduction 3. See Note [The reductions of a step]."""
        self._end(None, 0)

    # ---- the end of a step ----

    def _backwards_seen(self, rest: Sequence[int]) -> int:
        """Return the number of backwards of this step, or `_NEVER` if no backward of later steps may reduce gradients."""
        # The reducer cannot see into a re-entrant checkpoint. And a script that itself sets a gradient after the last backward
        # does so in later steps, too.
        sets_later = self._is_reduced and self._backwards <= self._last and any(rest[number] for number in self._members)
        return _NEVER if self._is_reentrant or sets_later else min(self._backwards, _NEVER - 1)

    def _rest(self, number: int) -> _Rest:
        gradient = self._named[number][1].grad
        if gradient is None:
            return _Rest.NOTHING
        if number in self._combined:
            if number not in self._late:
                return _Rest.NOTHING
            # An average may be averaged again without harm. Any other reduction would count its result twice.
            if self._op is not Average:
                return _Rest.TWICE
        # No backward of this step has made these zeros. `zero_grad` has made them, or `_fill` in an earlier step.
        elif number not in self._late and not (gradient.coalesce().values() if gradient.is_sparse else gradient).any():
            return _Rest.NOTHING
        if number in self._densified:
            return _Rest.DENSIFIED
        return _Rest.SPARSE if gradient.is_sparse else _Rest.DENSE

    def _end(self, rest: Sequence[int] | None, backwards: int) -> None:
        """A collective: agree on the gradients that are not reduced yet (agreement 2), and reduce them (reduction 3).

        `rest` is None on a rank that has called `join`. For `backwards`, see `_backwards_seen`. The numbers refer to Note [The
        reductions of a step].

        Raises:
            MisuseError: on all ranks, if a gradient would be combined twice.
        """
        group = self._process_set.group()
        device = message_device(group, self._named[0][1].device)
        codes = torch.tensor([*(rest or [_Rest.NOTHING] * len(self._named)), backwards], dtype=torch.uint8, device=device)
        group.all_reduce(codes, ReduceOp.MAX)
        *together, seen = codes.tolist()
        self._last = max(self._last, self.passes, seen)
        if _Rest.TWICE in together:
            name = self._named[together.index(_Rest.TWICE)][0]
            raise MisuseError(
                f"parameter '{name}' got a gradient after op=hvd.{self._op.name.title()} had combined it; run one backward for "
                "the sum of the losses, or use op=hvd.Average"
            )
        if not any(together):
            return
        self._include({number: code for number, code in enumerate(together) if code != _Rest.NOTHING})
        self._reduce(None if rest is None else [number for number, code in enumerate(rest) if code != _Rest.NOTHING])

    def _reduce(self, numbers: Sequence[int] | None) -> None:
        """A collective: reduce the gradients of the parameters `numbers`. If `numbers` is None, take part with zeros."""
        assert self._reducer is not None
        if numbers is None:
            self._reducer.shadow_backward(has_forward=False)
            return
        position_of = {number: position for position, number in enumerate(self._members)}
        self._reducer.reduce_gradients([position_of[number] for number in numbers])
        self._ended()

    def _fill(self) -> None:
        for number, (_, parameter) in enumerate(self._named):
            # No rank has reached this parameter.
            if parameter.grad is None and parameter.requires_grad:
                parameter.grad = _zeros_like(parameter, is_sparse=number in self._sparse)
            if number in self._densified and parameter.grad is not None and not parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_sparse(1)

    # ---- the reducer ----

    def _drop_reducer(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None

    def _include(self, layouts: Mapping[int, int]) -> None:
        new = layouts.keys() - set(self._members)
        if not new:
            return
        # A gradient counts as sparse if it is sparse on any rank.
        self._sparse |= {number for number in new if layouts[number] == _Rest.SPARSE}
        self._densified |= {number for number in new if layouts[number] == _Rest.DENSIFIED}
        self._drop_reducer()
        numbers = sorted(new.union(self._members))
        order, caps_bytes = _bucket_order([self._named[number] for number in numbers], self._groups)
        self._members = [numbers[position] for position in order]
        named = [self._named[number] for number in self._members]
        # Unfreeze frozen parameters only for this constructor, which registers hooks.
        with hookable(*(parameter for _, parameter in named)):
            reducer = Reducer(
                named,
                self._process_set.group(),
                bucket_cap_bytes=caps_bytes or _caps_bytes(),
                sparse=[number in self._sparse for number in self._members],
                find_unused_parameters=True,
            )
        self._choose_reduction(reducer)
        # Use weak references: if the script deletes the optimizer, its hooks are removed from the parameters at once.
        reducer.on_begin(_weak(self._began))
        reducer.on_delivery(_weak(self._delivered))
        reducer.on_iteration(_weak(self._ended))
        reducer.keep_local(True)
        self._reducer = reducer

    def _choose_reduction(self, reducer: Reducer) -> None:
        is_plain = self._compression is Compression.none and self._predivide == 1.0
        if is_plain and self._op is Average:
            # The reducer averages by default.
            return
        if is_plain and self._op is Sum:
            reducer.divide_by(1)
        else:
            # Use a hook only if necessary, because a hook needs one more copy.
            reducer.set_hook(_reduce_bucket, (self._compression, self._op, self._predivide))


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


class _Backward:
    """A backward. `number` is autograd's number. An inner backward, of a re-entrant checkpoint, has another number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.is_over = False

    def end(self) -> None:
        self.is_over = True


class _Gone:
    """Stands for a deleted optimizer: it keeps the deleted optimizer's step numbers, so that all ranks number steps equally."""

    def shadow_reduction(self) -> None:
        """Never called, because nothing holds this object."""

    def shadow_end(self) -> None:
        """Never called, because nothing holds this object."""


def _add_steps(entered: World, owner: _GradientCombining | _Gone) -> tuple[int, int]:
    return entered.calls.add_step(owner.shadow_reduction), entered.calls.add_step(owner.shadow_end)


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    weak = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        called = weak()
        # The optimizer may be gone, while its parameters still have the hook.
        if called is not None:
            called(*arguments)

    return call


def _weakly(method: Callable[[int, torch.Tensor], None], number: int) -> Callable[[torch.Tensor], None]:
    call = _weak(method)

    def hook(parameter: torch.Tensor) -> None:
        call(number, parameter)

    # The reducer recognises its own hooks by their module. With this module, the hook does not count as a hook of the user.
    hook.__module__ = GradientHooks.__module__
    return hook


def _reduce_bucket(state: tuple[type[Compressor], Op, float], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    compression, op, predivide = state
    group, buffer = bucket.process_group(), bucket.buffer()
    # A sparse gradient is reduced as it is, without compression.
    if buffer.layout is torch.sparse_coo:
        return group.all_reduce(buffer, REDUCTIONS[op], async_op=True).get_future().then(lambda done: done.value()[0])
    # An elementwise compressor takes the whole bucket at once. Any other compressor takes each gradient separately.
    # A compressor that does not derive from `Compressor` may lack this attribute.
    pieces = [buffer] if getattr(compression, "is_elementwise", False) else bucket.gradients()
    is_split = predivide != 1.0
    if is_split:
        buffer.div_(predivide)
    compressed, contexts = zip(*map(compression.compress, pieces), strict=True)
    op_sent = ReduceOp.SUM if is_split else REDUCTIONS[op]
    targets = list(compressed)
    work = (
        group.all_reduce(targets[0], op_sent, async_op=True)
        if len(targets) == 1
        else all_reduce_coalesced(targets, op_sent, group, async_op=True)
    )
    assert work is not None

    def decompress(done: torch.futures.Future[Any]) -> torch.Tensor:
        done.value()
        for piece, target, context in zip(pieces, targets, contexts, strict=True):
            result = compression.decompress(target, context)
            # If the compressor has returned the tensor itself both times, the result is in place already.
            if result is not piece:
                piece.copy_(result)
        return buffer.mul_(predivide / group.size) if is_split else buffer

    return work.get_future().then(decompress)


# ---- Adasum: steps, after backward ----


class _StepCombining:
    """Each rank steps with its own gradients. Then Adasum combines the changes of the parameters."""

    is_synchronized = False

    def __init__(self, named: NamedParameters, compression: type[Compressor], process_set: ProcessSet, passes: int) -> None:
        self.passes = passes
        self._parameters = [parameter for _, parameter in named]
        self._compression = compression
        self._process_set = process_set

    def synchronize(self) -> None:
        """Do nothing, because gradients are not combined."""

    def forget(self) -> None:
        self.is_synchronized = False

    def add(self, named: NamedParameters) -> None:
        self._parameters += [parameter for _, parameter in named]

    def set_passes(self, passes: int) -> None:
        self.passes = passes

    def check_can_skip(self) -> None:
        """Raise a MisuseError, because `synchronize` does nothing here."""
        raise MisuseError(
            "skip_synchronize means nothing to op=hvd.Adasum, which combines what the steps changed; leave it out"
        )

    @torch.no_grad()
    def step(self, own_step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """A collective. Step the optimizer, then combine the changes of the parameters over the ranks."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._process_set.included() or self._process_set.group().size == 1:
            # This rank is outside of the set, or alone in it: there is nothing to combine.
            own_step()
            return loss
        # Choose the parameters in each step, because a script may freeze and unfreeze parameters.
        stepping = [each for each in self._parameters if each.requires_grad or each.grad is not None]
        before = [parameter.detach().clone() for parameter in stepping]
        own_step()
        if not stepping:
            return loss
        _announce_complete(self._process_set, "Adasum")
        changes = [parameter - start for parameter, start in zip(stepping, before, strict=True)]
        compressed, contexts = map(list, zip(*map(self._compression.compress, changes), strict=True))
        # Adasum takes tensors of one dtype and device at a time.
        for kind in dict.fromkeys((change.dtype, change.device) for change in compressed):
            adasum_coalesced(
                [change for change in compressed if (change.dtype, change.device) == kind], self._process_set.group()
            )
        for parameter, start, change, context in zip(stepping, before, compressed, contexts, strict=True):
            parameter.copy_(start + self._compression.decompress(change, context))
        return loss


# ---- parameters and buckets ----


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> NamedParameters:
    in_groups = [
        (f"group{index}.{number}", parameter)
        for index, group in enumerate(optimizer.param_groups)
        for number, parameter in enumerate(group["params"])
    ]
    if named_parameters is None:
        return in_groups
    given = list(named_parameters)
    pairs: Iterable[object] = given
    if not all(isinstance(each, tuple) and len(each) == 2 for each in pairs):
        raise InvalidArgumentError(
            "expected named_parameters to be pairs of name and parameter, as of model.named_parameters()"
        )
    repeated = sorted(name for name, count in Counter(name for name, _ in given).items() if count > 1)
    if repeated:
        raise InvalidArgumentError(f"expected each name once in named_parameters, found several of {', '.join(repeated)}")
    names = {id(parameter): name for name, parameter in given}
    missing = [place for place, parameter in in_groups if id(parameter) not in names]
    if missing:
        raise InvalidArgumentError(
            f"expected named_parameters to name all of the optimizer's parameters, found none for {', '.join(missing)} "
            "(numbered as in optimizer.param_groups)"
        )
    return [(names[id(parameter)], parameter) for _, parameter in in_groups]


def _checked_groups(groups: int | Sequence[Sequence[torch.Tensor]] | None) -> int | list[list[torch.Tensor]] | None:
    if groups is None:
        return None
    if hasattr(groups, "__index__") and not hasattr(groups, "__len__"):  # also an integer of NumPy
        groups = operator.index(groups)
    if isinstance(groups, int) and groups > 0:
        return groups
    if isinstance(groups, int) or not all(isinstance(each, torch.Tensor) for group in groups for each in group):
        raise InvalidArgumentError(f"expected groups to be a number above 0, or lists of parameters, found {groups!r}")
    lists = [list(group) for group in groups]
    if max(Counter(id(each) for group in lists for each in group).values(), default=1) > 1:
        raise InvalidArgumentError("expected each parameter in one of the groups, found one in two")
    return lists


def _bucket_order(named: NamedParameters, groups: int | list[list[torch.Tensor]] | None) -> tuple[list[int], list[int] | None]:
    """Return an order of the parameters' indices, and bucket sizes, so that each bucket holds exactly one of `groups`."""
    everything = list(range(len(named)))
    if groups is None:
        return everything, None
    if isinstance(groups, int):
        bounds = [len(named) * number // groups for number in range(groups + 1)]
        members = [everything[begin:end] for begin, end in itertools.pairwise(bounds)]
    else:
        index_of = {id(parameter): index for index, (_, parameter) in enumerate(named)}
        # A group may name parameters that the optimizer does not have. Leave them out.
        members = [sorted(index_of[id(each)] for each in group if id(each) in index_of) for group in groups]
        grouped = {index for group in members for index in group}
        # A parameter without a group gets a bucket of its own.
        members = sorted([*members, *([index] for index in everything if index not in grouped)], key=lambda group: group[:1])
    members = [group for group in members if group]
    order = [index for group in members for index in group]
    # The reducer fills buckets from the end of this order, separately for each dtype.
    return order, [sum(named[index][1].nbytes for index in group) for group in reversed(members)]


def _caps_bytes() -> list[int]:
    text = os.environ.get("HOROVOD_FUSION_THRESHOLD", "")
    if not text:
        return _DEFAULT_CAPS_BYTES
    if not text.isdecimal():
        raise InvalidArgumentError(f"expected HOROVOD_FUSION_THRESHOLD to be a number of bytes, found {text!r}")
    return [int(text)]


def _zeros_like(parameter: torch.Tensor, *, is_sparse: bool) -> torch.Tensor:
    zeros = torch.zeros_like(parameter.detach())
    return zeros.to_sparse(1) if is_sparse else zeros
