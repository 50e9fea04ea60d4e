"""The work of a collective on a CUDA stream."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta

import torch

from ...engine.call import DONE, FAILED, Call
from ...engine.cancel_scope import CancelScope, seconds
from ...engine.device import DeviceRuntime, Event, Stream
from ...errors import CollectiveTimeout, MisuseError, TransportError
from ...forks import fork_count, not_the_rank
from ...work import TensorsFuture, Work, fail_future
from .plan import PlannedCall

# The pauses of a thread that waits for the GPU: short at first, then longer and longer.
FIRST_LOOK_S = 20e-6
LONGEST_PAUSE_S = 2e-3


class Batch:
    """The calls that one thread has issued inside `NcclGroup.coalescing`.

    Attributes:
        calls: the calls, until the group puts them on its stream.
        work: the work of all calls; None before the first call.
        after: maps the handle of each stream that was current at a call to an event. The event was recorded at the last call
            that was issued while this stream was current.
        is_issued: whether the group has begun to put the calls on its stream.
    """

    def __init__(self) -> None:
        self.calls: list[PlannedCall] = []
        self.work: StreamWork | None = None
        self.after: dict[int, Event] = {}
        self.is_issued = False
        self._thread = threading.get_ident()

    def is_here(self) -> bool:
        """Return whether the calling thread has opened this batch."""
        return self._thread == threading.get_ident()


class Failure:
    """The error that ended the group. All later calls on the group raise this error.

    If the program has not seen the error (`was_told` is False), `close` must raise it: results since the failure are garbage.
    """

    __slots__ = ("error", "was_told")

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.was_told = False

    def tell(self) -> BaseException:
        """Return the error, and remember that the program has seen the error."""
        self.was_told = True
        return self.error


class Launch:
    """One call or one batch on a stream. The launch keeps the tensors of its calls alive until their memory may be reused.

    Note [Memory in flight]
    ~~~~~~~~~~~~~~~~~~~~~~~
    The stream reads and writes the caller's tensors after the call has returned. If the caller drops the tensors, torch's
    allocator may reuse their memory at once. So the `Call` holds references to the tensors until one of these events:

    1. The program calls `wait` on the stream that was current when it issued the collective. `wait` makes this stream wait for
       the collective, so later operations on this stream may reuse the memory. If the program issued the calls of a batch on
       several streams, it must call `wait` on each of these streams.
    2. The monitor, or a thread that blocks in `wait`, sees that the collective is over.
    3. The group failed, and the communicators' kernels have left the GPU.

    The work holds its outputs. `InFlight` holds the launch, but not the work. So after `wait`, memory is free as soon as the
    caller drops the work and the tensors. torch's `record_stream` would delay the reuse.

    Args:
        work: the work of these calls. If the launch fails, the work fails, too. The launch holds only a weak reference to the
            work.

    Attributes:
        captured: whether the launch is part of a CUDA graph. If True, the launch's event has no meaning outside the graph.
    """

    __slots__ = ("_event", "_work", "calls", "captured", "describe", "scope")

    def __init__(self, calls: list[Call], describe: Callable[[], str], timeout_s: float, work: StreamWork) -> None:
        self.calls = calls
        self.describe = describe
        self.scope = CancelScope(timeout_s)
        self.captured = False
        self._event: Event | None = None
        self._work = weakref.ref(work)

    def note_on_stream(self, event: Event, *, captured: bool) -> None:
        """Remember that the launch is on a stream, or part of a CUDA graph. The launch is over when `event` is over."""
        self._event, self.captured = event, captured

    def is_over(self) -> bool:
        """Return whether the GPU has finished the launch. For a launch that is part of a CUDA graph, return True.

        Raises:
            TransportError: the GPU faulted.
        """
        event = self._event
        # A launch that is not issued yet is not over. A captured launch counts as over: its event has no meaning here.
        if event is None or self.captured:
            return self.captured
        try:
            if not event.is_over():
                return False
        except RuntimeError as error:
            raise gpu_fault(self.describe(), error) from error
        self._end(DONE)
        self.release()
        return True

    @property
    def is_transfer(self) -> bool:
        """Whether the launch is a send or a receive."""
        return all(call.number is None for call in self.calls)

    def release(self) -> None:
        """Drop the references to the tensors."""
        for call in self.calls:
            call.release()

    def fail(self, failure: Failure) -> list[torch.Tensor]:
        """Mark the calls as failed, and wake the threads that wait for the work. Return the tensors of the calls.

        The caller must keep these tensors until no kernel can write to them any more.
        """
        tensors = [tensor for call in self.calls for tensor in (*call.reads, *call.writes)]
        self._end(FAILED)
        self.release()
        work = self._work()
        if work is not None:
            work.fail(failure)
        return tensors

    def _end(self, state: str) -> None:
        for call in self.calls:
            if call.state not in (DONE, FAILED):
                call.state = state


class StreamWork(Work):
    """The work of one call or of a batch. The time limit begins when the work is made, before its calls are issued.

    Note [Memory in flight] says which object holds the tensors, and how long.

    Args:
        title: the call for error messages. For a batch, this is a call with the name "coalesced".

    Attributes:
        launch: the launch that `InFlight` watches.
    """

    def __init__(
        self,
        title: Call,
        calls: list[Call],
        tensors: list[torch.Tensor],
        place: Callable[[], str],
        runtime: DeviceRuntime,
        device: torch.device,
        *,
        timeout_s: float,
        source: int | None = None,
        batch: Batch | None = None,
    ) -> None:
        self.launch = Launch(calls, lambda: f"{title} on {place()}", timeout_s, self)
        self._tensors = tensors
        self._runtime = runtime
        self._device = device
        self._fork_count = fork_count()
        self._blocks = title.signature.name == "barrier"
        self._source = source
        self._batch = batch
        self._unordered = {runtime.current_stream(device)}  # streams of the issue on which `wait` was not called yet
        self._stream: Stream | None = None
        self._event: Event | None = None
        self._held: list[torch.Tensor] = []
        self._changed = threading.Condition(threading.Lock())  # notified when the call is issued, and when it has failed
        self._is_settled = False  # all calls are on a stream, or the work has failed; `settle` sets this
        self._failure: Failure | None = None
        self._future: TensorsFuture | None = None
        self._future_is_taken = False  # a thread completes the future, or has completed it

    # ---- for the group and `InFlight` ----

    def add(self, call: Call) -> None:
        """Add another call to the batch of this work."""
        self.launch.calls.append(call)
        self._tensors += call.writes
        self._unordered.add(self._runtime.current_stream(self._device))

    def note_on_stream(self, stream: Stream, event: Event, *, captured: bool) -> None:
        """Remember that all calls are now on a stream, or part of a CUDA graph. Next, call `settle`, without holding a lock."""
        self._stream, self._event = stream, event
        self.launch.note_on_stream(event, captured=captured)
        if captured:  # the recorder sees the calls as over, but the tensors are needed until `wait` has ordered the stream
            self._held = [tensor for call in self.launch.calls for tensor in (*call.reads, *call.writes)]
            for call in self.launch.calls:
                call.is_over(DONE)

    def fail(self, failure: Failure) -> None:
        """Mark the work as failed, and wake threads that wait for it. Only the first failure counts. Callbacks may run here."""
        self._failure = self._failure or failure
        self.settle()

    def settle(self) -> None:
        """Wake threads that wait until the call is issued. If there is a future, complete it and run its callbacks."""
        with self._changed:
            self._is_settled = True
            self._changed.notify_all()
            future = self._due()
        if future is not None:
            self._complete(future)

    # ---- Work ----

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Make the current stream wait for the collective. If there is a timeout, or for a barrier, also block the thread."""
        timeout_s = None if timeout is None else seconds(timeout)
        self._refuse_in_fork("wait")
        scope = self.launch.scope if timeout_s is None else CancelScope(timeout_s)
        describe = self.launch.describe
        # If the peer is not connected yet, or the batch is still open, wait until the call is issued.
        if not self._is_settled:
            if self._batch is not None and self._batch.is_here():
                raise MisuseError(f"{describe()}: its batch is still open, so it would never come; wait after `coalescing`")
            if not self._until(lambda: self._is_settled, scope.remaining_s()):
                raise self._not_in_time(scope)
        self._raise_failure()
        capturing = self._runtime.is_capturing()
        blocks = self._blocks or timeout_s is not None
        if capturing and blocks:
            raise MisuseError(f"{describe()}: a CUDA graph is being captured, so nothing can be waited for on the CPU")
        # Only operations of the same capture can wait for the event of a captured launch.
        if capturing or not self.launch.captured:
            self._order_current_stream()
        if blocks:
            self._block(scope)
        # If a stream of the issue does not wait for the collective yet, keep holding the tensors; see Note [Memory in flight].
        self._unordered.discard(self._runtime.current_stream(self._device))
        if blocks or not self._unordered:
            self.launch.release()
            self._held = []
        return True

    def is_completed(self) -> bool:
        """Return whether the collective has finished on the GPU, or has failed.

        While the current stream is captured into a CUDA graph, return True only if the collective has failed.
        """
        if self._failure is not None:
            return True
        # A forked child cannot ask the GPU.
        if self._fork_count != fork_count():
            return all(call.state == DONE for call in self.launch.calls)
        return not self._runtime.is_capturing() and self.launch.is_over()

    def exception(self) -> BaseException | None:
        """Return the error of the collective, or None if there is no error."""
        return None if self._failure is None else self._failure.tell()

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self._tensors

    def source_rank(self) -> int | None:
        """Return the sender's rank if this is the work of a receive; else None."""
        return self._source

    def get_future(self) -> TensorsFuture:
        """Return a CUDA future. For the CPU, this future is complete when the collective is issued.

        If a thread waits for the future, its current stream waits for the collective. If the call has no output on this rank,
        the value of the future is a list of one meaningless tensor.

        A callback runs at once, on the thread that attaches it; see Note [Order over NCCL] in `group`. There are two
        exceptions: a transfer whose peer is not connected yet, and a batch that is still open. Then the callback runs later, on
        the thread that issues the call.
        """
        self._refuse_in_fork("get_future")
        with self._changed:
            if self._future is None:
                self._future = self._runtime.future(self._device)
            asked, due = self._future, self._due()
        # Complete the future without the lock, because callbacks run here.
        if due is not None:
            self._complete(due)
        return asked

    def _due(self) -> TensorsFuture | None:
        """Return the future if the caller must complete it now; else None. The caller must hold `_changed`."""
        if self._future is None or self._future_is_taken or not self._is_settled:
            return None
        self._future_is_taken = True
        return self._future

    def _complete(self, future: TensorsFuture) -> None:
        if self._failure is not None:
            fail_future(future, self._failure.error)
        else:
            assert self._stream is not None
            assert self._event is not None
            # A future orders the streams only if its value has a tensor on the GPU.
            tensors = self._tensors or [torch.empty(1, dtype=torch.uint8, device=self._device)]
            self._stream.complete(future, tensors, self._event, captured=self.launch.captured)

    # ---- waiting ----

    def _order_current_stream(self) -> None:
        assert self._event is not None
        try:
            self._event.order_current_stream()
        except Exception as error:
            self._raise_failure()  # the group's failure, if there is one, says more than the GPU's error
            raise gpu_fault(self.launch.describe(), error) from error

    def _block(self, scope: CancelScope) -> None:
        pause_s = FIRST_LOOK_S
        while not self.launch.is_over():
            if scope.is_over():
                # If the group has failed, its failure says more than the time-out that follows from it.
                self._raise_failure()
                raise self._not_in_time(scope)
            self._until(lambda: self._failure is not None, min(pause_s, scope.remaining_s()))
            self._raise_failure()
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _until(self, is_so: Callable[[], bool], limit_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(is_so, min(limit_s, threading.TIMEOUT_MAX))

    def _refuse_in_fork(self, name: str) -> None:
        # No thread of a forked child ends the work, and CUDA does not work there. See Note [Forks] in `forks`.
        if self._fork_count != fork_count():
            self._raise_failure()
            raise not_the_rank(name, self.launch.describe())

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.tell()

    def _not_in_time(self, scope: CancelScope) -> CollectiveTimeout:
        whose = "of the group" if scope is self.launch.scope else "given to wait()"
        return CollectiveTimeout(
            f"{self.launch.describe()} did not finish within the {scope.timeout_s:g} s timeout {whose}; it goes on, and its "
            "tensors still belong to it. Wait again, or abort the group."
        )


def gpu_fault(what: str, error: BaseException) -> TransportError:
    """Return a `TransportError` for an error that torch has raised because the GPU faulted. `what` names the call."""
    return TransportError(f"the GPU reported, while the group waited for {what}: {error}")
