"""The reducer: averages gradients over the ranks while backward still computes others."""

from __future__ import annotations

import enum
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.autograd import Variable

from syncline.collectives import MisuseError, ProcessGroup, ReduceOp

from .bucket import Bucket
from .bucket_assignment import GradientSpec, assign_buckets
from .finalize import Flight, finalize
from .grad_bucket import GradBucket
from .readiness import MarkedTwiceError, Readiness
from .statistics import BucketTimes, IterationStatistics

if TYPE_CHECKING:
    CommunicationHook: TypeAlias = Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]
else:
    CommunicationHook = Callable

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

    Every backward that reaches one of the parameters must reach all of them, on every rank.

    Args:
        named_parameters: names and parameters; dense, with `requires_grad`; the same on all ranks. Names appear in errors.
        group: whose ranks average. Constructing a reducer is a collective of this group.
        bucket_cap_bytes: a bucket is closed when it has reached this size.
        first_bucket_cap_bytes: the same for the first bucket, which is small so that communication starts early.
        gradient_as_bucket_view: let `parameter.grad` be a view of the bucket; saves the copy back and the memory.

    Extra memory: the buckets, as large as all gradients together; none beyond the gradients with `gradient_as_bucket_view`.

    Raises:
        MisuseError: there is no parameter, or one needs no gradient.
    """

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, torch.nn.Parameter]],
        group: ProcessGroup,
        *,
        bucket_cap_bytes: int = DEFAULT_BUCKET_CAP_BYTES,
        first_bucket_cap_bytes: int = DEFAULT_FIRST_BUCKET_CAP_BYTES,
        gradient_as_bucket_view: bool = False,
    ) -> None:
        self._names = [name for name, _ in named_parameters]
        self._parameters = [parameter for _, parameter in named_parameters]
        self._check_parameters()
        self._group = group
        self._caps_bytes = [min(first_bucket_cap_bytes, bucket_cap_bytes), bucket_cap_bytes]
        self._as_view = gradient_as_bucket_view
        self._hook: CommunicationHook | None = None
        self._hook_state: Any = None
        self._lock = threading.Lock()
        self._phase = _Phase.IDLE
        self._flights: list[Flight] = []
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
    def buckets(self) -> Sequence[Bucket]:
        """The buckets, in the order in which they are reduced."""
        return self._buckets

    def set_hook(self, hook: CommunicationHook, state: Any = None) -> None:
        """Let `hook(state, bucket)` reduce each bucket instead of `all_reduce(AVG)`.

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

    def _on_gradient(self, index: int) -> None:
        """Called by autograd on the thread of backward, as soon as a parameter's gradient is accumulated."""
        if not self.synchronizes:
            return
        with self._lock:
            if self._phase is _Phase.IDLE:
                self._begin()
            try:
                startable = self._readiness.mark_ready(index)
            except MarkedTwiceError as error:
                raise self._marked_twice(error.index) from None
            if self._readiness.is_complete:
                self.statistics.last_gradient = time.perf_counter()
            for number in startable:
                self._start(number)

    def _begin(self) -> None:
        self._phase = _Phase.REDUCING
        self.statistics.backward_started = time.perf_counter()
        Variable._execution_engine.queue_callback(self._end)

    def _start(self, number: int) -> None:
        """See Note [Buckets start in order]: called for bucket 0, 1, 2, ... of every backward."""
        bucket = self._buckets[number]
        ready = time.perf_counter()
        bucket.collect()
        if self._as_view:
            bucket.alias()
        times = BucketTimes(bucket.buffer.nbytes, ready, time.perf_counter())
        self.statistics.buckets.append(times)
        self._flights.append(Flight(bucket, self._reduce(bucket, number), times))

    def _reduce(self, bucket: Bucket, number: int) -> torch.futures.Future[Any]:
        if self._hook is None:
            return self._group.all_reduce(bucket.buffer, ReduceOp.AVG, async_op=True).get_future()
        future = self._hook(self._hook_state, GradBucket(bucket, number, number == len(self._buckets) - 1, self._group))
        if not isinstance(future, torch._C.Future):  # the base class: what Future.then() returns
            raise MisuseError(
                f"a communication hook must return a torch.futures.Future of the reduced bucket, found "
                f"{type(future).__name__}; see get_future() of a Work"
            )
        return future

    def _end(self) -> None:
        """Called by autograd on the thread of backward, when nothing is left to compute."""
        if not self._readiness.is_complete:
            raise self._never_ready()
        finalize(self._flights, self.statistics, write_back=not self._as_view)
        if not self._rebuilt:
            self._arrival_order = self._readiness.arrival_order()
        self._reset()

    def _reset(self) -> None:
        self._flights = []
        self._readiness.reset()
        self._phase = _Phase.IDLE

    # ---- buckets ----

    def _build_buckets(self, order: Sequence[int]) -> None:
        specs = [
            GradientSpec(parameter.numel() * parameter.element_size(), (parameter.dtype, parameter.device))
            for parameter in self._parameters
        ]
        assignment = assign_buckets(specs, self._caps_bytes, order)
        self._buckets = [self._make_bucket(entry.indices) for entry in assignment]
        self._readiness = Readiness([bucket.indices for bucket in self._buckets])

    def _make_bucket(self, indices: Sequence[int]) -> Bucket:
        return Bucket(indices, [self._parameters[i] for i in indices], [self._names[i] for i in indices], self._group)

    def _rebuild_buckets(self, arrival_order: Sequence[int]) -> None:
        """Assign the buckets anew, in the order in which rank 0's gradients arrived. A collective."""
        order = torch.tensor(arrival_order, dtype=torch.int64)
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
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if not parameter.requires_grad:
                raise MisuseError(f"parameter '{name}' does not require a gradient; leave it out")

    def _check_idle(self, what: str) -> None:
        if self._phase is not _Phase.IDLE:
            raise MisuseError(
                f"{what} on {self._group.place()}: the previous backward started to reduce gradients and never ended. Did it "
                "raise an error that was caught? Gradients of this rank may be incomplete: build the model's wrapper anew"
            )

    def _never_ready(self) -> MisuseError:
        names = ", ".join(f"'{self._names[index]}'" for index in self._readiness.missing())
        return MisuseError(
            f"backward ended on {self._group.place()}, but these parameters got no gradient in it: {names}. Every parameter "
            "must take part in every backward: remove those on which the loss does not depend, or freeze them "
            "(requires_grad_(False)). If the model ends in a re-entrant checkpoint, use use_reentrant=False"
        )

    def _marked_twice(self, index: int) -> MisuseError:
        return MisuseError(
            f"the gradient of parameter '{self._names[index]}' became ready twice in one backward on {self._group.place()}. It "
            "happens when a part of the model runs twice in a re-entrant checkpoint (use use_reentrant=False), or when "
            "parameters are used outside the wrapped module's forward"
        )


def _notifier(reducer: weakref.ref[Reducer], index: int) -> Callable[[torch.Tensor], None]:
    """A parameter's hook. It does not keep the reducer alive, or a model could never be wrapped anew."""

    def notify(_: torch.Tensor) -> None:
        living = reducer()
        if living is not None:
            living._on_gradient(index)

    return notify


def _remove(handles: Sequence[Any]) -> None:
    for handle in handles:
        handle.remove()


def _pairs(bucket: Bucket) -> zip[tuple[torch.nn.Parameter, torch.Tensor]]:
    return zip(bucket.parameters, bucket.views, strict=True)
