"""What a group has on the GPU, who looks after it, and how it ends."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Protocol

import torch

from ...engine.call import DONE, FAILED, Call
from ...engine.cancel_scope import CancelScope, DetachedCall
from ...engine.device import Event
from ...errors import CollectiveTimeout, SynclineError, TransportError
from .communicator import Communicator

# How often a thread that waits for the GPU looks at it: at once, then less and less often.
FIRST_LOOK_S = 20e-6
LONGEST_PAUSE_S = 2e-3
# How often each rank asks whether another one has failed, while something is in flight.
_HEAR_S = 1.0

# The monitor looks at what somebody holds. A program may drop a group, and its works, while something is in flight.
_busy: set[InFlight] = set()


class Failure:
    """One error for all who ask the group for something.

    Attributes:
        error: what is raised.
        was_told: whether it was raised to, or shown to, somebody who uses the group. If not, `close` must raise it: what the
            group has delivered since is garbage, and nobody knows.
    """

    __slots__ = ("error", "was_told")

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.was_told = False

    def tell(self) -> BaseException:
        """The error, for one who raises or shows it."""
        self.was_told = True
        return self.error


class FatalError(Exception):
    """Carries an error that ends the group out of the locks under which it happened; never leaves the group.

    Attributes:
        error: what ends the group.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class Waiter(Protocol):
    """Who waits for a launch: its work."""

    def fail(self, failure: Failure) -> None:
        """The launch has failed. Called under no lock."""


class Launch:
    """What is put on a stream at once: one call, or a batch. Its calls hold their tensors until the GPU is done with them.

    Note [Memory in flight]
    ~~~~~~~~~~~~~~~~~~~~~~~
    The stream reads and writes the caller's tensors after the call has returned. torch's allocator would give their memory to
    the next tensor as soon as the caller drops them, so the `Call` holds references, until

    1. the stream from which the collective was issued has been ordered after it (`wait`): then the collective is as good as a
       kernel of that stream, and what is freed there is reused in order; or
    2. the monitor, or a thread that blocks, sees that the collective is over; or
    3. the group failed, and the communicators' kernels have left the GPU.

    `InFlight` holds the launch, not the work, which keeps the outputs as its result. So once the work was waited for, memory is
    free as soon as the caller drops the work and the tensors. `record_stream` is not needed, and memory does not pile up behind
    it. Copies that a collective makes for itself are made on its own stream and need neither.

    Args:
        calls: those that it carries out.
        describe: says in words what it is.
        timeout_s: how long it may take, from now on.
        waiter: hears of a failure, as long as it lives.

    Attributes:
        captured: whether it is part of a CUDA graph: its event means nothing outside the graph.
    """

    __slots__ = ("_event", "_waiter", "calls", "captured", "describe", "scope")

    def __init__(self, calls: list[Call], describe: Callable[[], str], timeout_s: float, waiter: Waiter) -> None:
        self.calls = calls
        self.describe = describe
        self.scope = CancelScope(timeout_s)
        self.captured = False
        self._event: Event | None = None
        self._waiter = weakref.ref(waiter)

    def is_issued(self, event: Event, *, captured: bool) -> None:
        """It is on a stream, or was captured from there, and will be over at an event."""
        self._event, self.captured = event, captured

    def is_over(self) -> bool:
        """Whether the GPU is done with it. What was captured is.

        Raises:
            TransportError: the GPU faulted.
        """
        event = self._event
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

    def release(self) -> None:
        """Let go of the tensors."""
        for call in self.calls:
            call.release()

    def fail(self, failure: Failure) -> list[torch.Tensor]:
        """Wake all who wait for it.

        Returns:
            The tensors, which somebody must hold until the kernels that may write them are gone.
        """
        tensors = [tensor for call in self.calls for tensor in (*call.reads, *call.writes)]
        self._end(FAILED)
        self.release()
        waiter = self._waiter()
        if waiter is not None:
            waiter.fail(failure)
        return tensors

    def _end(self, state: str) -> None:
        """Once: what is over does not fail any more."""
        for call in self.calls:
            if call.state not in (DONE, FAILED):
                call.state = state


