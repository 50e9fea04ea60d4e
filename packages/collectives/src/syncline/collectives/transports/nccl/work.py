"""The work of a collective on a CUDA stream."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

import torch

from ...engine.cancel_scope import CancelScope, seconds
from ...errors import CollectiveTimeout, MisuseError
from ...work import TensorsFuture, Work
from .accelerator import Accelerator, CommStream, Event
from .batch import Batch
from .failure import Failure
from .pending_collective import Description, PendingCollective, gpu_fault

# How often a thread that was asked to block looks at the GPU: at once, then less and less often.
_FIRST_LOOK_S = 20e-6
_LONGEST_PAUSE_S = 2e-3


class NcclWork(Work):
    """One collective, or several as one. Made before anything is issued, so that its scope covers the issuing.

    Who holds the tensors, and how long, says Note [Memory in flight] in `collective`.

    Args:
        tensors: the outputs.
        reads: what the collective reads beside them.
        describe: says in words what this is.
        accelerator: for the current stream.
        device: of the tensors.
        blocks: whether `wait` blocks the CPU, as that of a barrier does.
        timeout_s: how long that may take where the caller does not say.
        source: for a receive, the rank that sends.
        batch: what it is the work of, if it is of several as one.

    Attributes:
        collective: what the watchdog looks after.
    """

    def __init__(
        self,
        tensors: list[torch.Tensor],
        reads: Sequence[torch.Tensor],
        describe: Description,
        accelerator: Accelerator,
        device: torch.device,
        *,
        timeout_s: float,
        blocks: bool = False,
        source: int | None = None,
        batch: Batch | None = None,
    ) -> None:
        self.pending = PendingCollective(describe, timeout_s, (*tensors, *reads), self)
        self._tensors = tensors
        self._describe = describe
        self._accelerator = accelerator
        self._device = device
        self._blocks = blocks
        self._source = source
        self._batch = batch
        self._issued_from = accelerator.current_stream(device)
        self._comm_stream: CommStream | None = None
        self._event: Event | None = None
        self._issued = threading.Event()
        self._failed = threading.Event()
        self._failure: Failure | None = None
        self._lock = threading.Lock()
        self._future: TensorsFuture | None = None
        self._is_settled = False

    # ---- for the group and its watchdog ----

    def is_issued_as(self, comm_stream: CommStream, event: Event, *, captured: bool) -> None:
        """All of it is on a stream, or captured from there into a CUDA graph. `settle` must follow, under no lock."""
        self._comm_stream, self._event = comm_stream, event
        self.pending.is_issued(event, captured=captured)

    def fail(self, failure: Failure) -> None:
        """Wake every waiter with an error; the first counts. Runs callbacks, as `settle` does."""
        self._failure = self._failure or failure
        self._failed.set()
        self.settle()

    def settle(self) -> None:
        """Whoever asked for the future, or for the issue, before this gets it now. Callbacks run here, and may issue."""
        with self._lock:
            self._issued.set()
            future = self._due()
        if future is not None:
            self._complete(future)

    # ---- Work ----

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Order the current stream after the collective; with a timeout, also block until it is over."""
        timeout_s = None if timeout is None else seconds(timeout)
        scope = self.pending.scope if timeout_s is None else CancelScope(timeout_s)
        if not self._issued.is_set() and self._batch is not None and self._batch.is_here():
            raise MisuseError(f"{self._describe()}: its batch is still open, so it would never come; wait after `coalescing`")
        if not self._issued.wait(scope.remaining_s()):
            raise self._not_in_time(scope)
        self._raise_failure()
        capturing = self._accelerator.is_capturing()
        blocks = self._blocks or timeout_s is not None
        if capturing and blocks:
            raise MisuseError(f"{self._describe()}: a CUDA graph is being captured, so nothing can be waited for on the CPU")
        if capturing or not self.pending.captured:
            self._order_current_stream()
        if blocks:
            self._block(scope)
        if blocks or self._accelerator.current_stream(self._device) == self._issued_from:
            self.pending.release()
        return True

    def is_completed(self) -> bool:
        """Whether the GPU is done, or the collective failed; false in a capture, when the GPU cannot be asked."""
        if self._failure is not None:
            return True
        return not self._accelerator.is_capturing() and self.pending.is_over()

    def exception(self) -> BaseException | None:
        """The error with which the collective failed, or None."""
        return None if self._failure is None else self._failure.report()

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._tensors

    def source_rank(self) -> int | None:
        """For a receive: who sends, which NCCL must know beforehand."""
        return self._source

    def get_future(self) -> TensorsFuture:
        """A CUDA future: complete for the CPU once the collective is issued, ordered after it for streams.

        A callback runs at once, on the thread that attaches it; see Note [Order over NCCL] in `process_group`. Only that of a
        transfer that waits for its peer to connect, or of a batch that is still open, runs later, on the thread that issues it.
        """
        with self._lock:
            if self._future is None:
                self._future = self._accelerator.future(self._device)
            asked, due = self._future, self._due()
        if due is not None:
            self._complete(due)
        return asked

    def _due(self) -> TensorsFuture | None:
        """The future, for the one who is to complete it: the first to find it both asked for and issued. Under the lock."""
        if self._future is None or self._is_settled or not self._issued.is_set():
            return None
        self._is_settled = True
        return self._future

    def _complete(self, future: TensorsFuture) -> None:
        if self._failure is not None:
            future.set_exception(self._failure.error)  # type: ignore[arg-type]  # torch says "result: T"
        else:
            assert self._comm_stream is not None
            assert self._event is not None
            self._comm_stream.complete(future, self._tensors, self._event, captured=self.pending.captured)

    # ---- waiting ----

    def _order_current_stream(self) -> None:
        assert self._event is not None
        try:
            self._event.order_current_stream()
        except Exception as error:
            self._raise_failure()  # it says more than a GPU that faulted, and repeats itself at every call
            raise gpu_fault(self._describe(), error) from error

    def _block(self, scope: CancelScope) -> None:
        pause_s = _FIRST_LOOK_S
        while not self.pending.is_over():
            if scope.expired():
                self._raise_failure()
                raise self._not_in_time(scope)
            self._failed.wait(min(pause_s, scope.remaining_s()))
            self._raise_failure()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure.report()

    def _not_in_time(self, scope: CancelScope) -> CollectiveTimeout:
        whose = "of the group" if scope is self.pending.scope else "given to wait()"
        return CollectiveTimeout(
            f"{self._describe()} did not finish within the {scope.timeout_s:g} s timeout {whose}; it goes on, and its "
            "tensors still belong to it. Wait again, or abort the group."
        )
