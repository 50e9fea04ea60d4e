"""DistributedOptimizer averages gradients during backward for the optimizer that it wraps.

::

    step 1         backward adds to this rank's gradients; `synchronize` finds sparse gradients, makes a `Reducer`, reduces
    later steps    backward ──► Reducer: buckets are reduced while backward goes on
    a rank without a backward (or with too few)     `synchronize` runs a backward that adds zeros, so the rank takes part
    a rank that has called `join`                   takes part with zeros when the other ranks reduce

The reducer asks autograd which parameters a backward will not reach. So different ranks may reach different parameters. See
`DynamicUsage`.
"""

from __future__ import annotations

import itertools
import os
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
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
from syncline.reducer.torch_internals import current_backward

from .collectives import REDUCTIONS, Adasum, Average, Compression, Compressor, Op, Sum, _announce_complete
from .world import ProcessSet, World, global_process_set, world

NamedParameters = list[tuple[str, torch.nn.Parameter]]

_DEFAULT_CAPS_BYTES = [1 << 20, 25 << 20]


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
    """Make an optimizer that steps with the gradients of all ranks. Its class derives from the class of `optimizer`.

    Gradients are combined while backward runs. If a rank did not reach a parameter, the rank's gradient of this parameter
    counts as zeros. Parameters that no rank reached get zeros. To read or clip gradients before the step, call
    `optimizer.synchronize()`, then step within `with optimizer.skip_synchronize():`. The new optimizer shares options and state
    with the given optimizer, which must not step any more.

    Args:
        optimizer: an optimizer of torch. It is the same on every rank.
        named_parameters: names for error messages, usually `model.named_parameters()`. All parameters of the optimizer must
            have names here.
        compression: the compressor for the gradients that are sent.
        backward_passes_per_step: the number of backwards before a step. Every backward adds to this rank's gradients. Only the
            last backward reduces the gradients over the ranks.
        op: `Average`, `Sum`, `Min`, `Max` or `Product` of gradients. With `Adasum` each rank first steps with its own
            gradients, and then the changes of the parameters are combined.
        gradient_predivide_factor: only with `Average`. Divide gradients by this factor before the sum over the ranks, and
            by (number of ranks / factor) after the sum.
        num_groups: deprecated; the same as `groups`.
        groups: how gradients share buckets: a number of buckets, or a list of parameters for each bucket. None: buckets of
            HOROVOD_FUSION_THRESHOLD bytes. If this variable is not set, the first bucket has 1 MiB, and all others have 25 MiB.
        sparse_as_dense: reduce sparse gradients as dense gradients. After the reduction they are sparse again.
        process_set: the ranks that combine gradients. On a rank outside of the set, the optimizer steps alone.

    Raises:
        InvalidArgumentError: an argument is wrong. The error's text says what to pass instead.
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
        combining = _StepCombining(named, compression, process_set)
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
    # Take over all attributes: state, options, hooks. Leave out `step`: a scheduler's replacement would bypass our `step`.
    made.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    made._combining = combining
    return made


class _Distributed:
    """The additional methods of a `DistributedOptimizer`. This class is the first base, before the optimizer's class."""

    _combining: _GradientCombining | _StepCombining
    _should_synchronize = True
    _is_synchronized = False

    def synchronize(self) -> None:
        """Combine the gradients in place, and wait for the result. Every rank calls this method, or `step`."""
        self._combining.synchronize()
        self._is_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """A context in which `step` does not call `synchronize`. Call `synchronize` before you enter it."""
        self._combining.check_can_skip()
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Call `synchronize`, unless the script has called it in this step. Then step the optimizer."""
        if self._should_synchronize:
            if self._is_synchronized:
                warnings.warn(
                    "optimizer.step() was called after optimizer.synchronize() outside of optimizer.skip_synchronize(): the "
                    "gradients are not combined again",
                    stacklevel=2,
                )
            else:
                self.synchronize()
        self._is_synchronized = False
        return self._combining.step(super().step, closure)  # type: ignore[misc]  # the optimizer's

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Call the optimizer's `zero_grad`, and count the backwards of a step from 0 again."""
        self._combining.forget()
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]  # the optimizer's

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Call the optimizer's `add_param_group`. From the next step on, the new parameters' gradients are combined, too.

        Every rank must add the same parameters.
        """
        super().add_param_group(param_group)  # type: ignore[misc]  # the optimizer's
        index = len(self.param_groups) - 1  # type: ignore[attr-defined]  # the optimizer's
        added = self.param_groups[index]["params"]  # type: ignore[attr-defined]  # the optimizer's
        self._combining.add([(f"group{index}.{number}", parameter) for number, parameter in enumerate(added)])

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Call the optimizer's `load_state_dict`, and count the backwards of a step from 0 again."""
        self._combining.forget()
        self._is_synchronized = False
        super().load_state_dict(state_dict)  # type: ignore[misc]  # the optimizer's

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backwards in a step."""
        return self._combining.passes

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backwards in a step. Call this method between two steps."""
        self._combining.set_passes(passes)


