"""Average gradients over the ranks while backward still computes other gradients."""

from __future__ import annotations

import functools
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from typing_extensions import override

from syncline.collectives import DisagreementError, InvalidArgumentError, MisuseError, ProcessGroup
from syncline.collectives.internal import Inherited, message_device, not_the_rank, tell_in_forks

from . import error_messages
from .arrival_order import ArrivalOrder
from .backward_reduction import BackwardReduction
from .bucket import Layout
from .bucket_building import BucketBuilder, gradients_as_views
from .bucket_reduction import BucketReduction, CommunicationHook
from .delayed_usage import DelayedUsage
from .dynamic_usage import DynamicUsage
from .finalize import AnyFuture, OnDelivery
from .gradient_hooks import GradientHooks
from .named_parameters import NamedParameters
from .pending_gradients import PendingBucket, PendingGradients
from .readiness import MarkedTwiceError, Readiness
from .sparse_bucket import AnyBucket
from .static_usage import StaticUsage
from .statistics import IterationStatistics
from .sync_policy import GradSyncPolicy
from .torch_internals import (
    call_at_backward_end,
    call_at_outer_end,
    current_backward,
    in_compiled_autograd,
    runs_backward,
)
from .usage import CompleteUsage, UnexpectedGradientError, UsageModel
from .users_hooks import UsersHooks, is_worth_a_look

logger = logging.getLogger("syncline.reducer")

DEFAULT_BUCKET_CAP_BYTES = 25 * 1024 * 1024
DEFAULT_FIRST_BUCKET_CAP_BYTES = 1024 * 1024

T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])


