"""The reducer: averages gradients over the ranks while backward still computes others."""

from __future__ import annotations

import enum
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from syncline.collectives import InvalidArgumentError, MisuseError, ProcessGroup, ReduceOp, TorchGroup

from . import complaints
from .bucket import Bucket
from .bucket_assignment import GradientSpec, assign_buckets
from .finalize import Flight, LateFlight, finalize
from .grad_bucket import GradBucket
from .graph import CompleteGraph, Graph
from .outermost_backward import call_at_the_end
from .readiness import MarkedTwiceError, Readiness
from .sparse_bucket import SparseBucket
from .static_graph import StaticGraph
from .statistics import BucketTimes, IterationStatistics
from .used_parameters import ChangingGraph

if TYPE_CHECKING:
    CommunicationHook: TypeAlias = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
else:
    CommunicationHook = Callable

AnyBucket: TypeAlias = Bucket | SparseBucket

DEFAULT_BUCKET_CAP_BYTES = 25 * 1024 * 1024
DEFAULT_FIRST_BUCKET_CAP_BYTES = 1024 * 1024


class _Phase(enum.Enum):
    """Between iterations, or inside a backward whose gradients are being reduced."""

    IDLE = enum.auto()
    REDUCING = enum.auto()


class Reducer:
    """Averages the gradients of some parameters over the ranks of a group, during backward.

    ::

        forward        prepare_for_backward
        backward       gradient i is ready ──► readiness ──► bucket k may start: collect, then hook or all_reduce(AVG)
                       gradient j is ready ──► ...                       (communication overlaps further backward)
        its end        finalize: wait for the buckets in order, write the results back

    Every backward that reaches one of the parameters must reach all of them, on every rank; unless `find_unused_parameters`
    or `static_graph` says otherwise. A backward that reaches none of them on some rank is not seen there: the others wait for
    that rank, and name it when the group's timeout is over.

    Args:
        named_parameters: names and parameters; with `requires_grad`; the same on all ranks. Names appear in errors.
        group: whose ranks average. Constructing a reducer is a collective of this group.
        bucket_cap_bytes: a bucket is closed when it has reached this size; or the sizes for the first, second, ... bucket,
            of which the last holds for all further ones.
        first_bucket_cap_bytes: the same for the first bucket, which is small so that communication starts early; means
            nothing to a list of sizes.
        gradient_as_bucket_view: let `parameter.grad` be a view of the bucket; saves the copy back and the memory.
        sparse: for each parameter, whether its gradients are sparse (COO); None if none is. Each has a bucket to itself.
        find_unused_parameters: a backward may leave out parameters, on each rank others; those that no rank used keep the
            gradients that they have, or None. At least one must be reached on every rank. See `ChangingGraph`.
        skip_all_reduce_unused_params: with `find_unused_parameters`, do not reduce a bucket of which no rank uses anything.
        static_graph: every backward is like the first one; parameters may be used several times in it, from re-entrant
            checkpoints too, or never. See `StaticGraph`. It has precedence over `find_unused_parameters`, as in torch.

    Extra memory: the buckets, as large as all gradients together; none beyond the gradients with `gradient_as_bucket_view`.

    Raises:
        MisuseError: there is no parameter, or one needs no gradient.
        InvalidArgumentError: there are more or fewer `sparse` flags than parameters.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        group: ProcessGroup,
        *,
        bucket_cap_bytes: int | Sequence[int] = DEFAULT_BUCKET_CAP_BYTES,
        first_bucket_cap_bytes: int = DEFAULT_FIRST_BUCKET_CAP_BYTES,
        gradient_as_bucket_view: bool = False,
        sparse: Sequence[bool] | None = None,
        find_unused_parameters: bool = False,
        skip_all_reduce_unused_params: bool = False,
        static_graph: bool = False,
    ) -> None:
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._sparse = [False] * len(self._parameters) if sparse is None else list(sparse)
        self._check_parameters()
        self._group = group
        self._graph = self._make_graph(find_unused_parameters, skip_all_reduce_unused_params, static_graph)
        self._caps_bytes = (
            [min(first_bucket_cap_bytes, bucket_cap_bytes), bucket_cap_bytes]
            if isinstance(bucket_cap_bytes, int)
            else list(bucket_cap_bytes)
        )
        self._as_view = gradient_as_bucket_view
        self._hook: CommunicationHook | None = None
        self._hook_state: Any = None
        self._lock = threading.Lock()
        self._phase = _Phase.IDLE
        self._flights: list[Flight | LateFlight] = []
        self._arrival_order: list[int] | None = None
        self._rebuilt = False
        self.synchronizes = True
        self.statistics = IterationStatistics(time.perf_counter())
        self._build_buckets(range(len(self._parameters) - 1, -1, -1))
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_notifier(weakref.ref(self), index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(self._parameters)
        ]
        weakref.finalize(self, _remove, self._handles)

    @property
    def buckets(self) -> Sequence[AnyBucket]:
        """The buckets, in the order in which they are reduced."""
        return self._buckets

    @property
    def names(self) -> Sequence[str]:
        """The parameters' names, by index."""
        return self._names

    @property
    def has_rebuilt_buckets(self) -> bool:
        """Whether the buckets are in the order in which gradients arrived."""
        return self._rebuilt

    def set_static_graph(self) -> None:
        """From now on every backward is like the next one; see `StaticGraph`.

        Raises:
            MisuseError: a backward was reduced already, so it is too late.
        """
        if self._phase is not _Phase.IDLE or self.statistics.finished or self._arrival_order is not None:
            raise MisuseError(
                f"set_static_graph on {self._group.place()}: gradients were reduced before; say it before the first backward, "
                "or pass static_graph=True at construction"
            )
        self._graph = StaticGraph(self._parameters, self._group)

    def check_finalized(self) -> None:
        """Raise if a backward has begun to reduce and has not ended.

        Raises:
            MisuseError: so it is.
        """
        self._check_idle("check_finalized")

    def set_hook(self, hook: CommunicationHook | None, state: Any = None) -> None:
        """Let `hook(state, bucket)` reduce each bucket instead of `all_reduce(AVG)`; None returns to that.

        The hook is called on the thread that runs backward, on every rank in the same order. It gets this rank's gradients,
        undivided, and returns a future of the flat tensor that all ranks shall have.
        """
        self._check_idle("set_hook")
        self._hook, self._hook_state = hook, state

    def prepare_for_backward(self) -> None:
        """Call before each forward whose backward shall be reduced. After the first backward it rebuilds the buckets.

        Raises:
            MisuseError: the previous backward began to reduce and never ended.
        """
        self._check_idle("prepare_for_backward")
        if self.synchronizes and self._arrival_order is not None and not self._rebuilt:
            self._rebuild_buckets(self._arrival_order)
        self.statistics = IterationStatistics(time.perf_counter())

    def close(self) -> None:
        """Take the hooks off the parameters; their gradients stay. The end of the reducer's life does the same."""
        _remove(self._handles)

    # ---- during backward ----

    def _on_gradient(self, index: int, *, defined: bool) -> None:
        """Called by autograd on the thread of backward, as soon as a parameter's gradient is accumulated."""
        if not self.synchronizes:
            self._graph.accumulated(index, defined=defined)
            return
        with self._lock:
            if self._phase is _Phase.IDLE:
                self._begin()
            if self._graph.arrived(index, defined=defined):
                self._mark_ready((index,))

    def _begin(self) -> None:
        """At the first gradient of a backward, before it is marked."""
        self._phase = _Phase.REDUCING
        self.statistics.backward_started = time.perf_counter()
        call_at_the_end(self._end)
        self._mark_ready(self._graph.begin())

    def _mark_ready(self, indices: Sequence[int]) -> None:
        for index in indices:
            try:
                startable = self._readiness.mark_ready(index)
            except MarkedTwiceError:
                raise complaints.marked_twice(self._names[index], self._group.place(), self._graph.advice_twice) from None
            if startable:
                self._start_all(startable)

    def _start_all(self, numbers: range) -> None:
        """See Note [Buckets start in order]: called for bucket 0, 1, 2, ... of every backward."""
        is_last = self._readiness.is_complete
        began = time.perf_counter()
        if is_last:
            self.statistics.last_gradient = began
        for number in numbers:
            self._start(number)
        if is_last:
            self._graph.agree()
            self.statistics.waited_s += time.perf_counter() - began

    def _start(self, number: int) -> None:
        bucket = self._buckets[number]
        if self._graph.may_skip(bucket.indices):
            return
        ready = time.perf_counter()
        bucket.collect(self._graph.unused_here(bucket.indices))
        times = BucketTimes(bucket.nbytes, ready, time.perf_counter())
        self.statistics.buckets.append(times)
        if self._hook is None and isinstance(bucket, SparseBucket) and isinstance(self._group, TorchGroup):
            self._flights.append(LateFlight(bucket, self._group, times))
        else:
            self._flights.append(self._reduce(bucket, number, times))

    def _reduce(self, bucket: AnyBucket, number: int, times: BucketTimes) -> Flight:
        if self._hook is None:
            return Flight(bucket, self._group.all_reduce(bucket.buffer, ReduceOp.AVG, async_op=True).get_future(), times)
        shown = GradBucket(bucket, number, number == len(self._buckets) - 1, self._group)
        future = self._hook(self._hook_state, shown)
        if not isinstance(future, torch._C.Future):  # the base class: what Future.then() returns
            raise MisuseError(
                f"a communication hook must return a torch.futures.Future of the reduced bucket, found "
                f"{type(future).__name__}; see get_future() of a Work"
            )
        return Flight(bucket, future, times, shown)

    def _end(self) -> None:
        """Called by autograd on the thread of backward, when nothing is left to compute; see Note [The outermost backward]."""
        with self._lock:
            self._mark_ready(self._graph.ended())
        if not self._readiness.is_complete:
            raise self._never_ready()
        finalize(self._flights, self.statistics, self._graph.untouched)
        if not self._rebuilt and self._graph.order_recurs:
            self._arrival_order = self._readiness.arrival_order()
        self._reset()

    def _reset(self) -> None:
        self._flights = []
        self._readiness.reset()
        self._graph.forget()
        self._phase = _Phase.IDLE

    # ---- buckets ----

    def _build_buckets(self, order: Sequence[int]) -> None:
        specs = [
            GradientSpec(parameter.numel() * parameter.element_size(), (parameter.dtype, parameter.device), sparse)
            for parameter, sparse in zip(self._parameters, self._sparse, strict=True)
        ]
        assignment = assign_buckets(specs, self._caps_bytes, order)
        self._buckets = [self._make_bucket(entry.indices) for entry in assignment]
        self._readiness = Readiness([bucket.indices for bucket in self._buckets])

    def _make_bucket(self, indices: Sequence[int]) -> AnyBucket:
        parameters, names = [self._parameters[i] for i in indices], [self._names[i] for i in indices]
        if self._sparse[indices[0]]:
            return SparseBucket(indices[0], parameters[0], names[0], self._group)
        return Bucket(indices, parameters, names, self._group, as_view=self._as_view)

    def _make_graph(self, find_unused: bool, skip_unused: bool, static: bool) -> Graph:
        if static:
            return StaticGraph(self._parameters, self._group)
        if find_unused:
            return ChangingGraph(self._parameters, self._group, skip_unused=skip_unused)
        return CompleteGraph()

    def _rebuild_buckets(self, arrival_order: Sequence[int]) -> None:
        """Assign the buckets anew, in the order in which rank 0's gradients arrived. A collective."""
        device = torch.device("cpu") if "cpu" in self._group.device_types else self._parameters[0].device
        order = torch.tensor(arrival_order, dtype=torch.int64, device=device)
        self._group.broadcast(order, 0)
        aliased = [parameter for bucket in self._buckets for parameter, view in _pairs(bucket) if parameter.grad is view]
        self._build_buckets(order.tolist())
        self._move_aliased(aliased)
        self._rebuilt = True

    def _move_aliased(self, aliased: Sequence[torch.Tensor]) -> None:
        """Gradients that were views of old buckets become views of the new ones, with their values."""
        moving = {id(parameter) for parameter in aliased}
        with torch.no_grad():
            for bucket in self._buckets:
                for parameter, view in _pairs(bucket):
                    if id(parameter) in moving and parameter.grad is not None:
                        view.copy_(parameter.grad)
                        parameter.grad = view

    # ---- complaints ----

    def _check_parameters(self) -> None:
        if not self._parameters:
            raise MisuseError("expected at least one parameter that requires a gradient, found none")
        if len(self._sparse) != len(self._parameters):
            raise InvalidArgumentError(
                f"expected a `sparse` flag for each of {len(self._parameters)} parameters, found {len(self._sparse)}"
            )
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if not parameter.requires_grad:
                raise MisuseError(f"parameter '{name}' does not require a gradient; leave it out")

    def _check_idle(self, what: str) -> None:
        if self._phase is not _Phase.IDLE:
            raise complaints.never_ended(what, self._group.place())

    def _never_ready(self) -> MisuseError:
        names = [self._names[index] for index in self._readiness.missing()]
        return complaints.never_ready(names, self._group.place(), self._graph.advice_missing)


def _notifier(reducer: weakref.ref[Reducer], index: int) -> Callable[[torch.Tensor], None]:
    """A parameter's hook. It does not keep the reducer alive, or a model could never be wrapped anew."""

    def notify(parameter: torch.Tensor) -> None:
        living = reducer()
        if living is not None:
            living._on_gradient(index, defined=parameter.grad is not None)

    return notify


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _pairs(bucket: AnyBucket) -> zip[tuple[torch.nn.Parameter, torch.Tensor]]:
    """Parameters with their views; none in a sparse bucket."""
    return zip(bucket.parameters, bucket.views, strict=False)
