"""The work of a collective on a CUDA stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from ...collective import Collective
from ...deadline import Deadline, seconds
from ...errors import CollectiveTimeout, MisuseError
from ...work import TensorsFuture, Work
from .accelerator import Accelerator, Lane, Moment

# How often a thread that was asked to block looks at the GPU: at once, then less and less often.
_FIRST_LOOK_S = 20e-6
_LONGEST_PAUSE_S = 2e-3


class Description:
    """Says in words what a work is: with shape and dtype, until the tensor must be let go."""

    __slots__ = ("_call", "_name", "_place", "_sequence")

    def __init__(self, call: Collective, sequence: int, place: Callable[[], str]) -> None:
        self._name = call.name
        self._call: Collective | None = call
        self._sequence = sequence
        self._place = place

    def __call__(self) -> str:
        """The words."""
        call = self._call
        signature = self._name if call is None else call.signature()
        return f"{signature}, number {self._sequence} on {self._place()}"

    def forget(self) -> None:
        """Let go of the tensor."""
        self._call = None


class NcclWork(Work):
    """One collective, or several as one. Made before anything is issued, so that its deadline covers the issuing.

    Note [Memory in flight]
    ~~~~~~~~~~~~~~~~~~~~~~~
    The stream reads and writes the caller's tensors after the call has returned. torch's allocator would give their memory to
    the next tensor as soon as the caller drops them, so the work holds references, until

    1. the stream from which the collective was issued has been ordered after it (`wait`): then the collective is as good as a
       kernel of that stream, and what is freed there is reused in order; or
    2. the watchdog sees that the collective is over.

    `record_stream` is not needed, and memory does not pile up behind it. Copies that a collective makes for itself are made on
    its own stream and need neither.

    Args:
        tensors: the outputs.
        reads: what the collective reads beside them.
        describe: says in words what this is.
        accelerator: for the current stream.
        device: of the tensors.
        blocks: whether `wait` blocks the CPU, as that of a barrier does.
        timeout_s: how long that may take where the caller does not say.
        source: for a receive, the rank that sends.
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
    ) -> None:
        self._tensors = tensors
        self._held = tuple(reads)
        self.describe = describe
        self.deadline = Deadline(timeout_s)
        self._accelerator = accelerator
        self._device = device
        self._blocks = blocks
        self._source = source
        self._issued_from = accelerator.current_stream(device)
        self._lane: Lane | None = None
        self._moment: Moment | None = None
        self._captured = False
        self._issued = threading.Event()
        self._failed = threading.Event()
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._future: TensorsFuture | None = None

    # ---- for the group and its watchdog ----

    def is_issued_as(self, lane: Lane, moment: Moment, *, captured: bool) -> None:
        """All of it is on a stream, or captured from there into a CUDA graph, and will be done at a moment."""
        self._lane, self._moment, self._captured = lane, moment, captured
        self._settle()

    def is_over(self) -> bool:
        """Whether the GPU is done with it. What was captured is: its event means nothing outside the graph."""
        return self._captured or (self._moment is not None and self._moment.is_over())

    def hold(self, reads: Sequence[torch.Tensor]) -> None:
        """Keep these, too: a batch is filled after its work was made."""
        self._held = tuple(reads)

    def release(self) -> None:
        """Let go of the caller's tensors, but for the outputs, which are the result."""
        self._held = ()
        self.describe.forget()

    def fail(self, error: BaseException) -> None:
        """Wake every waiter with an error."""
        self._error = error
        self._failed.set()
        self._settle()

    def _settle(self) -> None:
        """Whoever asked for the future, or for the issue, before this gets it now."""
        with self._lock:
            self._issued.set()
            future = self._future
        if future is not None and not future.done():
            self._complete(future)

    # ---- Work ----

    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Order the current stream after the collective; with a timeout, also block until it is over."""
        timeout_s = None if timeout is None else seconds(timeout)
        deadline = self.deadline if timeout_s is None else Deadline(timeout_s)
        if not self._issued.wait(deadline.remaining_s()):
            raise self._not_in_time(deadline)
        self._raise_failure()
        assert self._moment is not None
        capturing = self._accelerator.is_capturing()
        blocks = self._blocks or timeout_s is not None
        if capturing and blocks:
            raise MisuseError(f"{self.describe()}: a CUDA graph is being captured, so nothing can be waited for on the CPU")
        if capturing or not self._captured:
            self._order_current_stream(self._moment)
        if blocks:
            self._block(deadline)
        if self._accelerator.current_stream(self._device) == self._issued_from:
            self.release()
        return True

    def is_completed(self) -> bool:
        """Whether the GPU is done, or the collective failed; false in a capture, when the GPU cannot be asked."""
        if self._error is not None:
            return True
        return not self._accelerator.is_capturing() and self.is_over()

    def exception(self) -> BaseException | None:
        """The error given to `fail`, or None."""
        return self._error

    def result(self) -> list[torch.Tensor]:
        """The output tensors."""
        return self._tensors

    def source_rank(self) -> int | None:
        """For a receive: who sends, which NCCL must know beforehand."""
        return self._source

    def get_future(self) -> TensorsFuture:
        """A CUDA future: complete for the CPU once the collective is issued, ordered after it for streams.

        A callback runs at once, on the thread that attaches it; see Note [Order over NCCL] in `process_group`. Only that of a
        transfer that waits for its peer to connect runs later, on the thread that connects.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            future = self._future = self._accelerator.future(self._device)
            is_issued = self._issued.is_set()
        if is_issued:
            self._complete(future)
        return future

    def _complete(self, future: TensorsFuture) -> None:
        if self._error is not None:
            future.set_exception(self._error)  # type: ignore[arg-type]  # torch says "result: T"
        else:
            assert self._lane is not None
            assert self._moment is not None
            self._lane.complete(future, self._tensors, self._moment)

    def _order_current_stream(self, moment: Moment) -> None:
        try:
            moment.order_current_stream()
        except Exception:
            self._raise_failure()  # it says more than a GPU that faulted, and repeats itself at every call
            raise

    # ---- blocking ----

    def _block(self, deadline: Deadline) -> None:
        pause_s = _FIRST_LOOK_S
        while not self.is_over():
            if deadline.expired():
                self._raise_failure()
                raise self._not_in_time(deadline)
            self._failed.wait(min(pause_s, deadline.remaining_s()))
            self._raise_failure()
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _raise_failure(self) -> None:
        if self._error is not None:
            raise self._error

    def _not_in_time(self, deadline: Deadline) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"{self.describe()} did not finish within the {deadline.timeout_s:g} s given to wait(); it goes on, and its "
            "tensors still belong to it. Wait again, or abort the group."
        )