class InFlight:
    """Releases what is over, and ends what will never be.

    Note [Failure over NCCL]
    ~~~~~~~~~~~~~~~~~~~~~~~~
    A failure is the first of: a collective that is past its time limit, an error that NCCL reports of a communicator, an error
    raised while a collective was issued or the ranks were connected, `abort` by the user, and the failure of another rank, of
    which NCCL may say nothing within a node. What happens then has this order:

    1. The failure is recorded: from now on every new collective of the group raises it.
    2. Every work that is still in flight fails with it: threads that block in `wait` wake and raise, later `wait`s raise.
       What was over before succeeded and stays so.
    3. The communicators are aborted: their kernels leave the GPU. Streams that were ordered after them go on, with garbage.
       Each is aborted on a thread of its own, because NCCL waits there for kernels of the others, or for CUDA graphs; nobody
       waits for these threads, but the end of the process, for a few seconds.
    4. The other ranks are told, where the ranks met in a store: they hear it at one of their next looks.

    So a thread that was blocked outside Syncline (`tensor.item()`, `torch.cuda.synchronize()`) and wakes because of 3 gets the
    named error from whatever it asks of the group next: it cannot issue another collective, nor wait for the one that failed,
    nor close the group in silence.

    The monitor's looks run while something is in flight. A look holds no lock while it asks CUDA or NCCL: a thread that is
    stuck there, or inside a call of NCCL, cannot keep another one from aborting.

    Args:
        place: says where an error happened.
        background: entered on each thread that is started here; asked when it starts.
        report: of a failure, which it returns in words that say where the report is.
        tell: the other ranks, that the group has failed here; may block.
        hear: why another rank does not come any more, or None; may block.
    """

    period_s = 0.1
    may_block = True

    def __init__(
        self,
        place: Callable[[], str],
        background: Callable[[], AbstractContextManager[object]],
        report: Callable[[BaseException], BaseException],
        tell: Callable[[BaseException], object] = lambda _: None,
        hear: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._place = place
        self._background = background
        self._report = report
        self._tell = tell
        self._hear = hear
        self._hearing: DetachedCall[str | None] | None = None
        self._next_hearing_s = 0.0
        self._changed = threading.Condition()
        self._pending: dict[Launch, None] = {}
        self._communicators: list[Communicator] = []
        self._failure: Failure | None = None

    @property
    def failure(self) -> Failure | None:
        """What ended the group, or None."""
        return self._failure

    def reason_to_give_up(self) -> TransportError | None:
        """Why a thread of the group waits in vain, or None."""
        return None if self._failure is None else TransportError("the group has failed meanwhile")

    # ---- what is looked after ----

    def attach(self, communicator: Communicator) -> None:
        """A communicator to look after; one that comes after a failure is aborted."""
        with self._changed:
            if self._failure is None:
                self._communicators.append(communicator)
                return
        self._abort(communicator, [])

    def watch(self, launch: Launch) -> None:
        """A launch to look after, from before it is issued: NCCL may never return. One that comes after a failure fails."""
        with self._changed:
            failure = self._failure
            if failure is None:
                self._pending[launch] = None
                _busy.add(self)
        if failure is not None:
            launch.fail(failure)

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; false if that took longer than `timeout_s` seconds, or the group failed."""
        scope, pause_s = CancelScope(timeout_s), FIRST_LOOK_S
        while self._failure is None:
            try:
                self._reap()
            except TransportError as error:
                self.report_and_fail(error)
                break
            with self._changed:
                if not self._pending:
                    break
                if scope.is_over():
                    return False
                self._changed.wait(min(pause_s, scope.remaining_s()))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return self._failure is None

    def stop(self) -> None:
        """Nothing is looked after any more."""
        with self._changed:
            self._pending, self._communicators = {}, []
            _busy.discard(self)

    # ---- the looks of the monitor ----

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to look at."""
        return not self._pending

    def look(self, now_s: float) -> None:
        """Release what is over, and end the group if something is wrong. As the monitor's `Looked.look`."""
        with self._background():
            found = self._problem(now_s)
            if found is not None:
                self.report_and_fail(found)

    def _problem(self, now_s: float) -> BaseException | None:
        try:
            self._reap()
        except TransportError as error:
            return error
        with self._changed:
            communicators, pending = list(self._communicators), list(self._pending)
        if not pending:
            return None
        for communicator in communicators:
            try:
                communicator.check()
            except SynclineError as error:
                failure = TransportError(f"{error} ({self._place()}; {pending[0].describe()} was in flight)")
                failure.__cause__ = error
                return failure
        late = next((launch for launch in pending if launch.scope.is_over()), None)
        return self._heard(pending[0], now_s) if late is None else _timed_out(late)

    def _heard(self, waiting: Launch, now_s: float) -> TransportError | None:
        """That another rank has failed. A store that raises, or does not answer, is no failure of the group."""
        hearing = self._hearing
        if hearing is not None and hearing.done.is_set():
            self._hearing = None
            with suppress(Exception):
                failure = hearing.result()
                if failure is not None:
                    return TransportError(
                        f"{waiting.describe()} will not finish, because another rank does not come: {failure}"
                    )
        if self._hearing is None and now_s >= self._next_hearing_s:
            self._next_hearing_s = now_s + _HEAR_S
            self._hearing = DetachedCall(self._hear, "syncline-nccl-hear")
        return None

    def _reap(self) -> None:
        """Let go of what is over.

        Raises:
            TransportError: the GPU faulted, as it says at every question from then on.
        """
        with self._changed:
            pending = list(self._pending)
        over = [launch for launch in pending if launch.is_over()]
        with self._changed:
            for launch in over:
                self._pending.pop(launch, None)
            if not self._pending:
                _busy.discard(self)
            if over:
                self._changed.notify_all()

    # ---- the end; see Note [Failure over NCCL] ----

    def fail(self, error: BaseException) -> None:
        """End the group. Any thread may call it, under no lock; the first failure counts."""
        try:
            self._reap()
        except TransportError:
            pass  # a GPU that faulted is a failure, too, but a second one
        with self._changed:
            if self._failure is not None:
                return
            failure = self._failure = Failure(error)
            launches, self._pending = list(self._pending), {}
            communicators, self._communicators = self._communicators, []
            _busy.discard(self)
            self._changed.notify_all()
        tensors: list[torch.Tensor] = []
        for launch in launches:
            try:
                tensors += launch.fail(failure)
            except Exception:  # noqa: BLE001 - a future that a faulty GPU keeps from ending must not keep the others from it
                pass
        for communicator in communicators:
            self._abort(communicator, tensors)
        DetachedCall(lambda: self._tell(error), "syncline-nccl-tell")

    def report_and_fail(self, error: BaseException) -> BaseException:
        """Have a failure reported, before anything is ended, then `fail`; returns it as it was reported."""
        failure = error if self._failure is not None else self._report(error)
        self.fail(failure)
        return failure

    def _abort(self, communicator: Communicator, tensors: Sequence[torch.Tensor]) -> None:
        DetachedCall(partial(_abort_holding, communicator, tensors), "syncline-nccl-abort", self._background)


def _abort_holding(communicator: Communicator, tensors: Sequence[torch.Tensor]) -> None:  # noqa: ARG001 - holding them is the point
    """Abort, and hold the tensors of what was in flight until the kernels that may write them are gone."""
    communicator.abort()


def _timed_out(launch: Launch) -> CollectiveTimeout:
    return CollectiveTimeout(
        f"{launch.describe()} did not finish within {launch.scope.timeout_s:g} s. Look for a rank that died, "
        "left early, or issued other collectives; or pass a longer timeout to init_process_group"
    )


def gpu_fault(what: str, error: BaseException) -> TransportError:
    """The named error for one that torch raises of a GPU."""
    return TransportError(f"the GPU reported, while the group waited for {what}: {error}")