# ---- gradients, during backward ----


_living: list[weakref.ref[_GradientCombining]] = []


def regroup() -> None:
    """Let all `DistributedOptimizer`s use the new group. `elastic` calls this after `replace_world`.

    Optimizers change over in the order in which they were made, which must be the same on all ranks.
    """
    for reference in list(_living):
        combining = reference()
        if combining is None:
            _living.remove(reference)
        else:
            combining.enter_world()


class _GradientCombining:
    """Combines gradients through a `Reducer`, which the first `synchronize` makes.

    Attributes:
        passes: the number of backwards in a step.
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
        self._named = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._compression, self._op, self._predivide, self._groups = compression, op, predivide, groups
        self._sparse_as_dense = sparse_as_dense
        self._process_set = process_set
        self.passes = passes
        self._reducer: Reducer | None = None
        self._world: World | None = None
        self._roll: PendingResult[None] | None = None
        self._handles: list[Any] = []
        self._hook_parameters()
        self.forget()
        _living.append(weakref.ref(self))
        self.enter_world()

    def enter_world(self) -> None:
        """Use the ranks of the present `world()`. Drop gradients that may be in memory of an old group."""
        if self._reducer is not None:
            for _, parameter in self._named:
                parameter.grad = None
        self._drop_reducer()
        self._world = world()
        # A joined rank takes part only in collectives of all ranks, so it has no steps of a process set to shadow.
        if self._process_set.process_set_id == 0:
            self._first_step = self._world.calls.add_step(self._shadow_first)
            self._backward_step = self._world.calls.add_step(self._shadow_backward)
        self.forget()

    def forget(self) -> None:
        """Start a new step, in which no gradient has come yet."""
        self._counts: Counter[int] = Counter()  # how many gradients each parameter has got
        self._reduced: set[int] = set()
        self._uncombined: set[int] = set()  # parameters with gradients that are not reduced yet
        self._reductions = 0
        self._backward: int | None = None
        if self._reducer is not None:
            self._reducer.keep_local(self.passes > 1)

    def add(self, named: NamedParameters) -> None:
        """Combine the gradients of these parameters, too, from the next step on."""
        self._named += [(name, parameter) for name, parameter in named if parameter.requires_grad]
        self._drop_reducer()
        self._hook_parameters()

    def set_passes(self, passes: int) -> None:
        """Set the number of backwards in a step."""
        if passes < 1:
            raise InvalidArgumentError(f"expected at least 1 backward in a step, found {passes}")
        self.passes = passes
        self._hook_parameters()
        self.forget()

    def check_can_skip(self) -> None:
        """Do nothing, because `skip_synchronize` is allowed here."""

    def step(self, own_step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Call the optimizer's own step."""
        return own_step(closure)

    def synchronize(self) -> None:
        """Combine the gradients; see `_Distributed.synchronize`."""
        # On a rank outside of the set the optimizer steps alone.
        if not self._process_set.included():
            return
        if self._world is not world():  # the script has called shutdown() and init() again
            self.enter_world()
        group = self._process_set.group()
        if group.size > 1:
            if self._reducer is None:
                if self._process_set.process_set_id == 0:
                    # Making a reducer is a collective, so joined ranks must make a reducer, too.
                    world().calls.announce_step(self._first_step).wait()
                self._make_reducer(self._layouts_here())
            # The other ranks reduce, so a rank without a reduced backward has to take part, too.
            if self._reductions == 0 or self._uncombined:
                self._reduce_what_is_there()
            self._fill()
        self.forget()

    # ---- during backward ----

    def _hook_parameters(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for index, (_, parameter) in enumerate(self._named):
            if self.passes > 1:
                self._handles.append(parameter.register_hook(_weakly(self._came, index)))  # type: ignore[no-untyped-call]
            if self._sparse_as_dense:
                hook = _weakly(self._accumulated, index)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _came(self, index: int, _: torch.Tensor) -> None:
        """Count a gradient that has come. Autograd calls this method before it adds the gradient to `parameter.grad`."""
        # Do not count the zeros of `_reduce_what_is_there`, which are not gradients of the script.
        if not self._is_filling:
            self._count(index)

    def _accumulated(self, index: int, parameter: torch.Tensor) -> None:
        """Make a sparse `parameter.grad` dense, before the reducer reads it. Autograd calls this method after each addition."""
        if parameter.grad is not None and parameter.grad.is_sparse:
            self._densified.add(index)
            parameter.grad = parameter.grad.to_dense()

    _is_filling = False

    def _count(self, index: int) -> None:
        self._counts[index] += 1
        # An average may be averaged again without harm. Any other reduction would count its result twice.
        if self._counts[index] > self.passes or (index in self._reduced and self._op is not Average):
            raise self._too_many(index)
        self._uncombined.add(index)
        backward = current_backward()
        if backward != self._backward:
            # The first gradient of a backward decides whether this backward is reduced while it runs. `synchronize` reduces the
            # gradients that no backward has reduced.
            self._backward = backward
            if self._reducer is not None:
                self._reducer.keep_local(self._counts[index] < self.passes)

    def _began(self) -> None:
        """Tell joined ranks that gradients will be reduced. The reducer calls this method when such a backward begins."""
        if self._process_set.process_set_id == 0:
            self._roll = world().calls.announce_step(self._backward_step)

    def _ended(self, _: object) -> None:
        """Note whose gradients are combined. The reducer calls this method when it has reduced all gradients of a backward."""
        # `_began` told the joined ranks in the background. If this failed, raise the error now.
        if self._roll is not None:
            self._roll.wait()
            self._roll = None
        assert self._reducer is not None
        self._reductions += 1
        # With one backward in a step, no hook counts gradients. But the reducer knows which parameters the backward reached.
        if self.passes == 1 and not self._is_filling:
            absent = self._reducer.absent
            reached = set(range(len(self._named))).difference(absent)
            again = reached & self._reduced
            # A second backward before the step has added gradients to combined gradients.
            if again:
                raise self._too_many(min(again))
            self._reduced |= reached
        self._reduced |= self._uncombined
        self._uncombined = set()

    def _too_many(self, index: int) -> MisuseError:
        return MisuseError(
            f"parameter '{self._named[index][0]}' got more gradients before step() than backward_passes_per_step={self.passes} "
            "allows; they are combined already. Increase backward_passes_per_step, or call step() after each backward"
        )

    # ---- the reducer ----

    def _drop_reducer(self) -> None:
        if self._reducer is not None:
            self._reducer.close()
            self._reducer = None
        self._densified: set[int] = set()

    def _layouts_here(self) -> list[int]:
        """For each parameter, 1 if its gradient on this rank is sparse, 2 if the gradient was made dense, else 0."""
        sparse = [parameter.grad is not None and parameter.grad.is_sparse for _, parameter in self._named]
        return [2 if index in self._densified else int(is_sparse) for index, is_sparse in enumerate(sparse)]

    def _make_reducer(self, layouts: Sequence[int]) -> None:
        """Make the reducer. A gradient counts as sparse if it is sparse on any rank. This is a collective."""
        group = self._process_set.group()
        device = message_device(group, self._named[0][1].device)
        agreed = torch.tensor(layouts, dtype=torch.uint8, device=device)
        group.all_reduce(agreed, ReduceOp.MAX)
        self._layouts = agreed.tolist()
        self._densified = {index for index, layout in enumerate(self._layouts) if layout == 2}
        order, caps_bytes = _bucket_order(self._named, self._groups)
        self._named = [self._named[index] for index in order]
        self._layouts = [self._layouts[index] for index in order]
        self._densified = {position for position, index in enumerate(order) if index in self._densified}
        self._groups = None if order == list(range(len(order))) and caps_bytes is None else self._groups
        self._hook_parameters()
        frozen = [parameter for _, parameter in self._named if not parameter.requires_grad]
        try:
            for parameter in frozen:  # only during construction: the reducer requires it
                parameter.requires_grad_(True)
            self._reducer = Reducer(
                self._named,
                group,
                bucket_cap_bytes=caps_bytes or _caps_bytes(),
                sparse=[layout == 1 for layout in self._layouts],
                find_unused_parameters=True,
            )
        finally:
            for parameter in frozen:
                parameter.requires_grad_(False)
        self._choose_reduction(self._reducer)
        self._reducer.on_begin(self._began)
        self._reducer.on_iteration(self._ended)
        self._reducer.keep_local(self.passes > 1)

    def _choose_reduction(self, reducer: Reducer) -> None:
        """Use a communication hook only if a plain all_reduce is not enough, because the hook needs one more copy."""
        is_plain = self._compression is Compression.none and self._predivide == 1.0
        if is_plain and self._op is Average:
            # The reducer averages by default.
            return
        if is_plain and self._op is Sum:
            reducer.divide_by(1)
        else:
            reducer.set_hook(_reduce_bucket, (self._compression, self._op, self._predivide))

    def _reduce_what_is_there(self) -> None:
        """Reduce the gradients that no backward has reduced: run a backward that adds zeros to all gradients, and reduce it."""
        assert self._reducer is not None
        self._is_filling = True
        self._reducer.keep_local(False)
        try:
            with torch.inference_mode(False), torch.enable_grad():
                roots = [
                    _nothing_of(parameter, is_sparse=layout == 1)
                    for (_, parameter), layout in zip(self._named, self._layouts, strict=True)
                    if parameter.requires_grad
                ]
                torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
        finally:
            self._is_filling = False

    def _fill(self) -> None:
        """Give zeros to parameters that no rank reached. Make gradients sparse again if they were made dense."""
        for index, (_, parameter) in enumerate(self._named):
            if parameter.grad is None:
                parameter.grad = _zeros_like(parameter, is_sparse=self._layouts[index] == 1)
            if index in self._densified and not parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_sparse(1)

    # ---- on a rank that has joined ----

    def _shadow_first(self) -> None:
        self._make_reducer([0] * len(self._named))

    def _shadow_backward(self) -> None:
        if self._reducer is None:
            raise MisuseError(
                "this rank has joined, and the others step an optimizer that has not stepped here in this world; create the "
                "same optimizers on every rank, in the same order"
            )
        self._reducer.shadow_backward(has_forward=False)


def _weakly(method: Callable[[int, torch.Tensor], None], index: int) -> Callable[[torch.Tensor], None]:
    """A hook of a parameter that calls `method(index, tensor)`. The hook does not keep the method's object alive."""
    weak = weakref.WeakMethod(method)

    def hook(tensor: torch.Tensor) -> None:
        called = weak()
        # The optimizer may be gone, while its parameters still have the hook.
        if called is not None:
            called(index, tensor)

    return hook


def _reduce_bucket(state: tuple[type[Compressor], Op, float], bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A communication hook that compresses, reduces and decompresses a bucket."""
    compression, op, predivide = state
    group, buffer = bucket.process_group(), bucket.buffer()
    # A sparse gradient is reduced as it is, without compression.
    if buffer.layout is torch.sparse_coo:
        return group.all_reduce(buffer, REDUCTIONS[op], async_op=True).get_future().then(lambda done: done.value()[0])
    # An elementwise compressor takes the whole bucket at once. Any other compressor takes each gradient separately.
    pieces = [buffer] if compression.is_elementwise else bucket.gradients()
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
            # A compressor may return the tensor itself; then the result is in place already.
            if target is not piece:
                piece.copy_(compression.decompress(target, context))
        return buffer.mul_(predivide / group.size) if is_split else buffer

    return work.get_future().then(decompress)


# ---- Adasum: steps, after backward ----


class _StepCombining:
    """Each rank steps with its own gradients. Then Adasum combines the changes of the parameters."""

    passes = 1

    def __init__(self, named: NamedParameters, compression: type[Compressor], process_set: ProcessSet) -> None:
        self._parameters = [parameter for _, parameter in named if parameter.requires_grad]
        self._compression = compression
        self._process_set = process_set

    def synchronize(self) -> None:
        """Do nothing, because gradients are not combined."""

    def forget(self) -> None:
        """Do nothing, because this class counts no backwards."""

    def add(self, named: NamedParameters) -> None:
        """Combine the changes of these parameters, too."""
        self._parameters += [parameter for _, parameter in named if parameter.requires_grad]

    def set_passes(self, passes: int) -> None:
        """Note the number. It has no effect here: before a step, any number of backwards may add to this rank's gradients."""
        self.passes = passes

    def check_can_skip(self) -> None:
        """Raise an error: `synchronize` does nothing here, so there is nothing to skip.

        Raises:
            MisuseError: always.
        """
        raise MisuseError(
            "skip_synchronize means nothing to op=hvd.Adasum, which combines what the steps changed; leave it out"
        )

    @torch.no_grad()
    def step(self, own_step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any:
        """Step, then combine the changes. This is a collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not self._process_set.included() or self._process_set.group().size == 1:
            # This rank is outside of the set, or alone in it: there is nothing to combine.
            own_step()
            return loss
        before = [parameter.detach().clone() for parameter in self._parameters]
        own_step()
        _announce_complete(self._process_set, "Adasum")
        changes = [parameter - start for parameter, start in zip(self._parameters, before, strict=True)]
        compressed, contexts = map(list, zip(*map(self._compression.compress, changes), strict=True))
        # Adasum takes tensors of one dtype and device at a time.
        for kind in dict.fromkeys((change.dtype, change.device) for change in compressed):
            adasum_coalesced(
                [change for change in compressed if (change.dtype, change.device) == kind], self._process_set.group()
            )
        for parameter, start, change, context in zip(self._parameters, before, compressed, contexts, strict=True):
            parameter.copy_(start + self._compression.decompress(change, context))
        return loss


# ---- parameters and buckets ----


def _named(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.nn.Parameter]] | None
) -> NamedParameters:
    """The optimizer's parameters with their names, in the optimizer's order."""
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
    if groups is None or (isinstance(groups, int) and groups > 0):
        return groups
    if isinstance(groups, int) or not all(isinstance(each, torch.Tensor) for group in groups for each in group):
        raise InvalidArgumentError(f"expected groups to be a number above 0, or lists of parameters, found {groups!r}")
    lists = [list(group) for group in groups]
    if max(Counter(id(each) for group in lists for each in group).values(), default=1) > 1:
        raise InvalidArgumentError("expected each parameter in one of the groups, found one in two")
    return lists


def _bucket_order(named: NamedParameters, groups: int | list[list[torch.Tensor]] | None) -> tuple[list[int], list[int] | None]:
    """Choose an order of the parameters' indices, and bucket sizes, so that each bucket holds exactly one of `groups`.

    The reducer fills buckets from the end of this order, separately for each dtype.
    """
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
    return order, [sum(named[index][1].nbytes for index in group) for group in reversed(members)]


def _caps_bytes() -> list[int]:
    """The bucket sizes that HOROVOD_FUSION_THRESHOLD sets, or the default sizes."""
    text = os.environ.get("HOROVOD_FUSION_THRESHOLD", "")
    if not text:
        return _DEFAULT_CAPS_BYTES
    if not text.isdecimal():
        raise InvalidArgumentError(f"expected HOROVOD_FUSION_THRESHOLD to be a number of bytes, found {text!r}")
    return [int(text)]


def _nothing_of(parameter: torch.Tensor, *, is_sparse: bool) -> torch.Tensor:
    """The sum of no elements of a parameter. The gradient of this sum is zeros, whatever the parameter's values are."""
    if is_sparse:
        nowhere = torch.empty(0, dtype=torch.int64, device=parameter.device)
        return torch.nn.functional.embedding(nowhere, parameter, sparse=True).sum()
    return parameter.reshape(-1)[:0].sum()


def _zeros_like(parameter: torch.Tensor, *, is_sparse: bool) -> torch.Tensor:
    zeros = torch.zeros_like(parameter.detach())
    return zeros.to_sparse(1) if is_sparse else zeros
