"""Turn calls of torch into collectives of a Syncline group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..engine.observers import profiled
from ..engine.queue import a_queue_runs_here
from ..errors import InvalidArgumentError, MisuseError
from ..group import ProcessGroup
from ..reduce_op import ReduceOp, Reduction, from_torch
from ..torch_internals import LOSES_WORKS, disable_dynamo, jit_trace, modes_active, profiler_runs
from ..work import AnyFuture, FinishedWork, TensorsFuture, Work, future_for_torch, join_futures
from . import watched
from .watched import Seen


def reduction_of(options: Any) -> Reduction:
    """Return the reduction in `options`, an options object of torch or one of torch's reductions. None means SUM.

    Raises:
        InvalidArgumentError: `options` has no reduction that Syncline supports.
    """
    if options is None:
        return ReduceOp.SUM
    op = getattr(options, "reduceOp", options)
    ours = from_torch(op)
    if ours is None:
        raise InvalidArgumentError(f"expected a reduction of torch.distributed such as ReduceOp.SUM, found {op!r}")
    return ours


def word(reduction: Reduction) -> str | None:
    """Return the name that torch's functional operators have for a reduction, such as "sum", or None."""
    return reduction.value if isinstance(reduction, ReduceOp) else None


def root_of(options: Any) -> int:
    """Return the root in torch's options. `options` may also be the root's number. None means root 0."""
    if options is None:
        return 0
    return options if isinstance(options, int) else int(options.rootRank)


def check_first_device(options: Any, tensors: Sequence[torch.Tensor], call: str) -> None:
    """Check torch's option `rootTensor`, the index of the root's tensor among `tensors`.

    Raises:
        InvalidArgumentError: `tensors` has no such index.
    """
    index = getattr(options, "rootTensor", 0)
    if not 0 <= index < len(tensors):
        raise InvalidArgumentError(f"{call}: expected rootTensor in 0..{len(tensors) - 1}, found {index}")


def time_limit_s(timeout: timedelta | None) -> float | None:
    """Return the time limit in seconds. As in torch, None, zero or a negative `timeout` gives None: the group's limit."""
    if timeout is None or timeout.days < 0 or not timeout:
        return None
    return timeout.total_seconds()


