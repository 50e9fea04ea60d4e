"""Turn a collective of torch.distributed into a `Work`, and a send or a receive into a `Request`."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from typing_extensions import override

from ..engine.cancel_scope import CancelScope, seconds
from ..engine.living_set import LivingSet
from ..engine.transport import Request
from ..errors import CollectiveTimeout, SynclineError, TransportError, with_details
from ..forks import fork_count, in_forks, not_the_rank
from ..tensors.layout import untracked
from ..torch_internals import source_rank
from ..work import TensorsFuture, Work


class TorchRequest(Request):
    """A send or a receive of torch.distributed. Only `wait` can find out whether the transfer is over."""

    def __init__(self, torch_work: Any, wire: torch.Tensor, *, receives: bool, source: int | None = None) -> None:
        self._torch_work = torch_work
        self._wire = wire
        self._receives = receives
        self._source = source
        self._over = False

    def wait(self, scope: CancelScope) -> None:
        """Block until the transfer is over, at most for the time limit of `scope`. `scope.cancel` does not end the wait."""
        if self._over:
            return
        try:
            self._torch_work.wait(torch_limit(scope.remaining_s()))
        except RuntimeError as error:
            raise mapped(error) from error
        self._over = True
        if self._receives and self._source is None:
            self._source = source_rank(self._torch_work)

    def test(self) -> bool:
        """Return whether `wait` has returned. Before that, it is unknown whether the transfer is over."""
        return self._over

    def source(self) -> int | None:
        """Return the sender's rank. For a receive from any rank, the result is None until `wait` has returned."""
        return self._source


def torch_limit(limit_s: float) -> timedelta:
    """Convert a time limit in seconds to the form that torch takes."""
    # torch counts whole milliseconds, and takes 0 for no limit.
    return timedelta(seconds=max(limit_s, 1e-3))


def mapped(error: RuntimeError) -> TransportError:
    """Return the `CollectiveTimeout` or other `TransportError` that stands for an error of torch.distributed."""
    # After a time-out, Gloo says "Application timeout caused pair closure" in each later call over the connection, even if the
    # later call itself did not wait.
    if "caused pair closure" in str(error):
        return TransportError(
            with_details(
                "Gloo has closed the connection because an earlier send, receive or collective over it timed out on this rank; "
                "give that one a longer time limit, and make a new group",
                str(error),
            )
        )
    timed_out = "timed out" in str(error).lower() or "timeout" in str(error).lower()
    kind = CollectiveTimeout if timed_out else TransportError
    return kind(with_details("torch.distributed reported an error; look for the rank that failed first", str(error)))


