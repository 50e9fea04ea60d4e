"""Work: a handle on one collective in flight, and its future."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from typing_extensions import override

from .engine.cancel_scope import seconds
from .errors import CollectiveTimeout, TransportError
from .forks import fork_count, not_the_rank

if TYPE_CHECKING:
    AnyFuture: TypeAlias = torch.futures.Future[Any]
    TensorsFuture: TypeAlias = torch.futures.Future[list[torch.Tensor]]
else:
    AnyFuture = TensorsFuture = torch.futures.Future

Devices: TypeAlias = list[int | str | torch.device] | None


class GroupFuture(AnyFuture):
    """The future of a collective. A callback of the same group can wait for the future without a deadlock.

    If a callback given to `then` raises an error, the future that `then` returned fails with this error. `devices` is a result
    of `devices_of`.
    """

    def __init__(self, devices: Devices) -> None:
        super().__init__(devices=devices)
        self._devices = devices
        self._fork_count = fork_count()
        self._parts: Sequence[AnyFuture] = ()  # the futures that this future joins, until they are done
        self._failure: BaseException | None = None

    @override
    def wait(self) -> Any:
        self.prepare_to_block()
        return super().wait()

    def prepare_to_block(self) -> None:
        """Do the work that only this thread can do to complete this future. Call this method before a wait for the future.

        Raises:
            GroupClosedError: in a forked child, if the future is not done.
        """
        if self.done():
            return
        # In a fork no thread finishes the future, so waiting would never end. See Note [Forks] in `forks`.
        if self._fork_count != fork_count():
            raise not_the_rank("wait", "a future of a collective")
        self._run_queue_here()

    def _run_queue_here(self) -> None:
        for part in self._parts:
            if isinstance(part, GroupFuture):
                part.prepare_to_block()

    def wait_for_completion(self) -> None:
        """Wait until the thread that completes this future has done so. Call this method after the collective has finished.

        The method does not raise the future's error, and does not wait for callbacks: torch completes a future before the
        callbacks run.
        """
        # In a fork no thread completes the future. See Note [Forks] in `forks`.
        if self._fork_count == fork_count():
            with suppress(Exception):  # an error of the collective, which the caller raises itself
                _wait_as_torch_does(self)

    @override
    def set_exception(self, result: BaseException) -> None:
        if not isinstance(result, Exception):
            super().set_exception(result)  # torch refuses it
        # The error's traceback holds frames, and a frame may hold this future. Python's garbage collector can free such a cycle
        # only if it sees all references, and it sees none of those of torch's future, which is an object of C++. So keep the
        # error here. torch gets a copy without a traceback, and a function that raises the error.
        self._failure = result
        this = weakref.ref(self)

        def raise_failure(copied: Exception) -> NoReturn:
            future = this()
            # torch's code may hold only its own object, for example in `torch.futures.collect_all`.
            if future is None or future._failure is None:
                raise copied
            raise future._failure

        self._set_unwrap_func(raise_failure)
        self.set_result(_without_frames(result))

    @override
    def then(self, callback: Callable[[Any], Any]) -> Any:
        following = self._following(self._devices)
        following._parts = self._parts  # a wait for the new future needs the same parts

        def run(done: Any) -> None:
            following._parts = ()
            try:
                following.set_result(callback(done))
            # Catch Ctrl-C, too: torch would only print it, and `following` would never complete.
            except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets the error
                fail_future(following, error)

        self.add_done_callback(run)
        return following

    def _following(self, devices: Devices) -> GroupFuture:
        """Make a future that is completed in a callback of this future."""
        return GroupFuture(devices)


def new_future(tensors: Sequence[torch.Tensor]) -> GroupFuture:
    """Make a future for these tensors."""
    return GroupFuture(devices_of(tensors))


def following_future(future: AnyFuture, tensors: Sequence[torch.Tensor]) -> GroupFuture:
    """Make a future for these tensors. The caller completes the new future in a callback of `future`.

    If a group's queue guards callbacks of `future`, it also guards callbacks of the new future; see Note [Late callbacks] in
    `engine.queue`.
    """
    return future._following(devices_of(tensors)) if isinstance(future, GroupFuture) else new_future(tensors)


def fail_future(future: AnyFuture, error: BaseException) -> None:
    """Complete a future with an error of any class.

    An error that is not an `Exception`, such as Ctrl-C, must not interrupt other threads that wait for the future. So the
    future gets a `TransportError` with the error as its `__cause__`.
    """
    if not isinstance(error, Exception):
        named = TransportError(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
        named.__cause__ = error
        error = named
    future.set_exception(error)


def _without_frames(error: BaseException) -> Exception:
    """Return a copy of an error, without its traceback.

    If the error cannot be copied or pickled, return another error, whose text is the class of `error`. On CUDA, torch pickles
    the values of futures.
    """
    try:
        copied = copy.copy(error)
        pickle.dumps(copied)
        assert isinstance(copied, Exception)
        return copied
    except Exception:  # noqa: BLE001 - a third party's class may raise anything
        return TransportError(type(error).__name__)


def _wait_as_torch_does(future: Any) -> None:
    # The `wait` of our classes would record that the program itself has waited.
    (AnyFuture.wait if isinstance(future, GroupFuture) else type(future).wait)(future)


def join_futures(futures: Sequence[TensorsFuture], tensors: list[torch.Tensor]) -> TensorsFuture:
    """Make a future whose value is `tensors`, and which is done when all `futures` are done.

    If some of `futures` fail, the new future gets the error of the first failed future in the list. The error keeps its class.
    The futures are in the order in which their calls were issued.
    """
    # Whether a callback of the joined future is late depends on the last part. See Note [Late callbacks] in `engine.queue`.
    joined = following_future(futures[-1], tensors) if futures else new_future(tensors)
    joined._parts = futures
    lock = threading.Lock()
    missing = len(futures)

    def settle() -> None:
        try:
            for future in futures:
                # The future is done, so this wait does not block. On CUDA, the current stream waits for the collective.
                _wait_as_torch_does(future)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets the error
            fail_future(joined, error)
        else:
            joined.set_result(tensors)
        joined._parts = ()  # they may hold copies of tensors

    def note(_: TensorsFuture) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            is_last = missing == 0
        if is_last:
            settle()

    for future in futures:
        future.add_done_callback(note)
    # Without futures, nobody calls `note`.
    if not futures:
        settle()
    return joined


def future_for_torch(future: AnyFuture, tensors: Sequence[torch.Tensor]) -> AnyFuture:
    """Make a future with the outcome of `future`, for torch's C++ code. If `future` fails, C++ code sees the error.

    Note [Futures that fail]
    ~~~~~~~~~~~~~~~~~~~~~~~~
    torch's `Future.set_exception` stores the exception as the future's value, and Python's `wait` raises it. (Our own futures
    store a copy.) C++ code (the reducer of torch's DDP, its communication hooks) takes this value for a list of tensors, and
    dies by SIGSEGV. C++ sees a
    failure only if a function given to torch's own `then` has raised an error.

    Our own futures keep the exception, because our callers catch it by its class. So torch's C++ code must not get our futures.
    Works of our groups, and our hooks under torch's DDP, give torch new futures from this function.

    There is one exception: *inside a callback* of our groups, torch gets our own future, because only our own future can be
    waited for there (see `GroupFuture.wait`). If the callback raises the future's error, torch's `then` lets C++ see the error.
    In a callback, never wait for a future that this function has made; wait for the work instead.

    A callback of `future` completes the new future, so the group knows that callbacks of the new future belong to its
    collective (see Note [Late callbacks] in `engine.queue`).
    """
    is_over: AnyFuture = AnyFuture(devices=devices_of(tensors))

    def outcome(_: object) -> Any:
        _wait_as_torch_does(future)  # `future` is done; on CUDA, the current stream waits for the collective
        return future.value()

    given: AnyFuture = is_over.then(outcome)
    future.add_done_callback(lambda _: is_over.set_result(None))
    return given


def devices_of(tensors: Sequence[torch.Tensor]) -> Devices:
    """Return the CUDA devices of tensors, as torch's `Future` takes them; None if no tensor is on a CUDA device."""
    devices: list[int | str | torch.device] = list({tensor.device for tensor in tensors if tensor.is_cuda})
    return devices or None


class Work(ABC):
    """One collective that was issued and may still be running.

    Until `wait` returns, do not read or write the tensors that were passed to the collective. `if work:` raises a TypeError.
    """

    @abstractmethod
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until the collective has finished. On CUDA, make the current stream wait for the collective instead.

        Args:
            timeout: seconds or a timedelta; None means the group's own time limit.

        Returns:
            Always true, as in torch.distributed.

        Raises:
            CollectiveTimeout: `timeout` was reached. The collective itself goes on. But a send or receive over Gloo fails: Gloo
                closes the connection between the two ranks, and later calls of the group fail, too.
            SynclineError: the collective failed.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether the collective has finished, with or without an error. Never blocks.

        Do not poll this method instead of calling `wait`: a send or receive over Gloo counts as finished only after `wait`.
        """

    @abstractmethod
    def exception(self) -> BaseException | None:
        """The error with which the collective failed, or None if it succeeded or has not finished."""

    @abstractmethod
    def result(self) -> list[torch.Tensor]:
        """Return the output tensors: the same objects that were passed to the collective. Call this method after `wait`."""

    def source_rank(self) -> int | None:
        """Return the sender's rank in the group if this is a receive that has finished, otherwise None."""
        return None

    @abstractmethod
    def get_future(self) -> TensorsFuture:
        """Return a `torch.futures.Future` of this work. Its value is the list of output tensors.

        If you attach a callback before the collective has finished, the callback runs on the thread that finishes the
        collective. If you attach a callback later, the callback runs at once, on your thread.

        If a callback issues a collective, this collective runs inside the callback, before the calls in the group's queue. On
        every rank, attach such a callback before you issue the group's next collective, or after `wait`. Otherwise the callback
        is late, and its collective raises a `MisuseError`. See also `ProcessGroup.has_total_order`.
        """

    def before_end(self, action: Callable[[], None]) -> None:
        """Run an action when the call ends, before any `wait` returns. For example, the action may read the clock.

        If the call has ended already, the action runs at once. The action must be quick, must not take a lock and must not call
        Syncline. For a `FutureWork` or a work of a `TorchGroup`, the action may run a moment after `wait` returns.
        """
        self.get_future().add_done_callback(lambda _: action())

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a Work has no truth value; call wait() to finish it, is_completed() to ask whether it has, or compare with None"
        )


