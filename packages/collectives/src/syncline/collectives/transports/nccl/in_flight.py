"""`InFlight` watches the operations of a group on the GPU, and ends the group when an operation fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial

import torch

from ...engine.cancel_scope import CancelScope, DetachedCall
from ...errors import CollectiveTimeout, SynclineError, TransportError
from .communicator import Communicator
from .work import FIRST_LOOK_S, LONGEST_PAUSE_S, Failure, Launch, gpu_fault

# While calls are in flight, each rank asks this often whether another rank has failed.
_HEAR_S = 1.0
# How long `stop` waits for NCCL's answer to the monitor. NCCL answers at once, except after a failure.
_ANSWER_S = 5.0

# The monitor holds no references to the objects that it calls. A program may drop a group and its works while calls are in
# flight, so this set keeps the group's `InFlight` alive.
_busy: set[InFlight] = set()


class FatalError(Exception):
    """An error that must end the group, raised by code that holds locks. The group ends after the locks are released.

    Users never see this exception.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class InFlight:
    """Watches the launches of a group (see `Launch`). Releases finished launches. Ends the group if a launch fails or hangs.

    Note [Failure over NCCL]
    ~~~~~~~~~~~~~~~~~~~~~~~~
    The group fails if one of these events happens:

    - a collective exceeds its time limit,
    - NCCL reports an error of a communicator,
    - the group cannot connect, or cannot issue a collective,
    - the user calls `abort`,
    - another rank fails (within a node, NCCL may not report this).

    After the first failure, these steps follow:

    1. The group stores the error. Every new collective of the group raises this error.
    2. Every work in flight fails with this error. Threads that block in `wait` raise it at once. Works that were over before
       stay successful.
    3. The group aborts its communicators on separate threads, so that their kernels leave the GPU. Streams that wait for these
       kernels continue, with garbage in the tensors.
    4. If the ranks met in a store, this rank writes the failure to the store. The other ranks read the failure within about
       `_HEAR_S` seconds.

    Step 3 also wakes a thread that was blocked outside of Syncline, such as in `tensor.item()`.

    The monitor (a thread of the process) calls `look` while a launch is in flight. While `look` calls CUDA or NCCL, it holds no
    lock that `fail` takes. So another thread can abort the communicators even if these calls never return.

    Args:
        report: writes a report of a failure, if the group writes reports, and returns the failure.
        tell: tells the other ranks that the group has failed on this rank. This function may block.
        hear: returns an error text if another rank has failed, or None. This function may block.
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
        self._asking = threading.Lock()  # held while the monitor asks NCCL for errors; only `stop` waits for it
        self._pending: dict[Launch, None] = {}
        self._communicators: list[Communicator] = []
        self._failure: Failure | None = None

    @property
    def failure(self) -> Failure | None:
        """The failure that ended the group; None if the group has not failed."""
        return self._failure

    def reason_to_give_up(self) -> TransportError | None:
        """Return an error if the group has failed. Otherwise return None."""
        return None if self._failure is None else TransportError("the group has failed meanwhile")

    def reason_not_to_come(self, call: str) -> TransportError | None:
        """Return an error if `call` cannot start because the group has failed on some rank. Otherwise return None."""
        return self.reason_to_give_up() or self._heard(call, time.monotonic())

    # ---- communicators and launches ----

    def attach(self, communicator: Communicator) -> None:
        """Add a communicator that a failure of the group must abort. If the group has failed, abort the communicator now."""
        with self._changed:
            if self._failure is None:
                self._communicators.append(communicator)
                return
        # The group failed while NCCL connected. Nobody else would abort this communicator.
        self._abort(communicator, [])

    def watch(self, launch: Launch) -> None:
        """Watch a launch. Call this method before the launch is issued, because the call of NCCL may never return.

        If the group has failed, the launch fails at once.
        """
        with self._changed:
            failure = self._failure
            if failure is None:
                self._pending[launch] = None
                _busy.add(self)
        # Call `launch.fail` without the lock, because the work's callbacks run here.
        if failure is not None:
            launch.fail(failure)

    def drain(self, timeout_s: float, *, also_transfers: bool = True) -> bool:
        """Wait until no launch is in flight. Return False after `timeout_s` seconds, or if the group fails.

        If `also_transfers` is False, do not wait for sends and receives.
        """
        scope, pause_s = CancelScope(timeout_s), FIRST_LOOK_S
        while self._failure is None:
            try:
                self._reap()
            except TransportError as error:
                self.report_and_fail(error)
                break
            with self._changed:
                if not any(also_transfers or not launch.is_transfer for launch in self._pending):
                    break
                if scope.is_over():
                    return False
                self._changed.wait(min(pause_s, scope.remaining_s()))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return self._failure is None

    def stop(self) -> None:
        """Forget all launches and communicators. Afterwards the monitor does not ask NCCL about them.

        If the monitor is asking NCCL now, wait for the answer, but at most `_ANSWER_S` seconds.
        """
        with self._changed:
            self._pending, self._communicators = {}, []
            _busy.discard(self)
        # The caller destroys the communicators next, so wait until the monitor has its answer.
        if self._asking.acquire(timeout=_ANSWER_S):
            self._asking.release()

    # ---- called by the monitor ----

    @property
    def is_idle(self) -> bool:
        """Whether no launch is in flight."""
        return not self._pending

    def look(self, now_s: float) -> None:
        """Release launches that are over, and end the group if there is a problem. The monitor calls this method."""
        try:
            with self._background():
                found = self._problem(now_s)
                if found is not None:
                    self.report_and_fail(found)
        # After a fault of the GPU, CUDA may refuse even the context. If `look` raised the error, the monitor would never call
        # `look` again, and no time limit of the group would have an effect. So the error ends the group.
        except Exception as error:  # noqa: BLE001 - the group's waiters raise it
            with self._changed:
                pending = list(self._pending)
            if pending:
                failure = gpu_fault(pending[0].describe(), error)
                failure.__cause__ = error
                self.report_and_fail(failure)

    def _problem(self, now_s: float) -> BaseException | None:
        try:
            self._reap()
        except TransportError as error:
            return error
        with self._asking:
            # Read the list only here: `stop` may have emptied it.
            with self._changed:
                communicators, pending = list(self._communicators), list(self._pending)
            # Nobody waits for the GPU, so neither NCCL nor the store needs to be asked.
            if not pending:
                return None
            # Ask NCCL before the time limits are checked: NCCL's error names the cause, and a time-out may be its consequence.
            for communicator in communicators:
                try:
                    communicator.check()
                except SynclineError as error:
                    failure = TransportError(f"{error} ({self._place()}; {pending[0].describe()} was in flight)")
                    failure.__cause__ = error
                    return failure
        late = next((launch for launch in pending if launch.scope.is_over()), None)
        return self._heard(pending[0].describe(), now_s) if late is None else _timed_out(late)

    def _heard(self, waiting: str, now_s: float) -> TransportError | None:
        """Return the failure of another rank, if one is known. An error of the store itself does not fail the group."""
        hearing = self._hearing
        if hearing is not None and hearing.done.is_set():
            self._hearing = None
            with suppress(Exception):
                failure = hearing.result()
                if failure is not None:
                    return TransportError(f"{waiting} will not finish, because another rank does not come: {failure}")
        # `_hear` may block, so a separate thread calls it. A new thread starts only when the last thread has answered.
        if self._hearing is None and now_s >= self._next_hearing_s:
            self._next_hearing_s = now_s + _HEAR_S
            with suppress(RuntimeError):  # no thread can start now; the next look tries again
                self._hearing = DetachedCall(self._hear, "syncline-nccl-hear")
        return None

    def _reap(self) -> None:
        """Release launches that are over. Raise a TransportError if the GPU has faulted."""
        with self._changed:
            pending = list(self._pending)
        # Ask the GPU without the lock, because the question may block.
        over = [launch for launch in pending if launch.is_over()]
        with self._changed:
            for launch in over:
                # `fail` may have taken the launch meanwhile.
                self._pending.pop(launch, None)
            if not self._pending:
                _busy.discard(self)
            if over:
                self._changed.notify_all()

    # ---- the end; see Note [Failure over NCCL] ----

    def fail(self, error: BaseException) -> None:
        """End the group with this error. Only the first call has an effect. The calling thread must hold no lock."""
        # Launches that are over by now stay successful, so release them first.
        try:
            self._reap()
        except TransportError:
            pass  # the GPU faulted, but `error` came first
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
            except Exception:  # noqa: BLE001 - if a faulty GPU breaks one future, the others must still fail
                pass
        # Abort only after all launches have failed, because each abort must hold the tensors of all launches.
        for communicator in communicators:
            self._abort(communicator, tensors)
        # Tell the other ranks on a separate thread, because the store may not answer.
        DetachedCall(lambda: self._tell(error), "syncline-nccl-tell")

    def report_and_fail(self, error: BaseException) -> BaseException:
        """Write a report of an error, and end the group with this error. Return the error; its text may now name the report."""
        # Only the first failure gets a report; later ones follow from it.
        failure = error if self._failure is not None else self._report(error)
        self.fail(failure)
        return failure

    def _abort(self, communicator: Communicator, tensors: Sequence[torch.Tensor]) -> None:
        DetachedCall(partial(_abort_holding, communicator, tensors, self._background), "syncline-nccl-abort")


def _abort_holding(
    communicator: Communicator,
    tensors: Sequence[torch.Tensor],  # noqa: ARG001 - holding them is the point
    background: Callable[[], AbstractContextManager[object]],
) -> None:
    """Abort the communicator. Hold the tensors until the kernels that may write to them are gone."""
    with ExitStack() as entered:
        # After a fault of the GPU, CUDA may refuse the context. Abort also then: kernels of other GPUs wait for this rank.
        with suppress(Exception):
            entered.enter_context(background())
        communicator.abort()


def _timed_out(launch: Launch) -> CollectiveTimeout:
    return CollectiveTimeout(
        f"{launch.describe()} did not finish within {launch.scope.timeout_s:g} s. Look for a rank that died, "
        "left early, or issued other collectives; or pass a longer timeout to init_process_group"
    )
