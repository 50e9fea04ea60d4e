"""The reducer: averages gradients over the ranks while backward still computes others."""

from __future__ import annotations

import enum
import gc
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from syncline.collectives import InvalidArgumentError, MisuseError, ProcessGroup

from . import complaints
from .arrivals import Arrivals, Backlog
from .bucket import some_are_none
from .bucket_building import BucketBuilder, aliases
from .bucket_reduction import BucketReduction, CommunicationHook
from .delayed import DelayedGraph
from .expectation import Expectation
from .finalize import AnyFuture, Delivered, finalize
from .flight import AnyBucket, Flight
from .graph import CompleteGraph, Graph, UnexpectedGradientError
from .graph_task import current_task
from .hook_placement import HookPlacement
from .outermost_backward import call_at_the_end
from .readiness import MarkedTwiceError, Readiness
from .static_graph import StaticGraph
from .statistics import BucketTimes, IterationStatistics
from .used_parameters import ChangingGraph

DEFAULT_BUCKET_CAP_BYTES = 25 * 1024 * 1024
DEFAULT_FIRST_BUCKET_CAP_BYTES = 1024 * 1024


class _Phase(enum.Enum):
    """Between iterations, or inside a backward whose gradients are being reduced."""

    IDLE = enum.auto()
    REDUCING = enum.auto()


