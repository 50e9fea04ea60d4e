"""Work: a handle on one collective in flight, and its future."""

from __future__ import annotations

import pickle
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import torch
from typing_extensions import override

from .engine.cancel_scope import seconds
from .errors import CollectiveTimeout, TransportError
from .forks import generation, not_the_rank

if TYPE_CHECKING:
    AnyFuture: TypeAlias = torch.futures.Future[Any]
    TensorsFuture: TypeAlias = torch.futures.Future[list[torch.Tensor]]
else:
    AnyFuture = TensorsFuture = torch.futures.Future

Devices: TypeAlias = list[int | str | torch.device] | None


#: Called with a question, "is it done?", before a thread blocks: each does what this thread alone can do to bring that about.
before_blocking: list[Callable[[Callable[[], bool]], object]] = []


def _prepare_to_block(is_done: Callable[[], bool]) -> None:
    for prepare in before_blocking:
        prepare(is_done)


class GroupFuture(AnyFuture):
    """A future that may be waited for in a callback of the group that is to finish it.

    Its `then` keeps the errors of callbacks as they are: torch's makes a RuntimeError of their text.

    Args:
        devices: the CUDA devices of what it will hold; see `devices_of`.
    """

    def __init__(self, devices: Devices) -> None:
        super().__init__(devices=devices)
        self._devices = devices
        self._generation = generation()

    @override
    def wait(self) -> Any:
        if not self.done():
            if self._generation != generation():
                raise not_the_rank("wait", "a future of a collective")
            _prepare_to_block(self.done)
        return super().wait()

    @override
    def then(self, callback: Callable[[Any], Any]) -> Any:
        following = self._following()

        def run(done: Any) -> None:
            try:
                following.set_result(callback(done))
            except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
                fail_future(following, error, self._devices)

        self.add_done_callback(run)
        return following

    def _following(self) -> GroupFuture:
        """What `then` returns."""
        return GroupFuture(self._devices)


def new_future(tensors: Sequence[torch.Tensor]) -> TensorsFuture:
    """A future for these tensors."""
    return GroupFuture(devices_of(tensors))


def fail_future(future: AnyFuture, error: BaseException, devices: Devices) -> None:
    """Complete a future with an error, whatever the error is.

    torch refuses an error that is no `Exception`, such as that of Ctrl-C. And a future of CUDA tensors pickles what it gets, to
    look for tensors in it: an error that cannot be pickled, such as one of a class that was defined in a function, would give
    way to the pickler's error. In place of such an error the future gets a `TransportError` that names it and has it as cause.

    Args:
        future: is not complete.
        error: what its waiters raise.
        devices: the future's.
    """
    if not isinstance(error, Exception) or (devices and not _can_be_pickled(error)):
        named = TransportError(f"{type(error).__name__}: {error}")
        named.__cause__ = error
        error = named
    future.set_exception(error)


def _can_be_pickled(error: Exception) -> bool:
    try:
        pickle.dumps(error)
    except Exception:  # noqa: BLE001 - a third party's class may raise anything
        return False
    return True


def _wait_as_torch_does(future: Any) -> None:
    """For a future that is done. Ours may note that the program has waited, which it has not."""
    (AnyFuture.wait if isinstance(future, GroupFuture) else type(future).wait)(future)


def join_futures(futures: Sequence[TensorsFuture], tensors: list[torch.Tensor]) -> TensorsFuture:
    """A future of `tensors`, there when all these are; it raises the error of the first of them that failed, as it is.

    `torch.futures.collect_all(...).then(...)` would make a RuntimeError of that error's text.
    """
    joined = new_future(tensors)
    lock = threading.Lock()
    missing = len(futures)

    def settle() -> None:
        try:
            for future in futures:
                # It is done; on CUDA, the current stream is ordered after it.
                _wait_as_torch_does(future)
        except Exception as error:  # noqa: BLE001 - whoever waits for it gets it
            fail_future(joined, error, devices_of(tensors))
        else:
            joined.set_result(tensors)

    def note(_: TensorsFuture) -> None:
        nonlocal missing
        with lock:
            missing -= 1
            is_last = missing == 0
        if is_last:
            settle()

    for future in futures:
        future.add_done_callback(note)
    if not futures:
        settle()
    return joined


def future_for_torch(future: AnyFuture, tensors: Sequence[torch.Tensor]) -> AnyFuture:
    """A future with the outcome of another one, for torch's C++ code, whose errors are errors there, too.

    Note [Futures that fail]
    ~~~~~~~~~~~~~~~~~~~~~~~~
    torch's `Future.set_exception` stores the exception as the value, and lets the Python object raise it. C++ (the reducer of
    torch's DDP, its communication hooks) sees the value alone: it takes the exception for a list of tensors, reads the first,
    and dies by SIGSEGV. A future fails for C++ only if a function given to torch's own `then` raises. It fails with a
    RuntimeError that has the text of what was raised, which names the call, the rank and the group.

    Our futures keep the exception itself, which callers of ours catch by its class. So the future is exchanged where it goes
    to torch: in the works that torch gets of our groups, and in what our hooks return to torch's DDP. A callback that asks a
    work for its future gets ours, for it may wait for that (see `GroupFuture.wait`); if the callback raises the error, it fails
    the exchanged future that it was attached to. A callback must not wait for an exchanged future that it did not ask for
    itself: it waits for the work.

    Callbacks that were attached before it is done run inside the callback of `future` that is attached here. So a group knows
    them for callbacks of its collective, as it knows those of `future` (see Note [Late callbacks] in `engine.queue`).

    Args:
        future: of ours or torch's.
        tensors: those that `future` will hold.
    """
    is_over: AnyFuture = AnyFuture(devices=devices_of(tensors))

    def outcome(_: object) -> Any:
        _wait_as_torch_does(future)  # it is done; on CUDA, the current stream is ordered after it
        return future.value()

    given: AnyFuture = is_over.then(outcome)
    future.add_done_callback(lambda _: is_over.set_result(None))
    return given


