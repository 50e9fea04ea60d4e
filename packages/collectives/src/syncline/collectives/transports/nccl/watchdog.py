"""The thread that looks after what is in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol

from ...engine.cancel_scope import CancelScope, DetachedCall
from ...errors import CollectiveTimeout, SynclineError, TransportError
from .failure import Failure

_PERIOD_S = 0.1


class WatchedCollective(Protocol):
    """What the watchdog needs of a collective in flight."""

    @property
    def scope(self) -> CancelScope:
        """When it is late."""

    @property
    def describe(self) -> Callable[[], str]:
        """Says in words what it is."""

    def is_over(self) -> bool:
        """Whether the GPU is done with it."""

    def release(self) -> None:
        """Let go of the caller's tensors."""

    def fail(self, failure: Failure) -> None:
        """Wake every waiter with an error."""


class WatchedCommunicator(Protocol):
    """What it needs of a communicator."""

    def check(self) -> None:
        """Raise what went wrong since."""

    def abort(self) -> None:
        """End what is in flight."""


class Watchdog:
    """Releases what is over, and ends what will never be.

    Note [Failure over NCCL]
    ~~~~~~~~~~~~~~~~~~~~~~~~
    A failure is the first of: a collective that is past its scope, an error that NCCL reports of a communicator, an error
    raised while a collective was issued or the ranks were connected, and `abort` by the user. What happens then has this order:

    1. The failure is recorded: from now on every new collective of the group raises it.
    2. Every work that is still in flight fails with it: threads that block in `wait` wake and raise, later `wait`s raise.
       What was over before succeeded and stays so.
    3. The communicators are aborted: their kernels leave the GPU. Streams that were ordered after them go on, with garbage.
       Each is aborted on a thread of its own, because NCCL waits there for kernels of the others, or for CUDA graphs; nobody
       waits for these threads.

    So a thread that was blocked outside Syncline (`tensor.item()`, `torch.cuda.synchronize()`) and wakes because of 3 gets the
    named error from whatever it asks of the group next: it cannot issue another collective, nor wait for the one that failed,
    nor close the group in silence.

    The thread is a daemon, runs only while something is in flight, and holds no lock of the group: a thread that is stuck
    inside NCCL cannot keep it from aborting.

    Args:
        name: of the thread.
        place: says where an error happened.
        context: entered on each thread that is started here; asked when it starts.
        report: of a failure, which it returns in words that say where the report is.
    """

    def __init__(
        self,
        name: str,
        place: Callable[[], str],
        context: Callable[[], AbstractContextManager[object]] = nullcontext,
        report: Callable[[BaseException], BaseException] = lambda error: error,
    ) -> None:
        self._name = name
        self._place = place
        self._context = context
        self._report = report
        self._condition = threading.Condition()
        self._pending: list[WatchedCollective] = []
        self._communicators: list[WatchedCommunicator] = []
        self._failure: Failure | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None

    @property
    def failure(self) -> Failure | None:
        """What ended the group, or None."""
        return self._failure

    def attach(self, communicator: WatchedCommunicator) -> None:
        """A communicator to look after; one that comes after a failure is aborted."""
        with self._condition:
            if self._failure is None:
                self._communicators.append(communicator)
                return
        self._abort(communicator, [])

    def watch(self, collective: WatchedCollective) -> None:
        """A collective to look after, from before it is issued."""
        with self._condition:
            self._pending.append(collective)
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                self._thread.start()
            elif len(self._pending) == 1:  # it sleeps until there is one
                self._condition.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the group; see Note [Failure over NCCL]. Any thread may call it, under no lock; the first failure counts."""
        with self._condition:
            if self._failure is not None:
                return
            self._gpu_problem()
            failure = self._failure = Failure(error)
            collectives, self._pending = self._pending, []
            communicators, self._communicators = self._communicators, []
            self._condition.notify_all()
        for collective in collectives:
            try:
                collective.fail(failure)
            except Exception:  # noqa: BLE001 - a future that a faulty GPU keeps from ending must not keep the others from it
                pass
        for communicator in communicators:
            self._abort(communicator, collectives)

    def report_and_fail(self, error: BaseException) -> BaseException:
        """Have a failure reported, before anything is ended, then `fail`; returns it as it was reported."""
        failure = error if self._failure is not None else self._report(error)
        self.fail(failure)
        return failure

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is in flight; false if that took longer than `timeout_s` seconds, or the group failed."""
        with self._condition:
            self._gpu_problem()
            self._condition.wait_for(lambda: not self._pending or self._failure is not None, timeout_s)
            return not self._pending and self._failure is None

    def stop(self) -> None:
        """End the thread; nothing will be watched any more."""
        with self._condition:
            self._stopping = True
            self._communicators = []
            self._condition.notify_all()

    def _abort(self, communicator: WatchedCommunicator, collectives: list[WatchedCollective]) -> None:
        DetachedCall(partial(_abort_holding, communicator, collectives), self._context, f"{self._name}-abort")

    def _loop(self) -> None:
        with self._context():
            while self._look():
                with self._condition:
                    self._condition.wait_for(lambda: self._stopping, _PERIOD_S)

    def _look(self) -> bool:
        """Wait for something to be in flight, and look after it; false at the end."""
        with self._condition:
            self._condition.wait_for(lambda: self._pending or self._stopping)
            if self._stopping:
                return False
            found = self._problem()
        if found is not None:
            self.report_and_fail(found)
        return True

    def _reap(self) -> None:
        over = [collective for collective in self._pending if collective.is_over()]
        if not over:
            return
        for collective in over:
            collective.release()
            self._pending.remove(collective)
        self._condition.notify_all()

    def _gpu_problem(self) -> TransportError | None:
        """Reap; a GPU that faults says so at every question."""
        try:
            self._reap()
        except TransportError as error:
            return error
        return None

    def _problem(self) -> BaseException | None:
        gpu_problem = self._gpu_problem()
        if gpu_problem is not None:
            return gpu_problem
        for communicator in self._communicators:
            try:
                communicator.check()
            except SynclineError as error:
                return self._reported(error)
        late = next((collective for collective in self._pending if collective.scope.expired()), None)
        return None if late is None else self._timed_out(late)

    def _reported(self, error: SynclineError) -> TransportError:
        waiting = f"; {self._pending[0].describe()} was in flight" if self._pending else ""
        failure = TransportError(f"{error} ({self._place()}{waiting})")
        failure.__cause__ = error
        return failure

    def _timed_out(self, collective: WatchedCollective) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"{collective.describe()} did not finish within {collective.scope.timeout_s:g} s. Look for a rank that died, "
            "left early, or issued other collectives; or pass a longer timeout to init_process_group"
        )


def _abort_holding(communicator: WatchedCommunicator, collectives: list[WatchedCollective]) -> None:  # noqa: ARG001 - holding them is the point
    """Abort, and hold the tensors of what was in flight until the kernels that may write them are gone."""
    communicator.abort()