class Reducer:
    """Averages the gradients of some parameters over the ranks of a group, during backward.

    ::

        forward        prepare_for_backward ... watch
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

        delayed: names of parameters that get any number of gradients, or none, until that of `delayed_until` arrives, or
            backward ends; they are reduced last.
        delayed_until: the name of one parameter; None waits for the end of backward.

    Extra memory: the buckets, as large as all gradients together; none beyond the gradients with `gradient_as_bucket_view`.

    Raises:
        MisuseError: there is no parameter, or one needs no gradient.
        InvalidArgumentError: there are more or fewer `sparse` flags than parameters, a name is not among theirs, or
            `delayed_until` comes without `delayed`.
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
        delayed: Sequence[str] = (),
        delayed_until: str | None = None,
    ) -> None:
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        sparse = [False] * len(self._parameters) if sparse is None else list(sparse)
        self._check_parameters(sparse)
        self._group = group
        self._delayed = [self._index(name) for name in delayed]
        self._delayed_until = None if delayed_until is None else self._index(delayed_until)
        if delayed_until is not None and not delayed:
            raise InvalidArgumentError(
                f"delayed_until='{delayed_until}' without delayed: name what waits for it, or leave it out"
            )
        self._graph = self._make_graph(find_unused_parameters, skip_all_reduce_unused_params, static_graph)
        self._builder = BucketBuilder(
            self._names,
            self._parameters,
            group,
            caps_bytes=_caps_bytes(bucket_cap_bytes, first_bucket_cap_bytes),
            sparse=sparse,
            delayed=self._delayed,
            as_view=gradient_as_bucket_view,
        )
        self._reduction = BucketReduction(group)
        self._expectation = Expectation()
        self._lock = threading.Lock()
        self._phase = _Phase.IDLE
        self._ended = 0
        self._flights: list[Flight] = []
        self._delivered: Delivered | None = None
        self._others: list[AnyFuture] = []
        self._arrival_order: list[int] | None = None
        self._has_accumulated = False
        self._rebuilt = False
        self.statistics = IterationStatistics(time.perf_counter())
        self._hooks = HookPlacement(
            self._parameters,
            in_place=gradient_as_bucket_view,
            wake=self._on_arrivals,
            settled=self._on_settled,
            passed=self._on_outputs,
        )
        self._backlog = Backlog()
        self._held: list[torch.Tensor | None] = []
        self._graph_task = -1
        self._use(self._builder.build(range(len(self._parameters) - 1, -1, -1)))
        weakref.finalize(self, self._hooks.close)

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

    @property
    def hook(self) -> tuple[CommunicationHook | None, Any]:
        """What `set_hook` was given last, and its state."""
        return self._reduction.hook, self._reduction.hook_state

    # ---- settings ----

    def set_static_graph(self) -> None:
        """From now on every backward is like the next one; see `StaticGraph`.

        Raises:
            MisuseError: a backward has given gradients already, reduced or not, so it is too late.
        """
        if self._phase is not _Phase.IDLE or self._has_accumulated:
            raise MisuseError(
                f"set_static_graph on {self._group.place()}: a backward has given gradients before; say it before the first "
                "backward, or pass static_graph=True at construction"
            )
        self._graph = self._with_delay(StaticGraph(self._parameters, self._group))

    def set_hook(self, hook: CommunicationHook | None, state: Any = None) -> None:
        """Let `hook(state, bucket)` reduce each bucket instead of `all_reduce(AVG)`; None returns to that.

        The hook is called on the thread that runs backward, on every rank in the same order. It gets this rank's gradients,
        undivided, and returns a future of the flat tensor that all ranks shall have.
        """
        self._check_idle("set_hook")
        self._reduction.hook, self._reduction.hook_state = hook, state

    def divide_by(self, count: int | None) -> None:
        """Let `all_reduce` divide sums by this number, the same on every rank; None divides by the number of ranks."""
        self._check_idle("divide_by")
        self._reduction.divide_by(count)

    def on_delivery(self, callback: Delivered | None) -> None:
        """Call back at the end of backward with the parameters of each bucket that have their reduced gradients.

        The callback runs on the thread of backward, while later buckets may still be in flight.
        """
        self._check_idle("on_delivery")
        self._delivered = callback

    # ---- around a backward ----

    def prepare_for_backward(self, *, synchronizes: bool = True) -> None:
        """Call before each forward. After the first backward it rebuilds the buckets, which is a collective.

        Args:
            synchronizes: whether the backward of this forward shall be reduced. If not, it adds to this rank's own gradients,
                and a later one reduces what was added up. See `Expectation` for several forwards before a backward.

        Raises:
            MisuseError: the previous backward began to reduce and never ended, or another reducer has some of the parameters
                and one of both averages them in views of its buckets.
        """
        self._check_idle("prepare_for_backward")
        self._check_undisturbed()
        self._look_back()
        self._expectation.forward(synchronizes)
        if synchronizes:
            self._rebuild_if_due()
            self.statistics = IterationStatistics(time.perf_counter())
        self._hooks.before_forward(self._buckets, self._graph, self._arrival_order, synchronizes=synchronizes)

    @property
    def wants_outputs(self) -> bool:
        """Whether `watch` is of any use; once it is not, it never is again."""
        return self._hooks.want_outputs

    def watch(self, outputs: Iterable[torch.Tensor]) -> None:
        """Call after each forward, with all tensors from which a backward may begin: a hook for each bucket will do then.

        Without it each parameter keeps a hook of its own, which takes longer; see Note [One hook for a bucket].
        """
        self._hooks.after_forward(self._buckets, self._graph, outputs)

    def withdraw(self) -> None:
        """The forward that was prepared for last raised an error, and there will be no backward."""
        self._look_back()
        self._expectation.withdraw()
        self._hooks.withdraw()

    def wait_at_end(self, futures: Sequence[AnyFuture]) -> None:
        """Let the end of the next backward that is reduced wait for these, too."""
        self._others += futures

    @property
    def needs_everyone(self) -> bool:
        """Whether the next backward cannot do with ranks that `sit_out`."""
        return self._graph.needs_everyone

    def sit_out(self) -> None:
        """Take part in a forward and backward of the other ranks without gradients; those of this rank stay as they are.

        It mirrors `prepare_for_backward` and all that a backward communicates, with zeros, and waits for it.
        """
        self._check_idle("sit_out")
        self._look_back()
        self._rebuild_if_due()
        with self._lock:
            self._phase = _Phase.REDUCING
            self.statistics = IterationStatistics(time.perf_counter())
            self._graph.sit_out()
            for number in range(len(self._buckets)):
                self._start(number, empty=True)
            self._graph.agree()
        finalize(self._flights, self.statistics, frozenset)
        self._expectation.fulfil()
        if self._will_rebuild:
            self._arrival_order = [index for bucket in self._buckets for index in bucket.indices]
        self._reset()

    def check_finalized(self) -> None:
        """Raise if a backward has begun to reduce and has not ended.

        Raises:
            MisuseError: so it is.
        """
        self._check_idle("check_finalized")

    def close(self) -> None:
        """Take the hooks off the parameters; their gradients stay. The end of the reducer's life does the same."""
        self._hooks.close()

    # ---- during backward ----

    def _on_arrivals(self, arrivals: Arrivals) -> None:
        """Called on the thread of backward as soon as gradients are accumulated; see Note [What one gradient costs]."""
        self._has_accumulated = True
        if not self._expectation.is_due:
            if not (self._hooks.precede_gradients and self._graph.minds_undefined):
                self._accumulate(arrivals.take())
            return
        with self._lock:
            if self._phase is _Phase.IDLE:
                self._begin()
            self._look_at_backlog(arrivals)
            if arrivals.are_settled:
                self._look_at(arrivals.take())
            elif arrivals.suffice:
                self._backlog.add(arrivals)
                if not self._will_rebuild and arrivals.indices[-1] not in self._hooks.whole:
                    self._hooks.follow(arrivals.indices[-1])

    def _on_settled(self) -> None:
        """Called on the thread of backward when all hooks on a parameter have run; see Note [After all hooks]."""
        with self._lock:
            self._look_at_backlog()

    def _on_outputs(self) -> None:
        """Called on the thread of backward when that goes through outputs of a forward, before any gradient.

        If no hooked parameter is reached, it begins when it ends: no sooner, for it may fail first, or run a checkpoint's
        forward. Callbacks run in order: this one before that of a reduction that begins after it was registered.
        """
        if self._phase is _Phase.IDLE and self._hooks.pass_outputs(self._buckets, self._graph):
            ended = self._ended
            call_at_the_end(lambda: self._end_unless(ended))

    def _end_unless(self, ended: int) -> None:
        if self._phase is _Phase.IDLE and self._expectation.is_due and self._ended == ended:
            with self._lock:
                self._prepare_to_reduce()
            self._end()

    def _look_at_backlog(self, current: Arrivals | None = None) -> None:
        if self._hooks.precede_gradients and current_task() != self._graph_task:
            # It is within the backward, maybe within a user's hook on a gradient that is noted and not there yet.
            if self._phase is _Phase.REDUCING:
                self._hooks.meet_inner_backward()
            return
        for indices in self._backlog.take(current):
            self._look_at(indices)

    def _look_back(self) -> None:
        """At gradients that were not reduced, and were not there when they were noted."""
        for indices in self._hooks.left_over():
            self._accumulate(indices)

    def _accumulate(self, indices: Sequence[int]) -> None:
        try:
            self._graph.accumulated(indices, self._undefined(indices))
        except UnexpectedGradientError as error:
            raise complaints.not_expected(self._names[error.index], self._group.place()) from None
        self._held = []

    def _begin(self) -> None:
        """At the first gradient that is seen of a backward, before any is marked."""
        call_at_the_end(self._end)
        self._prepare_to_reduce()

    def _prepare_to_reduce(self) -> None:
        if not self._buckets:
            raise complaints.no_buckets(self._group.place())
        self._phase = _Phase.REDUCING
        self._graph_task = current_task()
        self.statistics.backward_started = time.perf_counter()
        absent = self._graph.begin()
        # As long as the order of arrival is to be learnt for buckets, each gradient is looked at when it comes.
        for number, arrivals in self._hooks.noted.items():
            arrivals.expect(1 if self._will_rebuild else self._graph.needed(self._buckets[number].indices))
        self._hooks.begin(absent)
        self._mark_ready(absent)

    @property
    def _will_rebuild(self) -> bool:
        return self._graph.order_recurs and not self._rebuilt

    def _look_at(self, indices: Sequence[int]) -> None:
        if indices[0] in self._hooks.whole:
            for index in indices:
                self._look_at_whole(index)
            return
        self._arrived(indices)
        self._held = []

    def _arrived(self, indices: Sequence[int]) -> None:
        self._mark_ready(self._final(indices, self._undefined(indices)))

    def _final(self, indices: Sequence[int], undefined: Collection[int]) -> Sequence[int]:
        try:
            return self._graph.arrived(indices, undefined)
        except UnexpectedGradientError as error:
            raise complaints.not_expected(self._names[error.index], self._group.place()) from None

    def _look_at_whole(self, index: int) -> None:
        whole = self._hooks.whole
        try:
            ready = whole.arrive(index)
            if ready:
                final, number = self._final(ready, ()), whole.number_of(index)
                self._mark_ready(final, all_of=number if len(final) == len(self._buckets[number].indices) else None)
        finally:
            whole.forget_seen(index)

    def _undefined(self, indices: Sequence[int]) -> Collection[int]:
        if not self._graph.minds_undefined:
            return ()
        # Held until a bucket has collected them: it reads them next, and else Python would make a new object for each.
        self._held = [self._parameters[index].grad for index in indices]
        if not some_are_none(self._held):
            return ()
        return [index for index, gradient in zip(indices, self._held, strict=True) if gradient is None]

    def _mark_ready(self, indices: Sequence[int], *, all_of: int | None = None) -> None:
        if not indices:
            return
        try:
            startable = self._readiness.mark_ready(indices, all_of=all_of)
        except MarkedTwiceError as error:
            name = self._names[error.index]
            raise complaints.marked_twice(name, self._group.place(), self._graph.advice_twice) from None
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

    def _start(self, number: int, *, empty: bool = False) -> None:
        bucket = self._buckets[number]
        if self._graph.may_skip(bucket.indices):
            return
        ready = time.perf_counter()
        if empty:
            bucket.collect_nothing()
        else:
            bucket.collect(self._graph.unused_here(bucket.indices))
        self._held = []
        times = BucketTimes(bucket.nbytes, ready, time.perf_counter())
        self.statistics.buckets.append(times)
        self._flights.append(self._reduction.start(bucket, number, lambda: self._is_last(number), times))
        self._hooks.whole.remember(number, by_hook=self._reduction.hook is not None)

    def _is_last(self, number: int) -> bool:
        """Whether no later bucket is reduced in this backward; the same on every rank."""
        return all(self._graph.may_skip(bucket.indices) for bucket in self._buckets[number + 1 :])

    def _end(self) -> None:
        """Called by autograd on the thread of backward, when nothing is left to compute; see Note [The outermost backward]."""
        with self._lock:
            for indices in self._hooks.left_over():
                self._look_at(indices)
            for rest in self._hooks.whole.rest():
                self._arrived(rest)
            self._mark_ready(self._graph.ended())
        if not self._readiness.is_complete:
            raise self._never_ready()
        self._hooks.whole.check()
        self._mark_ready(self._hooks.whole.unforeseen())  # they are ready already, so any is an error
        finalize(self._flights, self.statistics, self._graph.untouched, delivered=self._delivered, others=self._others)
        if self._arrival_order is None or self._will_rebuild:
            self._arrival_order = self._readiness.arrival_order()
        self._others = []
        self._expectation.fulfil()
        self._ended += 1
        self._hooks.end(self._buckets, self._graph)
        self._reset()

    def _reset(self) -> None:
        self._flights = []
        self._backlog.clear()
        self._hooks.whole.forget()
        self._readiness.reset()
        self._graph.forget()
        self._phase = _Phase.IDLE

    # ---- buckets ----

    def _use(self, buckets: list[AnyBucket]) -> None:
        self._buckets = buckets
        self._readiness = Readiness([bucket.indices for bucket in buckets])
        self._hooks.note_each(buckets, self._graph)

    def _rebuild_if_due(self) -> None:
        """Once, build the buckets anew in the order in which rank 0's gradients arrived. A collective.

        The old ones are given up first: to have both for a moment was the peak of a whole training's memory.
        """
        if not self._will_rebuild or self._arrival_order is None:
            return
        device = torch.device("cpu") if "cpu" in self._group.device_types else self._parameters[0].device
        order = torch.tensor(self._arrival_order, dtype=torch.int64, device=device)
        self._group.broadcast(order, 0)
        kept = aliases(self._buckets)
        self._buckets = []
        self._use(self._builder.build(order.tolist(), kept))
        self._rebuilt = True

    # ---- the graph ----

    def _make_graph(self, find_unused: bool, skip_unused: bool, static: bool) -> Graph:
        if static:
            return self._with_delay(StaticGraph(self._parameters, self._group))
        if find_unused:
            return self._with_delay(ChangingGraph(self._parameters, self._group, skip_unused=skip_unused))
        return self._with_delay(CompleteGraph())

    def _with_delay(self, graph: Graph) -> Graph:
        return DelayedGraph(graph, self._delayed, self._delayed_until) if self._delayed else graph

    # ---- complaints ----

    def _check_parameters(self, sparse: Sequence[bool]) -> None:
        if not self._parameters:
            raise MisuseError("expected at least one parameter that requires a gradient, found none")
        if len(sparse) != len(self._parameters):
            raise InvalidArgumentError(
                f"expected a `sparse` flag for each of {len(self._parameters)} parameters, found {len(sparse)}"
            )
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if not parameter.requires_grad:
                raise MisuseError(f"parameter '{name}' does not require a gradient; leave it out")

    def _index(self, name: str) -> int:
        if name not in self._names:
            raise InvalidArgumentError(f"expected names of parameters that are averaged, found '{name}'")
        return self._names.index(name)

    def _check_idle(self, what: str) -> None:
        if self._phase is not _Phase.IDLE:
            raise complaints.never_ended(what, self._group.place())

    def _check_undisturbed(self) -> None:
        if not self._hooks.are_disturbed():
            return
        # The other may be long forgotten; if another thread collects, this returns at once.
        for pause_s in (0.01, 0.05, 0.25):
            gc.collect()
            if not self._hooks.are_disturbed():
                return
            time.sleep(pause_s)
        raise complaints.averaged_twice(self._group.place())

    def _never_ready(self) -> MisuseError:
        names = [self._names[index] for index in self._readiness.missing()]
        return complaints.never_ready(names, self._group.place(), self._graph.advice_missing)


def _caps_bytes(cap_bytes: int | Sequence[int], first_cap_bytes: int) -> list[int]:
    return [min(first_cap_bytes, cap_bytes), cap_bytes] if isinstance(cap_bytes, int) else list(cap_bytes)
