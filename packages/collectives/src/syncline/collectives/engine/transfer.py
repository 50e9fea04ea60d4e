"""`TransferWork`: the work of a send or a receive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import torch
from typing_extensions import override

from ..errors import CollectiveTimeout, SynclineError, TransportError
from ..forks import fork_count, not_the_rank
from ..tensors.layout import untracked
from ..work import PendingWork, TensorsFuture, Work
from .cancel_scope import CancelScope, seconds, start_thread
from .queue import release_if_held
from .transport import Request


class TransferWork(Work):
    """A send or receive in flight. A receive fills its tensor only when a thread calls `wait` or `is_completed`.

    Args:
        request: the transport's request.
        deliver: called when the request has succeeded, for example to copy the data to the program's tensor.
        describe: returns the transfer's name for error messages.
        timeout_s: the default time limit of `wait`, in seconds.
        ask: returns an error if the transfer can never end or its group has ended, else None. If the library allows it, the
            waiting thread calls this function now and then.
        explain: takes an error of the transport. Returns an error that names the lost rank behind this error, or None.
    """

    def __init__(
        self,
        request: Request,
        tensors: list[torch.Tensor],
        deliver: Callable[[], object],
        describe: Callable[[], str],
        timeout_s: float,
        *,
        ask: Callable[[], TransportError | None] | None = None,
        explain: Callable[[TransportError], TransportError | None] = lambda _: None,
    ) -> None:
        self._request = request
        self._timeout_s = timeout_s
        self._deliver = deliver
        self._describe = describe
        self._ask = ask
        self._explain = explain
        self._driving = threading.RLock()  # only a thread that holds an RLock can release it: see `release_if_held`
        self._fork_count = fork_count()
        self._outcome = PendingWork(tensors, describe)
        self._starting = threading.Lock()  # held while a thread starts, so that only one thread starts
        self._thread: threading.Thread | None = None  # waits for the transfer, so that its future is completed

    @override
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if not self._outcome.is_completed():
            # A forked child has the object but not the library's connections, so it must not wait.
            if self._fork_count != fork_count():
                raise not_the_rank("wait", self._describe())
            self._drive_within(seconds(timeout, self._timeout_s))
        return self._outcome.wait()

    def is_completed(self) -> bool:
        """Whether the transfer has ended, with or without an error. False if the library cannot tell this without waiting."""
        # In a forked child, nobody drives the request.
        if self._fork_count != fork_count():
            return self._outcome.is_completed()
        try:
            is_free = self._driving.acquire(blocking=False)
        except BaseException:
            release_if_held(self._driving)
            raise
        # Another thread waits for the request, and will set the outcome.
        if not is_free:
            return self._outcome.is_completed()
        try:
            if not self._outcome.is_completed():
                self._finish_if(self._request.test)
        finally:
            self._driving.release()
        return self._outcome.is_completed()

    def exception(self) -> BaseException | None:
        r"""See `Work.exception`."""
        return self._outcome.exception()

    def result(self) -> list[torch.Tensor]:
        r"""See `Work.result`."""
        return self._outcome.result()

    def source_rank(self) -> int | None:
        """Return the sender's rank in the group. Call this method only for a receive that is over."""
        return self._request.source()

    def get_future(self) -> TensorsFuture:
        """Return the future of this transfer. The first call starts a thread that waits for the transfer."""
        with self._starting:
            if self._thread is None and not self._outcome.is_completed():
                thread = threading.Thread(target=self._wait_quietly, name="syncline-transfer", daemon=True)
                start_thread(thread)
                self._thread = thread
        return self._outcome.get_future()

    @override
    def before_end(self, action: Callable[[], None]) -> None:
        self._outcome.before_end(action)
        self.get_future()  # its thread waits for the transfer, even if nobody else does

    def _wait_quietly(self) -> None:
        try:
            self.wait()
        except BaseException as error:  # noqa: BLE001 - the future's waiters must get it
            # At its time limit, `wait` leaves the transfer in flight. End it here, because nothing else completes the future.
            self._outcome.fail(error)

    def _drive_within(self, timeout_s: float) -> None:
        scope = CancelScope(timeout_s, self._ask)
        # If another thread waits for the request, wait for that thread, but not longer than this thread's time limit.
        try:
            is_free = self._driving.acquire(timeout=min(timeout_s, threading.TIMEOUT_MAX))
        except BaseException:
            release_if_held(self._driving)
            raise
        if not is_free:
            raise self._timed_out(timeout_s)
        try:
            # The other thread may have finished the transfer while this one waited for the lock.
            if not self._outcome.is_completed():
                self._drive(scope)
        except TimeoutError as error:
            raise self._timed_out(timeout_s) from error
        finally:
            self._driving.release()

    def _drive(self, scope: CancelScope) -> None:
        def waited() -> bool:
            try:
                self._request.wait(scope)
            except BaseException as error:
                # The transfer may have ended while this thread slept, just before the reason to give up came.
                if error is not scope.reason or not self._request.test():
                    raise
            return True

        try:
            self._finish_if(waited, scope)
        except SynclineError as reason:  # the scope's reason; the transfer itself goes on
            raise reason.reworded(f"{self._describe()}: {reason}") from reason.__cause__

    def _finish_if(self, is_over: Callable[[], bool], scope: CancelScope | None = None) -> None:
        try:
            # If the future's thread has given up before, do not deliver: the program may use its tensor again.
            if is_over() and not self._outcome.is_completed():
                # Deliver before `succeed`, because the program may read its tensor as soon as the transfer has succeeded.
                with untracked():
                    self._deliver()
                self._outcome.succeed()
        except TimeoutError:  # this thread's time limit; another thread may wait for longer
            raise
        except BaseException as error:
            if scope is not None and error is scope.reason:  # this thread's wait was cancelled; the request did not fail
                raise
            self._outcome.fail(self._explained(error))

    def _explained(self, error: BaseException) -> BaseException:
        # Bugs and Ctrl-C keep their type and text.
        if not isinstance(error, SynclineError):
            return error
        behind = (self._explain(error) if isinstance(error, TransportError) else None) or error
        return behind.reworded(f"{self._describe()}: {behind}")

    def _timed_out(self, timeout_s: float) -> CollectiveTimeout:
        return CollectiveTimeout(
            f"{self._describe()} was not over within {timeout_s:g} s (timeout). Does the other rank call its counterpart, "
            "with the same tag, dtype and size?"
        )