class TorchWork(Work):
    """A `Work` for a work of torch.distributed that may be followed by a last step, such as a copy of the result.

    If the program has asked for a future, torch's own thread does the last step. Otherwise the thread that calls `wait` does
    the last step, so that no Python object is left on torch's thread.

    Args:
        tensors: the outputs.
        torch_work: torch's work.
        finish: the last step, or None.
        torch_group: the group that the work runs on.
    """

    def __init__(
        self, tensors: list[torch.Tensor], torch_work: Any, finish: Callable[[], Any] | None, torch_group: Any = None
    ) -> None:
        self._tensors = tensors
        self._torch_work = torch_work
        self._finish = finish
        self._torch_group = torch_group
        self._lock = threading.Lock()
        self._future: TensorsFuture | None = None
        self._done = False
        self._error: BaseException | None = None
        self._last_step_error: Exception | None = None
        self._fork_count = fork_count()

    @override
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        self._refuse_in_fork("wait")
        try:
            if timeout is None:
                self._torch_work.wait()
            else:
                self._torch_work.wait(torch_limit(seconds(timeout)))
            with self._lock:
                future = self._future
                # Without a future, this thread does the last step.
                if future is None:
                    self._do_what_remains()
            # With a future, torch's thread does the last step. Wait for this step, too.
            if future is not None:
                future.wait()
        except SynclineError as error:  # from the last step
            self._error = error
            raise
        except RuntimeError as error:
            self._error = mapped(error)
            raise self._error from error
        # An earlier wait may have reached its time limit, but the work has gone on.
        self._error = None
        return True

    def wait_for(self, limit_s: float) -> bool:
        """Wait `limit_s` seconds at most. Return whether the work and its last step are over. The caller may wait again.

        Raises:
            TransportError: the work failed. If torch's own time limit ended the work, the error is a `CollectiveTimeout`.
        """
        try:
            return self.wait(limit_s)
        except CollectiveTimeout:
            # The work ended just now, or torch ended the work at torch's time limit. In both cases `wait` ends at once.
            if self._torch_work.is_completed():
                return self.wait()
            # The work goes on: only this wait has reached its limit. So remove the error that `wait` has stored.
            self._error = None
            return False

    def is_completed(self) -> bool:
        """Return whether the collective and its last step are done."""
        if self._is_inherited():
            return False
        if self._future is not None:
            return self._future.done()
        return self._done or (bool(self._torch_work.is_completed()) and self._completes())

    def exception(self) -> BaseException | None:
        """Return the error if the work has finished with an error, otherwise None."""
        # Only the future has the error so far. `_completes` stores the error in this object.
        if self._error is None and self.is_completed() and self._future is not None:
            self._completes()
        return self._error

    @override
    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> TensorsFuture:
        """Return a future that completes when the work and its last step are over."""
        self._refuse_in_fork("get_future")
        with self._lock:
            if self._future is None:
                delivery = _Delivery(self._deliver, self._torch_group)
                self._torch_group = None
                self._future = self._torch_work.get_future().then(delivery)
            return self._future

    def _deliver(self, done: Any) -> list[torch.Tensor]:
        done.value()
        self._do_what_remains()
        return self._tensors

    def _do_what_remains(self) -> None:
        # A thread that waited before there was a future may have done the last step.
        if not self._done:
            try:
                if self._finish is not None:
                    with untracked():
                        self._finish()
            except Exception as error:  # noqa: BLE001 - raised below, in each wait
                # Never repeat a failed last step: the step may call a collective, which the other ranks do not call again.
                self._last_step_error = error
            self._finish = self._torch_group = None  # torch's thread must not drop the last reference to the group
            self._done = True
        if self._last_step_error is not None:
            raise self._last_step_error

    def _is_inherited(self) -> bool:
        # A forked child has the object, but not the threads of torch that carry out the work.
        return self._fork_count != fork_count() and not self._done

    def _refuse_in_fork(self, call: str) -> None:
        if self._is_inherited():
            raise not_the_rank(call, "a collective of torch.distributed")

    def _completes(self) -> bool:
        try:
            return self.wait()
        except SynclineError:
            # A work that failed is completed, too.
            return True


class _Delivery:
    """The function that a future of torch calls on torch's own thread.

    Note [Leaving while torch's thread drops what it called]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    When a future is over, torch's thread may still hold the functions that it called. If the interpreter ends before the thread
    drops them, the process aborts ("terminate called without an active exception"). So at exit we wait until torch has dropped
    the functions that it called.

    Then the thread drops the work, which may hold the last reference to a tensor that Python has seen. To drop this tensor, the
    thread needs the interpreter, too. We cannot see when the thread has finished. So at exit we release the GIL for the time
    that a waiting thread usually needs. This pause is no guarantee.

    Note [Who destroys a group]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~
    The destructor of torch's Gloo group joins Gloo's threads. If the reducer of torch's DDP drops the last reference to the
    group, the destructor holds the GIL. But a thread that completed a bucket needs the GIL to drop the functions that it
    called. So a program that drops its model just after backward would hang. To prevent such a hang, we keep each group for
    some seconds, and until Gloo's threads have dropped the functions that they called.
    """

    def __init__(self, deliver: Callable[[Any], Any], torch_group: Any) -> None:
        self._deliver = deliver
        self.was_called = False
        self._group_id = id(torch_group)
        over = []
        now_s = time.monotonic()
        with _lock:
            _deliveries.add(self)
            _last_used_s[torch_group] = now_s
            running = {delivery._group_id for delivery in _deliveries}
            for group, used_s in list(_last_used_s.items()):
                if now_s - used_s > _KEPT_S and id(group) not in running:
                    over.append(group)
                    del _last_used_s[group]
        del over  # only after the lock is released, because the group's destructor waits

    def __call__(self, done: Any) -> Any:
        self.was_called = True
        return self._deliver(done)


_EXIT_S = 5.0
_LET_GO_S = 0.02  # four times the interval after which a waiting thread asks for the GIL
_KEPT_S = 5.0
_lock = threading.Lock()
_deliveries: LivingSet[_Delivery] = LivingSet()
_last_used_s: dict[Any, float] = {}  # the groups that we keep, and when a future of the group was last asked for


@in_forks
def _forget() -> None:
    global _lock
    _lock = threading.Lock()
    _deliveries.clear()  # the groups stay: a child has no threads that their destructors could join


@atexit.register
def _wait_until_dropped() -> None:
    end_s = time.monotonic() + _EXIT_S
    while any(delivery.was_called for delivery in _deliveries) and time.monotonic() < end_s:
        time.sleep(0.001)
    time.sleep(_LET_GO_S)