def _noting_errors(method: Method) -> Method:
    @functools.wraps(method)
    def call(reducer: Reducer, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(reducer, *args, **kwargs)
        except Exception as error:
            reducer.note_error(error)
            raise

    return call  # type: ignore[return-value]  # the method's own signature


class _BackwardEnd:
    """Autograd calls `end` when a backward ends. If the backward fails, autograd drops this object."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def end(self) -> None:
        self._run(self._end)

    def _end(self) -> None:
        # A user's hook may run this backward inside another backward, for example for an auxiliary loss. Then the missing
        # gradients come in the other backward.
        if not self._reducer._has_all_gradients() and call_at_outer_end(self.end):
            return
        self._reducer._check_all_gradients()
        # Queue `finish` only now, so that it runs after `end` of all reducers.
        call_at_backward_end(self.finish)

    def finish(self) -> None:
        self._run(self._reducer._finish)

    def _run(self, step: Callable[[], None]) -> None:
        if self._reducer.is_in_fork:  # the fork may have been made within this backward
            return
        try:
            step()
        # The error's traceback may keep this object alive. So tell all reducers here that this backward does not go on.
        except BaseException:
            self._reducer._backward_end = lambda: None
            raise


class Reducer(Inherited):
    """Averages the gradients of some parameters over the ranks of a group, during backward.

        forward        prepare_for_backward
        backward       gradient i has come ──► its bucket has as many as it needs ──► readiness: bucket k may start:
                       collect, then hook or all_reduce(AVG)      (communication overlaps further backward)
        its end        finalize: wait for the buckets in order, write the results back

    By default, every backward with averaging must reach all parameters, on every rank. If a backward misses some parameters on
    one rank, this rank raises an error that names them. If a backward reaches no parameter on one rank, the other ranks wait
    until the group's timeout, and raise an error that names this rank.

    Args:
        named_parameters: pairs of a name and a parameter that requires a gradient, the same on all ranks.
        group: the group whose ranks average their gradients.
        bucket_cap_bytes: the size limit of a bucket, which only the last gradient of the bucket may exceed. A list has the
            limits of the first, second, ... bucket; its last limit also applies to further buckets.
        first_bucket_cap_bytes: the limit of the first bucket. A small first bucket starts communication early. No effect if
            `bucket_cap_bytes` is a list, or is smaller.
        gradient_as_bucket_view: make `parameter.grad` a view of the bucket, to save a copy and memory.
        sparse: for each parameter, whether its gradients are sparse (COO). None: no gradient is sparse.
        find_unused_parameters: a backward may reach only some of the parameters (at least one), and different parameters on
            each rank. If no rank uses a parameter, its gradient stays unchanged.
        skip_all_reduce_unused_params: do not reduce a bucket if no rank uses its parameters. Requires `find_unused_parameters`.
        static_graph: promise that every backward with averaging has the graph of the first backward. See `StaticUsage`. As in
            torch, this option overrides `find_unused_parameters`.
        delayed: names of parameters that may get no gradient, one gradient or several gradients in a backward. The reducer
            waits until the gradient of `delayed_until` arrives or backward ends. Then it reduces the gradients of the delayed
            parameters, after all other buckets.
        delayed_until: the name of a parameter. None: the delayed parameters wait for the end of backward.
        unreduced: names of parameters whose gradients are not averaged yet, from an earlier reducer's method `unreduced`. The
            first backward with averaging includes these gradients, also if this backward does not reach the parameters.

    Attributes:
        statistics: the times of the latest iteration.
        first_bucket_sizes: the sizes in bytes of the buckets that the constructor plans.
        seems_static: whether all backwards with averaging so far have left out the same parameters on this rank.
        is_in_fork: whether this process is a forked child of the rank's process. In a child, gradients are not averaged.
        reductions: the number of backwards with averaging so far, the same on all ranks.

    Extra memory: the size of all gradients. None with `gradient_as_bucket_view`. Less on CPUs, where most large gradients share
    the buckets' memory.

    Raises:
        MisuseError: there is no parameter, or a parameter does not require a gradient.
        InvalidArgumentError: `sparse` does not fit the parameters, a size limit is below 0, a delayed name is unknown, or
            `delayed_until` is given without `delayed`. Or `skip_all_reduce_unused_params` is given without
            `find_unused_parameters`, or with `static_graph`.
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
        unreduced: Collection[str] = (),
    ) -> None:
        if delayed_until is not None and not delayed:
            raise InvalidArgumentError(f"delayed_until='{delayed_until}' without delayed: name what waits, or leave it out")
        if skip_all_reduce_unused_params and (static_graph or not find_unused_parameters):
            raise InvalidArgumentError(
                "skip_all_reduce_unused_params=True means something only with find_unused_parameters=True and without "
                "static_graph=True: pass it so, or leave it out"
            )
        self._group = group
        self._find_unused, self._skip_unused, self._is_static = (
            find_unused_parameters,
            skip_all_reduce_unused_params,
            static_graph,
        )
        self._as_view = gradient_as_bucket_view
        self._unreduced = set(unreduced)  # parameters whose gradients have come since the last reduced backward
        self._reduction = BucketReduction(group)
        self._sync_policy = GradSyncPolicy()
        self._lock = threading.Lock()
        # The backward that is being reduced; None between iterations.
        self._running: BackwardReduction | None = None
        # A weak reference to the object that autograd calls at the end of this backward. Autograd holds the object.
        self._backward_end: Callable[[], _BackwardEnd | None] = lambda: None
        self._on_delivery: OnDelivery | None = None
        self._on_iteration: Callable[[IterationStatistics], None] | None = None
        self._on_begin: Callable[[], None] | None = None
        self._extra_futures: list[AnyFuture] = []
        self._latest_error: str | None = None
        self._has_accumulated = False
        self._counts_at_end = False
        self.is_in_fork = False
        self.statistics = IterationStatistics(time.perf_counter())
        self.reductions = 0
        caps_bytes = _caps_bytes(bucket_cap_bytes, first_bucket_cap_bytes)
        self._set_up(NamedParameters(named_parameters, sparse), caps_bytes, delayed, delayed_until)
        self._count_gradients_of(self._unreduced)
        tell_in_forks(self)

    def _set_up(
        self, named: NamedParameters, caps_bytes: Sequence[int], delayed: Sequence[str], delayed_until: str | None
    ) -> None:
        self._named = named
        self._parameters = named.parameters
        self._delayed = [named.index(name) for name in delayed]
        self._delayed_until = None if delayed_until is None else named.index(delayed_until)
        self._usage = self._make_usage()
        self._builder = BucketBuilder(
            named.names,
            named.parameters,
            list(map(Layout.of, named.parameters)),
            self._group,
            caps_bytes=caps_bytes,
            sparse=named.sparse,
            delayed=self._delayed,
            as_view=self._as_view,
        )
        self._arrival_order = ArrivalOrder(len(self._parameters))
        self._absent: Sequence[int] | None = None
        self.seems_static = True
        self._buckets: list[AnyBucket] | None = None
        self._hooks = GradientHooks(
            self._parameters,
            self._group,
            delayed=self._delayed,
            reads_in_place=self._as_view,
            wake=self._on_wake,
            node_done=self._on_node_done,
            retire=self._may_retire,
        )
        self._users_hooks = UsersHooks(named.names, self._parameters, self._group.place())
        self._close_hooks = weakref.finalize(self, _close, self._hooks, self._users_hooks)
        members = self._builder.assign_first()
        self.first_bucket_sizes = [self._builder.nbytes(of_bucket) for of_bucket in members]
        self._watch(members)

    @property
    def buckets(self) -> Sequence[AnyBucket]:
        """The buckets, in the order in which they are reduced. Empty before the first forward or backward builds them."""
        return self._buckets or ()

    @property
    def names(self) -> Sequence[str]:
        """The names of the parameters. A parameter's index is its position in this list."""
        return self._named.names

    @property
    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The parameters, in the order of `names`. A parameter's index is its position in this list."""
        return self._parameters

    @property
    def absent(self) -> Sequence[int]:
        """The indices of the parameters that the latest backward with averaging did not reach on this rank.

        Always empty without `find_unused_parameters` and `static_graph`, because then every backward must reach every
        parameter.
        """
        return self._absent or ()

    @property
    def arrival_order(self) -> Sequence[int] | None:
        """The parameters' indices, in the order in which their gradients arrived on this rank. None if the order is not known.

        The first backward with averaging shows the order. With `find_unused_parameters`, the order is never known. When the
        ranks build the buckets again, all of them use the order of rank 0.
        """
        return self._arrival_order.learned

    @property
    def latest_error(self) -> str | None:
        """The type and text of the latest error during training, for logs. None if there was no error."""
        return self._latest_error

    def explained(self, error: DisagreementError, where: str) -> DisagreementError:
        """Return a clearer error if the ranks disagree because some of them ran an additional backward.

        Call this method with the error of a collective outside of backward, such as a broadcast of buffers. If the error's text
        shows an additional backward, the result is a copy of `error`. The text of the copy also names the additional backward
        as the cause, and says how to correct the script. Otherwise the result is `error` itself.

        Args:
            error: the error of the collective.
            where: the place of the collective in the program, for the text, such as "a forward of the wrapped module".
        """
        is_stray = error_messages.is_of_a_stray_backward(str(error))
        return error_messages.disagreement(error, where) if is_stray else error

    def note_error(self, error: Exception) -> None:
        """Store the type and text of an error as `latest_error`."""
        self._latest_error = f"{type(error).__name__}: {error}"

    @property
    def has_rebuilt_buckets(self) -> bool:
        """Whether the buckets are in the order in which gradients arrive. Always False with `find_unused_parameters`."""
        return self._arrival_order.is_used

    @property
    def hook(self) -> tuple[CommunicationHook | None, Any]:
        """The communication hook and its state, as given to `set_hook`. Without a hook, the first item is None."""
        return self._reduction.hook, self._reduction.hook_state

    # ---- settings ----

    @_noting_errors
    def set_static_graph(self) -> None:
        """After construction, promise that all later backwards have the graph of the next backward.

        The call has the effect of the option `static_graph`. See `StaticUsage`.

        Raises:
            MisuseError: a backward has already computed gradients.
        """
        if self._running is not None or self._has_accumulated:
            raise MisuseError(
                f"set_static_graph on {self._group.place()} should be called before training loop starts: a backward has given "
                "gradients. Call it before the first backward, or pass static_graph=True at construction"
            )
        self._is_static = True
        self._usage = self._make_usage()
        self._count_gradients_of(self._unreduced)  # those of an earlier reducer

    def set_hook(self, hook: CommunicationHook | None, state: Any = None) -> None:
        """Set the communication hook, which reduces each bucket in place of `all_reduce(AVG)`. None removes the hook.

        The reducer calls `hook(state, bucket)` on the thread of backward, for the same buckets in the same order on every rank.
        The bucket contains this rank's own gradients, not divided by the number of ranks. The hook returns a future of the
        reduced bucket, one flat tensor. The hook must not call this reducer.

        Raises:
            MisuseError: a backward is running or has failed.
        """
        self._check_idle("set_hook")
        # A hook may keep the bucket's memory, so no gradient may stay there.
        self._release_gradients()
        self._reduction.hook, self._reduction.hook_state = hook, state

    def divide_by(self, count: int | None) -> None:
        """Set the number by which `all_reduce` divides the sum of gradients. None restores the default, the number of ranks.

        For example, 1 gives sums instead of averages. The number must be the same on every rank. A communication hook must do
        its own division, so this number has no effect on a hook.

        Raises:
            InvalidArgumentError: the number is below 1.
            MisuseError: a backward is running or has failed.
        """
        self._check_idle("divide_by")
        if count is not None and count < 1:
            raise InvalidArgumentError(f"divide_by: expected a number of at least 1, or None, found {count}")
        self._reduction.divide_by(count)

    def on_delivery(self, callback: OnDelivery | None) -> None:
        """Set a function that gets each bucket's parameters as soon as their gradients are averaged. None removes the function.

        For example, the function can step an optimizer for these parameters. At the end of backward, the reducer waits for the
        buckets in order. After each bucket, the reducer calls the function with a list of the bucket's parameters, except
        parameters whose gradients stay unchanged. The function runs on the thread of backward, while later buckets may still be
        in reduction.

        Raises:
            MisuseError: a backward is running or has failed.
        """
        self._check_idle("on_delivery")
        self._on_delivery = callback

    def on_iteration(self, callback: Callable[[IterationStatistics], None] | None) -> None:
        """Set a function that gets the times of each iteration, after all gradients are averaged. None removes the function.

        The function runs on the thread of backward, on all ranks after the same backward. So the function may issue
        collectives. `shadow_backward` and `reduce_gradients` do not call the function, so their callers must issue the
        function's collectives. The change takes effect at once, even during a backward.
        """
        self._on_iteration = callback

    def on_begin(self, callback: Callable[[], None] | None) -> None:
        """Set a function that runs when a backward with averaging begins, before it communicates. None removes the function.

        The function runs on the thread of backward, on all ranks before the collectives of the same backward. So the function
        may issue collectives. `shadow_backward` and `reduce_gradients` do not call the function, so their callers must issue
        the function's collectives.

        Raises:
            MisuseError: a backward is running or has failed.
        """
        self._check_idle("on_begin")
        self._on_begin = callback

    # ---- around a backward ----

    @_noting_errors
    def prepare_for_backward(self, *, synchronizes: bool = True) -> None:
        """Prepare the reducer for a backward. Call this method before each forward.

        Within a backward that already averages gradients, the method does nothing, because a checkpoint runs forwards again.

        The first call with `synchronizes=True` builds the buckets. When a backward has shown the order in which gradients
        arrive, the next call with `synchronizes=True` builds the buckets again, in this order. With `find_unused_parameters`,
        no call builds the buckets again. A call that builds buckets is a collective.

        Args:
            synchronizes: whether the backward of this forward averages gradients over the ranks. If False, the backward only
                adds to this rank's own gradients, and a later backward averages the sum. See `GradSyncPolicy`.

        Raises:
            GroupClosedError: `synchronizes` is True, and this process is a forked child of the rank.
            MisuseError: the previous backward began to average gradients and never ended. Or another reducer of the same
                parameters is in use; see `GradientHooks.take_over`.
        """
        # A fork, such as a data loader's worker, may run the model. The fork has no hooks, so there is nothing to prepare.
        if self.is_in_fork and not synchronizes:
            return
        # A checkpoint runs the forward again, within the backward that this forward was prepared for.
        if self._is_within_backward:
            return
        self._check_idle("prepare_for_backward")
        self._take_over()
        self._count_unsynchronized()
        self._sync_policy.forward(synchronizes)
        if synchronizes:
            self._build_if_due()
            self.statistics = IterationStatistics(time.perf_counter())

    def rebuild_buckets(self) -> bool:
        """Build the buckets now, if the next `prepare_for_backward` would build them. Otherwise do nothing.

        A call that builds buckets is a collective.

        Returns:
            True if this call has built the buckets in the order in which gradients arrive. False if this call has built buckets
            before the order is known, or has built none.

        Raises:
            MisuseError: a backward is running or has failed.
        """
        self._check_idle("rebuild_buckets")
        before = self.has_rebuilt_buckets
        self._build_if_due()
        return self.has_rebuilt_buckets and not before

    def change_bucket_caps(self, caps_bytes: Sequence[int]) -> None:
        """Change the size limits of the buckets. The next forward whose backward averages gradients builds new buckets.

        Every rank calls this method between the same two backwards, with the same limits.

        Args:
            caps_bytes: the limits of the first, second, ... bucket. The last limit also applies to further buckets.

        Raises:
            MisuseError: a backward is running or has failed. Or no backward has shown the order in which gradients arrive (with
                `find_unused_parameters`, no backward ever does).
        """
        self._check_idle("change_bucket_caps")
        if self._arrival_order.learned is None:
            raise MisuseError(
                f"change_bucket_caps on {self._group.place()}: the order in which gradients arrive is not known; call it after "
                "a reduced backward, without find_unused_parameters"
            )
        self._builder = replace(self._builder, caps_bytes=list(caps_bytes))
        self._arrival_order.is_used = False

    def change_parameters(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        *,
        sparse: Sequence[bool] | None = None,
        bucket_cap_bytes: Sequence[int],
        delayed: Sequence[str] = (),
        delayed_until: str | None = None,
    ) -> None:
        """Average the gradients of other parameters from now on, because the model has changed.

        Every rank calls this method with the same parameters, before a forward. The reducer forgets what it knows of earlier
        backwards, so the next backward counts as the first backward. If a parameter already has a gradient, the next reduction
        includes this gradient. The arguments have the same meaning as in the constructor, but `bucket_cap_bytes` must be a
        list.

        Raises:
            MisuseError: a backward is running or has failed, there is no parameter, or a parameter does not require a gradient.
            InvalidArgumentError: `sparse` does not fit the parameters, or a delayed name is unknown.
        """
        self._check_idle("change_parameters")
        named = NamedParameters(named_parameters, sparse)
        self._count_unsynchronized()
        self._release_gradients()
        self._close_hooks()
        self._set_up(named, bucket_cap_bytes, delayed, delayed_until)
        self._count_gradients_of(named.names)

    def _count_gradients_of(self, names: Collection[str]) -> None:
        """Treat gradients that these parameters already have as new gradients, so that they are part of the next reduction."""
        found = enumerate(zip(self._named.names, self._parameters, strict=True))
        there = [index for index, (name, parameter) in found if name in names and parameter.grad is not None]
        self._usage.accumulated(there, ())

    def unreduced(self) -> set[str]:
        """Return the names of the parameters whose gradients are not averaged yet, for example after a backward in `no_sync`.

        These parameters got gradients after this rank's latest backward with averaging. `shadow_backward` does not average
        these gradients. During a backward with averaging, the result leaves out parameters that got gradients only in this
        backward.
        """
        self._count_unsynchronized()
        return set(self._unreduced)

    @property
    def has_local_gradients(self) -> bool:
        """Whether this rank has gradients that are not averaged yet, for example from a backward in `no_sync`."""
        return bool(self.unreduced())

    def find_nodes_again(self) -> None:
        """Register the reducer's hooks in autograd's graph again.

        Call this method after parameters were converted to another dtype or device and back. Such parameters have new nodes in
        the graph, and the reducer's hooks are on the old nodes.

        Raises:
            MisuseError: a backward is running or has failed.
        """
        self._check_idle("find_nodes_again")
        self._count_unsynchronized()
        self._usage.find_nodes_again()
        self._users_hooks.find_nodes_again()
        # If another reducer averages these parameters now, the hooks are off, and `_take_over` registers them later.
        if not self._hooks.are_off:
            self._hooks.register(self._pending)

    def cancel_forward(self) -> None:
        """Undo the latest `prepare_for_backward`, because the forward failed and no backward will follow."""
        # A checkpoint also stops a forward by an error, when the forward has recomputed enough.
        if self._is_within_backward:
            return
        self._count_unsynchronized()
        self._sync_policy.cancel_forward()

    def keep_local(self, is_local: bool) -> None:
        """Set whether a backward without a new forward, such as a second backward through one graph, skips averaging.

        True: such a backward only adds to this rank's gradients, as in `no_sync`. False: such a backward averages gradients,
        unless the latest forward ran with `synchronizes=False`. In both cases, the first backward after a forward with
        `synchronizes=True` averages gradients. See Note [Which backward is reduced] in `sync_policy`.
        """
        self._sync_policy.keep_local(is_local)
        # If a backward without averaging has failed before its end, its gradients are not counted yet. Count them now.
        # Otherwise they would count as gradients of the next backward, which may be averaged.
        self._count_unsynchronized()

    def wait_at_end(self, futures: Sequence[AnyFuture]) -> None:
        """Make the next backward with averaging wait for these futures before it ends.

        For example, DDP passes the futures of a hook that synchronises buffers. If a future fails, the backward raises the
        future's error. A second call adds futures to those of the first call.
        """
        self._extra_futures += futures

    @property
    def needs_everyone(self) -> bool:
        """Whether every rank must itself run the next backward with averaging. If True, `shadow_backward` raises an error.

        With `static_graph=True`, the value is True until the first backward with averaging has ended. In this backward the
        ranks agree on the graph. In all other cases, the value is False.
        """
        return self._usage.needs_everyone

    def shadow_backward(self, *, has_forward: bool = True) -> None:
        """Take part in the collectives of one forward and backward of the other ranks, with zeros as this rank's gradients.

        A rank without inputs calls this method, because the other ranks would otherwise wait for this rank. The method returns
        when the collectives have finished. This rank's own gradients stay unchanged.

        Args:
            has_forward: whether the other ranks have called `prepare_for_backward` before this backward. False for a further
                backward of an earlier forward.

        Raises:
            MisuseError: the backward needs every rank (see `needs_everyone`), or the previous backward never ended.
        """
        self._check_idle("shadow_backward")
        if self.needs_everyone:
            raise error_messages.needs_everyone(self._group.place())
        self._count_unsynchronized()
        # Without a forward, this is a second backward of an earlier forward. `GradSyncPolicy.mark` tells these cases apart.
        if has_forward:
            self._sync_policy.forward(reduces=True)
        self._build_if_due()
        with self._lock:
            self.statistics = IterationStatistics(time.perf_counter())
            self.statistics.backward_started = self.statistics.forward_started
            self._usage.shadow_backward()
            self._running = self._make_running()
            self._running.start_empty()
        self._running.finish()
        self._sync_policy.reduced()
        self.reductions += 1
        if self._learns_order:
            # Every rank needs an order to take part in the rebuild. This rank saw no gradients, so take the buckets' order.
            self._arrival_order.learned = [index for bucket in self.buckets for index in bucket.indices]
        self._reset()

    def reduce_gradients(self, indices: Collection[int]) -> None:
        """Average gradients that this rank already has, without a backward on this rank.

        This method issues the collectives of a backward. At the same time, each other rank must run a backward, or call
        `reduce_gradients` or `shadow_backward`. Then the parameters get the averaged gradients. Autograd, users' hooks and the
        functions of `on_begin` and `on_iteration` do not run.

        Args:
            indices: the parameters that count as used on this rank. If no rank uses a parameter, its gradient stays unchanged.

        Raises:
            MisuseError: the previous backward never ended, or the reducer lacks `find_unused_parameters`, or has `static_graph`
                or `skip_all_reduce_unused_params`.
        """
        self._check_idle("reduce_gradients")
        if not self._find_unused or self._is_static or self._skip_unused:
            raise MisuseError("reduce_gradients needs find_unused_parameters=True, without static_graph and without skipping")
        self._count_unsynchronized()
        self._build_if_due()
        with self._lock, torch.inference_mode(False):
            self.statistics = IterationStatistics(time.perf_counter())
            self.statistics.backward_started = self.statistics.forward_started
            # Earlier backwards need not be counted: `indices` says which gradients there are.
            self._usage.reset()
            self._usage.shadow_backward()
            self._usage.accumulated(list(indices), ())
            self._running = self._make_running()
            self._running.start(range(len(self.buckets)), is_last=True)
        with torch.inference_mode(False):
            self._running.finish(self._on_delivery, self._extra_futures)
        self._sync_policy.reduced()
        self.reductions += 1
        self._extra_futures = []
        self._unreduced.clear()
        self._reset()

    def check_finalized(self) -> None:
        """Raise a MisuseError if a backward has begun to average gradients and has not ended. Otherwise do nothing."""
        self._check_idle("check_finalized")

    @override
    def in_fork(self) -> None:
        """Remove the hooks from the parameters in a forked child process, where gradients are not averaged.

        The child calls this method after the fork, before any other code.
        """
        self.is_in_fork = True
        self._close_hooks()
        self._running = None

    @property
    def has_users_hooks(self) -> bool:
        """Whether users' hooks on parameters see gradients before they are averaged.

        The reducer looks for such hooks only in some backwards; see `is_worth_a_look`. The value is the result of the latest
        look.
        """
        return bool(self._users_hooks.indices)

    def users_hooks_in_words(self) -> str:
        """Return the text of a warning: which parameters have users' hooks that see gradients before they are averaged."""
        return error_messages.sees_own_gradients([self._named.names[index] for index in self._users_hooks.indices])

    def close(self) -> None:
        """Stop averaging gradients for ever: remove the reducer's hooks from the parameters. The gradients stay."""
        self._close_hooks()

    # ---- during backward ----

    @_noting_errors
    def _on_wake(self, bucket: PendingBucket) -> None:
        """Look at the gradients that have come to a bucket. A hook on a parameter calls this method, on the thread of backward.

        See Note [What one gradient costs] in `pending_gradients`.
        """
        # Another reducer has just taken over, in another hook on this gradient. torch still runs the hooks that were taken off.
        if self._hooks.are_off:
            return
        self._has_accumulated = True
        if not self._sync_policy.is_due:
            # This backward is not reduced: its gradients are counted once, at its end.
            if not self._counts_at_end:
                self._counts_at_end = True
                call_at_backward_end(self._count_unsynchronized)
            return
        with self._lock:
            # The first gradient of a reduced backward.
            if self._running is None:
                self._begin()
            # Autograd has dropped the callbacks of the previous backward, so the previous backward has failed.
            elif self._backward_end() is None:
                raise error_messages.backward_never_ended("a gradient came", self._group.place())
            if self._learns_order:
                self._arrival_order.arrived(bucket.indices[-1])
            self._look_at(self._pending.came(bucket, (threading.get_ident(), current_backward())))

    @_noting_errors
    def _on_node_done(self, index: int, bucket: PendingBucket) -> None:
        """If the bucket's gradients have waited for this node, take these gradients.

        A hook on the node calls this method, on the thread of backward.
        """
        with self._lock:
            taken = self._pending.node_done(bucket, index)
            if taken:
                self._process(taken)

    def _look_at(self, buckets: Sequence[tuple[PendingBucket, list[int]]]) -> None:
        for bucket, taken in buckets:
            if taken:
                # From the next backward on, expect this gradient to be the last gradient of its bucket.
                self._hooks.hook_node(taken[-1], bucket)
                self._process(taken)

    def _begin(self) -> None:
        if in_compiled_autograd():
            raise error_messages.compiled_autograd(self._group.place())
        # Without a forward, `prepare_for_backward` was not called, so take over here.
        if not self._sync_policy.has_forward:
            self._take_over()
        if self._on_begin is not None:
            self._on_begin()
        if self._buckets is None:  # no forward was prepared
            self._buckets = self._builder.build([bucket.members for bucket in self._pending])
        # The old buckets were freed, but the new ones could not be allocated.
        if not self._buckets:
            raise error_messages.no_buckets(self._group.place())
        backward_end = _BackwardEnd(self)
        call_at_backward_end(backward_end.end)
        self._backward_end = weakref.ref(backward_end)
        if self.statistics.backward_started:  # a second backward of the same forward: the first has used these statistics
            self.statistics = IterationStatistics(time.perf_counter())
        self.statistics.backward_started = time.perf_counter()
        # A look at all parameters costs time, so the reducer looks seldom, and in the same backwards on all ranks.
        if is_worth_a_look(self.reductions):
            self._users_hooks.look(GradientHooks.__module__)
        self._users_hooks.begin()
        self._running = self._make_running()
        absent = self._usage.begin()
        self.seems_static &= self._absent is None or absent == self._absent
        self._absent = absent
        for pending, bucket in zip(self._pending, self._buckets, strict=True):
            pending.expect(self._usage.needed(bucket.indices), watch_all=self._learns_order)
        self._mark_ready(absent)

    @property
    def _learns_order(self) -> bool:
        """Whether the next buckets will have the order in which the gradients of this backward come."""
        return self._usage.order_recurs and not self._arrival_order.is_used

    def _make_running(self) -> BackwardReduction:
        return BackwardReduction(
            self.buckets,
            self._usage,
            self._reduction,
            self._group,
            self.statistics,
            self._sync_policy.mark,
        )

    def _process(self, indices: Sequence[int]) -> None:
        self._mark_ready(self._tell_usage(self._usage.arrived, indices))

    def _count_unsynchronized(self) -> None:
        # The thread of a backward with averaging may come here while it holds the lock, for example in a communication hook. So
        # check before taking the lock. Then check again, because such a backward may have begun on another thread.
        if not self._are_pending_local():
            return
        with self._lock:
            self._counts_at_end = False
            if not self._are_pending_local():
                return
            for _, taken in self._pending.take_all():
                # In the next backward that is reduced, these parameters count as used.
                self._tell_usage(self._usage.accumulated, taken)
                self._unreduced.update(self._named.names[index] for index in taken)
            self._users_hooks.reset()

    def _are_pending_local(self) -> bool:
        # A backward with averaging takes its gradients itself. If the hooks are off, another reducer averages the gradients, or
        # this process is a fork.
        return self._running is None and not self._hooks.are_off

    def _tell_usage(self, method: Callable[[Sequence[int], Collection[int]], T], indices: Sequence[int]) -> T:
        asks = self._usage.asks_for_undefined
        undefined = [index for index in indices if self._parameters[index].grad is None] if asks else ()
        try:
            return method(indices, undefined)
        except UnexpectedGradientError as error:
            raise error_messages.not_expected(self._named.names[error.index], self._group.place()) from None

    def _mark_ready(self, indices: Sequence[int]) -> None:
        try:
            startable = self._readiness.mark_ready(indices)
        except MarkedTwiceError as error:
            name = self._named.names[error.index]
            raise error_messages.marked_twice(name, self._group.place(), self._usage.hint_twice) from None
        if startable:
            assert self._running is not None, "gradients are marked within a backward"
            # Only parameters with users' hooks are checked, and only when their bucket starts.
            if self._users_hooks.indices:
                for number in startable:
                    self._users_hooks.check(self.buckets[number].indices)
            self._running.start(startable, is_last=self._readiness.is_complete)

    @_noting_errors
    def _has_all_gradients(self) -> bool:
        """Mark the last gradients as ready, and return whether all gradients have come."""
        with self._lock:
            self._look_at(self._pending.take_all())
            self._mark_ready(self._usage.ended())
        return self._readiness.is_complete

    @_noting_errors
    def _check_all_gradients(self) -> None:
        if not self._readiness.is_complete:
            names = [self._named.names[index] for index in self._readiness.missing()]
            raise error_messages.never_ready(names, self._group.place(), self._usage.hint_missing)

    @_noting_errors
    def _finish(self) -> None:
        """Wait for the reductions at the end of a backward, and write the averages into the gradients.

        Autograd calls `_finish` after `_BackwardEnd.end` of all reducers, because `_finish` overwrites gradients.
        """
        assert self._running is not None, "a backward that ends has begun"
        self._running.finish(self._on_delivery, self._extra_futures)
        if self._learns_order:
            self._arrival_order.learn()
        self._extra_futures = []
        self._sync_policy.reduced()
        self.reductions += 1
        self._unreduced.clear()
        self._reset()
        if self._on_iteration is not None:
            self._on_iteration(self.statistics)

    def _reset(self) -> None:
        self._arrival_order.forget_arrivals()
        self._users_hooks.reset()
        self._readiness.reset()
        self._usage.reset()
        self._running = None

    # ---- buckets ----

    def _watch(self, members: list[list[int]]) -> None:
        self._readiness = Readiness(members)
        self._pending = PendingGradients(members)
        self._hooks.register(self._pending)

    def _build_if_due(self) -> None:
        """Build the buckets if they are due. If this call builds buckets, it is a collective."""
        # The constructor must not wait for other ranks, so it builds no buckets. For example, a single rank may copy a wrapped
        # module to average the weights over time.
        if self._buckets is None:
            members = self._builder.assign_first()
            if members != [bucket.members for bucket in self._pending]:  # parameters were converted since construction
                self._watch(members)
            self._buckets = self._builder.build(members)
        order_here = self._arrival_order.learned
        # The order is in use already, no backward has shown it yet, or each backward has another order.
        if not self._learns_order or order_here is None:
            return
        device = message_device(self._group, self._parameters[0].device)
        order = torch.tensor(order_here, dtype=torch.int64, device=device)
        self._group.broadcast(order, 0)
        self._release_gradients()
        kept = gradients_as_views(self._buckets)
        # Free the old buckets before the new ones are built. Old and new buckets together would be the training's peak memory.
        self._buckets = []
        members = self._builder.assign(order.tolist())
        self._buckets = self._builder.build(members, kept)
        self._watch(members)
        self._arrival_order.is_used = True
        logger.debug("rebuilt the buckets in the order of rank 0's gradients: %d buckets", len(self._buckets))

    def _release_gradients(self) -> None:
        for bucket in self.buckets:
            bucket.release_gradients()

    # ---- the usage model ----

    def _make_usage(self) -> UsageModel:
        usage: UsageModel = CompleteUsage()
        if self._is_static:
            # As in torch, `static_graph` has precedence.
            usage = StaticUsage(self._parameters, self._group)
        elif self._find_unused:
            usage = DynamicUsage(self._parameters, self._group, skip_unused=self._skip_unused)
        return DelayedUsage(usage, self._delayed, self._delayed_until) if self._delayed else usage

    # ---- checks ----

    @property
    def _is_within_backward(self) -> bool:
        """Whether this code runs within the backward that is being reduced, such as in a checkpoint."""
        return self._running is not None and self._backward_end() is not None and runs_backward()

    def _check_idle(self, what: str) -> None:
        if self.is_in_fork:
            raise not_the_rank(what, self._group.place())
        if self._running is not None:
            raise error_messages.backward_never_ended(what, self._group.place())

    def _take_over(self) -> None:
        """Remove the hooks of other reducers of these parameters, for example of an old wrapper."""
        for pause_s in (0.0, 0.01, 0.05, 0.25):
            if self._hooks.take_over():
                break
            time.sleep(pause_s)  # another thread may be in the garbage collector; then gc.collect() returns at once
            gc.collect()  # the other reducer may be unreachable, but not collected yet
        else:
            if not self._hooks.take_over():
                raise error_messages.another_reducer(self._group.place())
        if self._hooks.are_off:
            self._pending.take_all()  # these gradients came while another reducer averaged
            self._hooks.register(self._pending)

    def _may_retire(self) -> bool:
        if self._running is not None:
            # A failed backward does not count, because it does not go on.
            return self._backward_end() is None
        return not self._sync_policy.has_forward


def _close(hooks: GradientHooks, users_hooks: UsersHooks) -> None:
    hooks.close()
    users_hooks.close()


def _caps_bytes(cap_bytes: int | Sequence[int], first_cap_bytes: int) -> list[int]:
    if isinstance(cap_bytes, Iterable):  # not a check for int, because the limit may be an integer of NumPy
        return list(cap_bytes)
    return [min(first_cap_bytes, cap_bytes), cap_bytes]