def listed(tensors: torch.Tensor | Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensor or tensors of a call as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def some(tensors: Any, call: str) -> list[Any]:
    """Return the entries of `tensors` as a list, which must not be empty.

    Raises:
        InvalidArgumentError: the list is empty.
    """
    entries = list(tensors)
    if not entries:
        raise InvalidArgumentError(f"{call}: expected at least one tensor, found an empty list")
    return entries


def only(tensors: Any, what: str) -> Any:
    """Return the only entry of a list. More entries are an error, because a Syncline process uses one device for each call.

    Raises:
        InvalidArgumentError: the list has more than one entry, or is empty.
    """
    if len(tensors) != 1:
        raise InvalidArgumentError(f"expected one {what}, for one device in each process, found {len(tensors)}")
    return tensors[0]


class TorchSideWork(dist.Work):
    """A work of Syncline in the form of a work of torch.

    Args:
        ours: Syncline's work.
        timeout_s: the time limit of `wait` without an argument, in seconds. None means the group's limit.
        on_asked: called once, with this object, before the first `wait` or `get_future`.
    """

    def __init__(
        self, ours: Work, timeout_s: float | None = None, on_asked: Callable[[TorchSideWork], None] | None = None
    ) -> None:
        super().__init__()
        self.ours = ours
        self._timeout_s = timeout_s
        self._on_asked = on_asked
        self._given: AnyFuture | None = None  # the first future for torch's C++ code

    @disable_dynamo
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the collective has finished. On CUDA, make the current stream wait for the collective instead."""
        self._asked()
        limit_s = time_limit_s(timeout)
        self.ours.wait(self._timeout_s if limit_s is None else limit_s)
        # A callback of our future completes the program's future. Wait for the program's future, as `PendingWork.wait` does.
        # In a callback, do not wait: this thread may have to complete the future itself, after the callback. Wait only for the
        # program's first future, because the callbacks of the first future run before later futures are complete.
        if self._given is not None and not self._given.done() and not a_queue_runs_here():
            self._given.wait()
        return True

    def synchronize(self) -> None:
        """Call `wait`."""
        self.wait()

    def block_current_stream(self) -> None:
        """Call `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether the collective has finished, with or without an error."""
        return self.ours.is_completed()

    def is_success(self) -> bool:
        """Return whether the collective has finished without an error."""
        return self.ours.is_completed() and self.ours.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error with which the collective failed, or None."""
        return self.ours.exception()

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self.ours.result()

    def source_rank(self) -> int:
        """Return the rank of the sender in the group, for a receive that has finished.

        Raises:
            InvalidArgumentError: this is not the work of a receive, or the receive has not finished.
        """
        source = self.ours.source_rank()
        if source is None:
            raise InvalidArgumentError("source_rank() is of a receive that has finished, found another work; wait() first")
        return source

    _source_rank = source_rank

    @disable_dynamo
    def get_future(self) -> TensorsFuture:
        """Return a future of the output tensors, which C++ code can also use; see Note [Futures that fail] in `work`.

        If a callback must wait for a later collective, it must call `wait` of the collective's work. If the callback waits for
        a future that was requested outside of the callback, the wait never ends.
        """
        self._asked()
        future = self.ours.get_future()
        # A callback that runs on our queue's thread may wait for the future. This works only with futures of our own class.
        if a_queue_runs_here():
            return future
        # Make a new future at each call, so that our future sees whether a callback is late; see Note [Late callbacks] in
        # `engine.queue`.
        given = future_for_torch(future, self.ours.result())
        self._given = given if self._given is None else self._given
        return given

    def _asked(self) -> None:
        on_asked, self._on_asked = self._on_asked, None
        if on_asked is not None:
            on_asked(self)


class CoalescedWork(Work):
    """One work for several collectives that torch calls in a batch (coalesced)."""

    def __init__(self, works: list[Work]) -> None:
        self._works = works

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Wait for all works. The time limit applies to each work separately."""
        for work in self._works:
            work.wait(timeout)
        return True

    def is_completed(self) -> bool:
        """Return whether all works have finished."""
        return all(work.is_completed() for work in self._works)

    def exception(self) -> BaseException | None:
        """Return the first error among the works, or None."""
        return next((error for work in self._works if (error := work.exception()) is not None), None)

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors of all works, in the order of the works."""
        return [tensor for work in self._works for tensor in work.result()]

    def get_future(self) -> TensorsFuture:
        """Return a future that completes when all works have finished."""
        return join_futures([work.get_future() for work in self._works], self.result())


Issue = Callable[[bool], Work]

# How many of the latest works a group keeps alive; see Note [A work that only C++ holds].
_WORKS_KEPT = 64
# With torch 2.6, a group also keeps alive the works for which nobody has waited yet, but at most this many.
_UNASKED_KEPT = 1024

# These calls concern only two ranks. `_collectives_issued` does not count them, so that its value is the same on all ranks.
_TRANSFERS = frozenset({"send", "recv", "recvAnySource"})

# The result of a call that has finished: torch only calls its `wait`.
_FINISHED = TorchSideWork(FinishedWork([]))


class CallIssuer(dist.ProcessGroup):
    """Issues collectives on the Syncline group `syncline_group`, and returns works to torch.

    Note [A work that only C++ holds]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    Within `join(divide_by_initial_world_size=False)`, torch's DDP passes the work of an all-reduce of one number to its
    reducer. C++ keeps only the C++ half of this work. Without the Python half, `wait` would never return. So the group keeps a
    reference to the latest works of all-reduces of one number.

    torch 2.6 keeps only the C++ half of every work, and may wait long after the call. So with torch 2.6, the group keeps each
    work until C++ or Python waits for the work or asks for its future. After that, the group keeps the work a little longer,
    because C++ may do both.

    Args:
        ours: the Syncline group, which becomes `syncline_group`.
        backend_name: the name under which torch knows the backend.
    """

    def __init__(self, ours: ProcessGroup, backend_name: str) -> None:
        super().__init__(ours.rank, ours.size)  # type: ignore[call-arg]  # the constructor with a store is not for Python
        self.syncline_group = ours
        self._backend_name = backend_name
        self._coalesced: list[Work] | None = None
        self._collectives_issued = 0
        self._kept: deque[dist.Work] = deque(maxlen=_WORKS_KEPT)
        self._unasked: dict[int, TorchSideWork] = {}

    def _issue(
        self,
        title: str,
        inputs: list[torch.Tensor],
        issue: Issue,
        opts: Any = None,
        timeout: timedelta | None = None,
        seen: Callable[[], Seen] | None = None,
    ) -> dist.Work:
        if isinstance(opts, timedelta):  # some of torch's overloads have the time limit in place of the options
            opts, timeout = None, opts
        is_async = getattr(opts, "asyncOp", True)
        limit_s = time_limit_s(getattr(opts, "timeout", None) if timeout is None else timeout)
        # Start a blocking call with a time limit without waiting, too: `work.wait` below gets the limit.
        starts_only = is_async or limit_s is not None or self._coalesced is not None
        # A dispatch mode or a trace wants to see the call.
        if modes_active() or jit_trace() is not None:
            # If the mode sees a call, the results are copied only when somebody waits for the call's work. Inside coalescing,
            # nobody waits for the work of a single call, so do not show the call to the mode.
            shown = None if seen is None or self._coalesced is not None else seen()
            work = watched.issue(self, title, shown, lambda: self._issued(title, inputs, issue, starts_only))
        else:
            work = self._issued(title, inputs, issue, starts_only)
        if self._coalesced is not None:
            self._coalesced.append(work)
            return TorchSideWork(work, limit_s)
        if is_async:
            if LOSES_WORKS:
                return self._held(work, limit_s)
            torchs = TorchSideWork(work, limit_s)
            # Keep the work of DDP's all-reduce of one number; see Note [A work that only C++ holds].
            if title == "all_reduce" and inputs[0].numel() == 1:
                self._kept.append(torchs)
            return torchs
        work.wait(limit_s)
        return _FINISHED

    def _held(self, work: Work, limit_s: float | None) -> TorchSideWork:
        """Return a work for torch, and keep the work alive, because C++ does not; see Note [A work that only C++ holds]."""

        def asked(one: TorchSideWork) -> None:
            self._kept.append(one)
            self._unasked.pop(id(one), None)

        torchs = TorchSideWork(work, limit_s, on_asked=asked)
        self._unasked[id(torchs)] = torchs
        if len(self._unasked) > _UNASKED_KEPT:
            # Drop the oldest work. After so many later works, nobody will wait for the oldest work.
            self._unasked.pop(next(iter(self._unasked)))
        return torchs

    def _issued(self, title: str, inputs: list[torch.Tensor], issue: Issue, starts_only: bool) -> Work:
        if title not in _TRANSFERS:
            self._collectives_issued += 1
        if profiler_runs():
            work = profiled(f"{self._backend_name}:{title}", inputs, lambda: issue(starts_only), is_async=starts_only)
        else:
            work = issue(starts_only)
        watched.note_issued(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        """Until `_end_coalescing`, collect the works of all calls into one work. Each call is still issued immediately."""
        if self._coalesced is not None:
            raise MisuseError(f"coalescing on {self.syncline_group.place()} was started before; end that first")
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced, None
        if works is None:
            raise MisuseError(f"coalescing on {self.syncline_group.place()} ends, but was not started")
        return self._held(CoalescedWork(works), None) if LOSES_WORKS else TorchSideWork(CoalescedWork(works))