def devices_of(tensors: Sequence[torch.Tensor]) -> Devices:
    """The CUDA devices of tensors, as a future of torch wants to know them beforehand; None if there are none."""
    devices: list[int | str | torch.device] = list({tensor.device for tensor in tensors if tensor.is_cuda})
    return devices or None


class Work(ABC):
    """One collective that was issued and may still be running.

    The tensors that were handed to the collective belong to it until `wait` returns: do not read or write them before.
    A Work has no truth value, because "did it finish?" and "is there one?" are different questions.
    """

    @abstractmethod
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        """Block until the collective has finished; on CUDA, order the current stream after it instead.

        Args:
            timeout: seconds or a timedelta; None waits as long as the group's own time limit allows.

        Returns:
            True, as torch.distributed does.

        Raises:
            CollectiveTimeout: the time ran out. The collective itself goes on.
            SynclineError: the collective failed.
        """

    @abstractmethod
    def is_completed(self) -> bool:
        """Whether the collective has finished, well or badly. Never blocks."""

    @abstractmethod
    def exception(self) -> BaseException | None:
        """The error with which the collective failed, or None if it succeeded or has not finished."""

    @abstractmethod
    def result(self) -> list[torch.Tensor]:
        """The output tensors, which are those that were handed in. Call it after `wait`."""

    def source_rank(self) -> int | None:
        """For a receive that has finished: the rank in the group that sent. None for everything else."""
        return None

    @abstractmethod
    def get_future(self) -> TensorsFuture:
        """The same as a `torch.futures.Future` whose value is the list of output tensors.

        Callbacks that are attached before the collective has finished run on the thread that finishes it; later ones at
        once on the caller's. A collective in a callback runs inside the callback, before its successors.
        """

    def __bool__(self) -> NoReturn:
        raise TypeError(
            "a Work has no truth value; call wait() to finish it, is_completed() to ask whether it has, or compare with None"
        )


class FinishedWork(Work):
    """A collective that ran to its end before the call returned."""

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
        """Always None: a collective that failed on the caller's thread raised there."""
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
    """A collective that another thread will finish, by calling `succeed` or `fail`; the first call counts."""

    __slots__ = ("_describe", "_error", "_future", "_is_done", "_lock", "_tensors", "_waiting")

    def __init__(self, tensors: list[torch.Tensor], describe: Callable[[], str]) -> None:
        self._tensors = tensors
        self._describe = describe
        self._is_done = False
        self._waiting: threading.Event | None = None  # made by the first thread that has to block: most find it done
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._future: TensorsFuture | None = None

    def leave_to_parent(self, error: BaseException) -> None:
        """In a fork, where no thread finishes it: to wait for it raises `error`."""
        # See Note [Forks] in `forks`.
        self._lock = threading.Lock()
        self._waiting = None
        self._error = error
        self._is_done = True

    def succeed(self) -> None:
        """Finish well: wake the waiters, then run the future's callbacks on this thread."""
        self._finish(None)

    def fail(self, error: BaseException) -> None:
        """Finish badly: every waiter raises `error`, and so does the future."""
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        """The first call counts: an abort may be faster than the thread that it gives up on."""
        with self._lock:
            if self._is_done:
                return
            self._error = error
            self._is_done = True
            future, waiting = self._future, self._waiting
        if waiting is not None:
            waiting.set()
        if future is not None:
            self._settle(future)

    def _settle(self, future: TensorsFuture) -> None:
        if self._error is None:
            future.set_result(self._tensors)
        else:
            fail_future(future, self._error, devices_of(self._tensors))

    @override
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        timeout_s = None if timeout is None else seconds(timeout)
        if not (self._is_done or self._wait_until_done(timeout_s)):
            raise CollectiveTimeout(
                f"{self._describe()} did not finish within the {timeout_s:g} s timeout given to wait(); it goes on, and its "
                "tensors still belong to it. Wait again, or abort the group."
            )
        if self._error is not None:
            raise self._error
        return True

    def _wait_until_done(self, timeout_s: float | None) -> bool:
        with self._lock:
            if self._is_done:
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
            if self._future is not None:
                return self._future
            future = self._future = self._new_future()
            already_done = self._is_done
        if already_done:
            self._settle(future)
        return future

    def _new_future(self) -> TensorsFuture:
        return new_future(self._tensors)


class FutureWork(Work):
    """What a future stands for, seen as a work: several collectives as one, or a collective with something after it.

    Args:
        future: its value is the list of output tensors.
        tensors: those tensors.
        describe: says in words what is waited for.
    """

    def __init__(self, future: TensorsFuture, tensors: list[torch.Tensor], describe: Callable[[], str]) -> None:
        self._future = future
        self._tensors = tensors
        self._describe = describe

    @override
    def wait(self, timeout: timedelta | float | None = None) -> bool:
        if timeout is not None:
            timeout_s = seconds(timeout)
            _prepare_to_block(self._future.done)
            done = threading.Event()
            self._future.add_done_callback(lambda _: done.set())
            if not done.wait(timeout_s):
                raise CollectiveTimeout(f"{self._describe()} did not finish within the {timeout_s:g} s timeout given to wait()")
        self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Whether the future is there."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """The error of the future, if it has one."""
        if not self._future.done():
            return None
        try:
            self._future.wait()
        except Exception as error:  # noqa: BLE001 - it is the caller's to judge
            return error
        return None

    @override
    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> TensorsFuture:
        """The future itself."""
        return self._future