class FinishedWork(Work):
    """The work of a collective that had finished when the call returned."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors

    @override
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        """Always true."""
        return True

    def exception(self) -> BaseException | None:
        """Always None: if the collective fails, the call itself raises the error."""
        return None

    @override
    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> TensorsFuture:
        """A future that is already complete."""
        future = new_future(self._tensors)
        future.set_result(self._tensors)
        return future


class PendingWork(Work):
    """The work of a collective on another thread. That thread calls `succeed` or `fail`; only the first call counts."""

    __slots__ = ("_before_end", "_describe", "_error", "_future", "_is_done", "_lock", "_tensors", "_waiting")

    def __init__(self, tensors: list[torch.Tensor], describe: Callable[[], str]) -> None:
        self._tensors = tensors
        self._describe = describe
        self._is_done = False
        self._waiting: threading.Event | None = None  # made by the first thread that must block; most works need no event
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._future: GroupFuture | None = None
        self._before_end: tuple[Callable[[], None], ...] = ()

    @override
    def before_end(self, action: Callable[[], None]) -> None:
        with self._lock:
            if not self._is_done:
                self._before_end += (action,)
                return
        action()

    def leave_to_parent(self, error: BaseException) -> None:
        """Make every `wait` raise `error`. Called in a forked child, where no thread will finish this work."""
        # The parent's threads may have held the old lock when it forked. See Note [Forks] in `forks`.
        self._lock = threading.Lock()
        self._waiting = None
        self._error = error
        self._is_done = True

    def succeed(self) -> None:
        """Finish without an error: wake the waiters, then run the future's callbacks on this thread."""
        self._finish(None)

    def fail(self, error: BaseException) -> None:
        """Finish with an error, which every waiter and the future raise."""
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        with self._lock:
            # `abort` may end this work while another thread runs the collective. Only the first end counts.
            if not self._is_done:
                # Before `_is_done` is set, run the actions: `wait` reads `_is_done` without the lock. Each action runs only
                # once, even if an action raises and an abort calls this method again.
                actions, self._before_end = self._before_end, ()
                for action in actions:
                    action()
                self._error = error
                self._is_done = True
            future, waiting = self._future, self._waiting
        # Do the rest even if the work was over before: Ctrl-C may have stopped the first end just here.
        # Release the lock first, because callbacks run here. A callback may call `get_future`, which takes the lock.
        if waiting is not None:
            waiting.set()
        if future is not None and not future.done():
            self._complete(future)

    def _complete(self, future: TensorsFuture) -> None:
        try:
            if self._error is None:
                future.set_result(self._tensors)
            else:
                fail_future(future, self._error)
        except RuntimeError:
            # A second thread that ended this work has completed the future a moment before, with the same outcome.
            if not future.done():
                raise

    @override
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        timeout_s = None if timeout is None else seconds(timeout)
        if not (self._is_done or self._wait_until_done(timeout_s)):
            raise CollectiveTimeout(
                f"{self._describe()} did not finish within the {timeout_s:g} s timeout given to wait(); it goes on, and its "
                "tensors still belong to it. Wait again, or abort the group."
            )
        # The thread that ended the work completes the future a moment later. Wait for the future, too. Then a callback that
        # the program attaches next runs at once, on every rank.
        future = self._future
        if future is not None and not future.done():
            future.wait_for_completion()
        if self._error is not None:
            raise self._error
        return True

    def _wait_until_done(self, timeout_s: float | None) -> bool:
        with self._lock:
            if self._is_done:  # the work has just finished, so nobody would set the event
                return True
            if self._waiting is None:
                self._waiting = threading.Event()
            waiting = self._waiting
        return waiting.wait(timeout_s)

    def is_completed(self) -> bool:
        """Whether `succeed` or `fail` was called."""
        return self._is_done

    def exception(self) -> BaseException | None:
        """The error given to `fail`, or None."""
        return self._error

    @override
    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> TensorsFuture:
        """The future of this work; the same object at every call."""
        with self._lock:
            if self._future is None:
                future = self._new_future()
                # `_finish` saw no future, so nobody else completes it. The new future has no callbacks, so complete it under
                # the lock: other threads, and this thread after Ctrl-C, get the future only when it is done.
                if self._is_done:
                    self._complete(future)
                self._future = future
            return self._future

    def _new_future(self) -> GroupFuture:
        return new_future(self._tensors)


class FutureWork(Work):
    """A work that is over when a future is done. The future may stand for a collective and a computation after the collective.

    The future's value is the list of output tensors. Make this work before the program can attach a callback to the future.
    """

    def __init__(self, future: TensorsFuture, tensors: list[torch.Tensor], describe: Callable[[], str]) -> None:
        self._future = future
        self._tensors = tensors
        self._describe = describe
        self._is_over = is_over = threading.Event()
        # This must be the future's first callback, so that `wait` does not wait for callbacks of the program. (If the future is
        # done, add no callback: on CUDA, the callback would make a further stream wait for the future.)
        if not future.done():
            future.add_done_callback(lambda _: is_over.set())

    @override
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        timeout_s = None if timeout is None else seconds(timeout)
        if isinstance(self._future, GroupFuture):
            self._future.prepare_to_block()
        # The `wait` of a future has no time limit, and does not end at Ctrl-C, so wait for the event first.
        if not (self._future.done() or self._is_over.wait(timeout_s)):
            raise CollectiveTimeout(f"{self._describe()} did not finish within the {timeout_s:g} s timeout given to wait()")
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the future is done."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """Return the error of the future, or None if the future has no error or is not done."""
        if not self._future.done():
            return None
        try:
            self._future.wait()
        except Exception as error:  # noqa: BLE001 - the caller judges the error
            return error
        return None

    @override
    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> TensorsFuture:
        """The future itself."""
        return self._future
