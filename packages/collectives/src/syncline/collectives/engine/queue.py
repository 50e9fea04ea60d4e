"""`Queue`: runs the calls of a group one at a time, in an order that is the same on every rank."""

from __future__ import annotations

import atexit
import functools
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import get_ident
from typing import Any, TypeVar

from typing_extensions import ParamSpec, override

from ..errors import MisuseError
from ..forks import in_forks
from ..work import Devices, GroupFuture
from .cancel_scope import start_thread
from .living_set import LivingSet

P = ParamSpec("P")
T = TypeVar("T")
Task = Callable[[], None]
Callback = Callable[[Any], Any]

# How long `drain` sleeps before it looks again whether the queue is empty.
_LOOK_S = 0.001
# The number of a call that a callback issues. The number is above all others, so a callback of such a call is never late.
_IN_CALLBACK = sys.maxsize


class Queue:
    """Runs tasks one at a time, in the order of issue.

    On the host, the caller's thread runs a task if no other task is in flight. Otherwise the queue's thread, a daemon, runs the
    task. Over NCCL, the caller's thread always waits for its turn, and runs the task itself (`run_in_turn`).

    Note [One total order]
    ~~~~~~~~~~~~~~~~~~~~~~
    The tasks of one queue are the calls of one group. They run in one order:

    1. Tasks issued outside of callbacks run in the order of issue.
    2. While a task and the callbacks of its future run, no other task starts. The running thread has the turn (it holds the
       lock `_turn`).
    3. A task issued *from a callback of a running task* runs at once, inside the callback. So the callback may wait for this
       task.
    4. If a callback waits for a queued task, or for a future that depends on this task, the callback's thread runs the queue up
       to this task (`run_until`). The thread runs no later task, because calls that the callback issues next come before later
       tasks. A wait for anything else, such as a send or a call of another group, runs no task. In particular, a wait for a
       future that torch makes, such as `torch.futures.collect_all`, runs no task, and may never end.
    5. If a thread outside of callbacks waits for a task while the turn is free, this thread runs the queue up to this task
       (`help`). Waking another thread would take longer than a small collective. Callbacks may want a lock that the waiting
       thread holds. So this thread hands callbacks over to the queue's thread (`hand_over`), which runs them before all queued
       tasks. The wait ends when the queue's thread has completed the future, but does not wait for the callbacks.
    6. Over NCCL, tasks are usually short: they put work on a stream. So nothing is queued, and each thread waits until it gets
       the turn (`run_in_turn`). Threads that wait at the same time may get the turn in any order. Callbacks run after the turn:
       see Note [Order over NCCL] in `transports.nccl.group`. A group uses either only `run_in_turn` or never `run_in_turn`,
       because `run_in_turn` does not look at queued tasks.

    Every rank must issue the same calls from its main thread, and attach the same callbacks to each call before the next call.
    Then the order is the same on every rank.

    Note [Late callbacks]
    ~~~~~~~~~~~~~~~~~~~~~
    A callback belongs to the call of its future. The callback is late if the group has issued other calls after this call, and
    before the program attaches the callback. One rank may run a late callback before these other calls, and another rank after
    them. So the queue refuses calls from late callbacks. All ranks decide alike, because only counts of calls matter.

    If the program has already waited for the work, the callback runs at once on every rank, and is not late. The queue also
    guards callbacks of the futures that `then` returns, and of calls that consist of several calls, such as coalesced calls. It
    does not guard callbacks of futures that torch makes.

    Attributes:
        issued: how many calls were issued outside of callbacks.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._turn = threading.RLock()  # only a thread that holds an RLock can release it: see `release_if_held`
        self._running_on: int | None = None
        self._changed = threading.Condition()  # the queue's thread waits here for a task or for `stop`
        self._handed_over: deque[Task] = deque()  # callbacks of calls that `help` has run; only the queue's thread runs them
        self._tasks: deque[Task] = deque()
        self._helper: int | None = None  # the thread that runs a task by `help`
        self._stopping = False
        self._thread: threading.Thread | None = None
        self.issued = 0
        self._callbacks: dict[int, bool] = {}  # for each thread that runs a callback, whether the callback is late

    # ---- running ----

    def is_running_here(self) -> bool:
        """Whether the calling thread runs a task, or a callback of a task."""
        return self._running_on == get_ident()

    def is_own_thread(self) -> bool:
        """Whether the calling thread is the queue's thread."""
        return threading.current_thread() is self._thread

    def run_here(self, task: Callable[..., None], *arguments: object) -> bool:
        """Run a task on this thread, if no other task must run before it, or if this thread already runs a task.

        If the task raises an error, this method raises it, too. If the result is False, the task was not run: call `enqueue`.
        """
        me = get_ident()
        # This is a callback of the running task. Its thread already has the turn, and the new task comes before queued tasks.
        if self._running_on == me:
            task(*arguments)
            return True
        # If another thread has the turn, or if tasks are queued, this task must be queued, too.
        try:
            if not self._turn.acquire(False):
                return False
        except BaseException:
            release_if_held(self._turn)
            raise
        try:
            # Look only now: the thread that has just released the turn may have handed over callbacks.
            if self._tasks or self._handed_over:
                return False
            self._running_on = me
            task(*arguments)
        finally:
            self._running_on = None
            self._turn.release()
        return True

    def run_in_turn(self, task: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
        """Wait until no other thread runs a task, run this task on this thread, and return its result or raise its error."""
        # Inside a task, this thread already has the turn, so taking the lock would block for ever.
        if self._running_on == get_ident():
            return task(*arguments, **options)
        with self._turn:
            try:
                self._running_on = get_ident()
                return task(*arguments, **options)
            finally:
                self._running_on = None

    def enqueue(self, task: Task) -> bool:
        """Add a task that the queue's thread runs after all earlier tasks. In a callback, run the task at once on this thread.

        The task must not raise an error. If an interrupt such as Ctrl-C ends a task, the queue runs this task again. Return
        False if the task will not run, because `stop` was called.

        Raises:
            RuntimeError: the thread cannot start, so the task will not run.
        """
        if self.is_running_here():
            task()
            return True
        with self._changed:
            if self._stopping:
                return False
            # The first queued task starts the thread, because many groups never queue a task.
            if self._thread is None:
                thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                # Start the thread before the task is queued: if no thread can start, the queue stays empty for later calls.
                start_thread(thread)
                _started.add(self)
                self._thread = thread
            # Notify first. In the other order, Ctrl-C between the two lines could leave a task that the thread does not notice.
            self._changed.notify_all()
            self._tasks.append(task)
        return True

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """Run queued tasks, in order, until `is_done()` is true or the queue is empty. Call this method inside a callback."""
        # The thread of a callback already has the turn.
        while self._tasks and not is_done():
            self._take_and_run(self._tasks)

    def help(self, is_done: Callable[[], bool]) -> None:
        """Run queued tasks in order, on a thread that waits for one of these tasks. See point 5 of Note [One total order].

        The method returns when `is_done()` is true, the queue is empty, another thread has the turn, or a task has handed over
        callbacks.
        """
        while self._tasks and not is_done():
            try:
                # If another thread has the turn, it runs the tasks, and this thread only needs to wait.
                if not self._turn.acquire(False):
                    return
            except BaseException:
                release_if_held(self._turn)
                raise
            try:
                self._helper = get_ident()
                # Look again here: the thread that has just released the turn may have handed over callbacks.
                if self._handed_over:
                    return
                self._run_first()
            finally:
                self._helper = None
                self._turn.release()

    def hand_over(self, callbacks: Task) -> bool:
        """Make the queue's thread run these callbacks next, before all queued tasks. Call this method inside a task.

        Works only in a task that `help` runs, while the queue is not stopped. Otherwise return False: the caller must run the
        callbacks.
        """
        # If `help` does not run the current task, the thread that runs it may complete the future itself.
        if self._helper != get_ident():
            return False
        with self._changed:
            # The queue's thread may have ended, so nobody would take this task.
            if self._stopping:
                return False
            self._handed_over.append(callbacks)
            self._changed.notify_all()
        return True

    # ---- the end ----

    def leave_to_parent(self) -> None:
        """Empty and stop the queue in a forked child, which does not have the queue's thread."""
        self._turn, self._running_on = threading.RLock(), None
        self._changed = threading.Condition()
        self._handed_over.clear()
        self._tasks.clear()
        self._stopping, self._thread = True, None

    def drain(self, timeout_s: float) -> bool:
        """Wait until no task runs or is queued. Return False if this takes longer than `timeout_s` seconds."""
        end_s = time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX)
        while True:
            try:
                if not self._turn.acquire(timeout=max(0.0, end_s - time.monotonic())):
                    return False
                # Another thread may queue a task right after this, so the caller must have refused new calls before.
                is_empty = not (self._tasks or self._handed_over)
                self._turn.release()
            except BaseException:
                release_if_held(self._turn)
                raise
            # At the limit the turn may be free while tasks are left: the queue's thread has not taken it yet.
            if is_empty or time.monotonic() >= end_s:
                return is_empty
            time.sleep(_LOOK_S)

    def stop(self) -> None:
        """Accept no more tasks, and let the queue's thread end when the queue is empty. Do not wait for the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def drop(self) -> None:
        """Stop the queue, without waiting for the queue's lock. A finalizer must call this method instead of `stop`.

        If another thread holds the lock, the queue's thread may sleep until the process ends.
        """
        self._stopping = True
        if self._changed.acquire(blocking=False):
            try:
                self._changed.notify_all()
            finally:
                self._changed.release()

    def is_idle(self) -> bool:
        """Whether no task runs or is queued."""
        return not (self._tasks or self._handed_over or self._running_on is not None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of the queue's thread, at most `timeout_s` seconds. Call this method after `stop`."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    # ---- callbacks; see Note [Late callbacks] ----

    def issue(self, what: str, place: Callable[[], str]) -> int:
        """Count a call that this thread issues, and return the call's number for `guard`.

        A call from a callback is not counted, and gets a number that is larger than all others. `what` and `place` are for the
        error.

        Raises:
            MisuseError: the thread runs a late callback.
        """
        # Usually no callback runs on any thread, and this test saves the time of the look-up.
        if self._callbacks:
            is_late = self._callbacks.get(get_ident())
            if is_late:
                raise MisuseError(
                    f"{what} on {place()} was called in a late callback: attach the callback before you issue the group's next "
                    "collective, or wait for the work first\nOtherwise the ranks could order this call differently"
                )
            # This callback is not late. Do not count its call, so that callbacks that are attached later do not become late.
            if is_late is not None:
                return _IN_CALLBACK
        self.issued += 1
        return self.issued

    def is_in_callback(self) -> bool:
        """Whether this thread runs a callback of one of the group's works."""
        return get_ident() in self._callbacks

    def guard(self, callback: Callback, number: int, *, was_waited_for: bool) -> Callback:
        """Wrap a callback of the work of call `number`, so that the queue knows when the callback runs.

        `was_waited_for` says whether the program has already waited for this work.
        """
        is_late = self.issued > number and not was_waited_for and not self.is_in_callback()
        return functools.partial(self._run_callback, callback, is_late)

    def _run_callback(self, callback: Callback, is_late: bool, future: Any) -> Any:
        me = get_ident()
        outer = self._callbacks.get(me)
        self._callbacks[me] = is_late or bool(outer)  # a callback inside a late callback is late, too
        try:
            return callback(future)
        finally:
            # A callback may wait for a work, whose callbacks then run on this thread, inside the first callback.
            if outer is None:
                del self._callbacks[me]
            else:
                self._callbacks[me] = outer

    # ---- the thread ----

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._handed_over or self._tasks or self._stopping)
                # The queue was stopped and is empty. A stopped queue that still has tasks runs them first.
                if not (self._handed_over or self._tasks):
                    return
            with self._turn:
                self._run_first()

    def _run_first(self) -> None:
        tasks = self._handed_over or self._tasks
        if not tasks:
            return  # another thread has run the task while this one waited for the turn
        try:
            self._running_on = get_ident()
            self._take_and_run(tasks)
        finally:
            self._running_on = None

    def _take_and_run(self, tasks: deque[Task]) -> None:
        task = tasks[0]
        try:
            tasks.popleft()
            task()
        # Tasks raise no errors, so this is an interrupt, such as Ctrl-C, that came before the task was over. Threads may wait
        # for the task without a time limit. So put the task back for the queue's thread, which gets no interrupts. (On that
        # thread, an error is a bug, and later tasks must not wait behind this one.)
        except BaseException:
            if not self.is_own_thread():
                if not (tasks and tasks[0] is task):
                    tasks.appendleft(task)
                with self._changed:
                    self._changed.notify_all()
            raise


def release_if_held(lock: threading.RLock) -> None:
    """Release a lock if this thread holds it. Call this function if `lock.acquire` raised an error.

    The reason: a signal handler may raise KeyboardInterrupt although `acquire` has just taken the lock.
    """
    with suppress(RuntimeError):  # this thread does not hold the lock
        lock.release()


class GuardedFuture(GroupFuture):
    """A future that tells the queue when a callback is attached to it. The future does not keep its work alive.

    `number` is the call's number, from `Queue.issue`.

    Attributes:
        was_waited_for: whether the program has waited for this future or its work.
    """

    def __init__(self, queue: Queue, number: int, devices: Devices) -> None:
        super().__init__(devices)
        self._queue = queue
        self._number = number
        self.was_waited_for = False

    @override
    def wait(self) -> Any:
        result = super().wait()
        self.was_waited_for = True
        return result

    @override
    def add_done_callback(self, callback: Callback) -> None:
        super().add_done_callback(self._queue.guard(callback, self._number, was_waited_for=self.was_waited_for))

    @override
    def _following(self, devices: Devices) -> GuardedFuture:
        following = GuardedFuture(self._queue, self._number, devices)
        following.was_waited_for = self.was_waited_for  # if true, this future is done, so the new one completes at once
        return following

    @override
    def _run_queue_here(self) -> None:
        # Run the queue only up to the last part. Parts of other groups may end later.
        if self._parts:
            super()._run_queue_here()
        # In a callback, only this thread can run the queued call of this future. See point 4 of Note [One total order].
        elif self._queue.is_running_here():
            self._queue.run_until(self.done)


# A daemon thread that is inside torch when the interpreter shuts down crashes the process. So every thread gets a little time
# to finish its tasks before the shut-down.
_EXIT_S = 5.0
_started: LivingSet[Queue] = LivingSet()


def a_queue_runs_here() -> bool:
    """Whether this thread runs a call of any group, or a callback of a call."""
    return any(queue.is_running_here() for queue in _started)


def all_idle() -> bool:
    """Whether all queues of this process that have a thread are idle."""
    return all(queue.is_idle() for queue in _started)


@atexit.register
def finish_all() -> None:
    """At exit, wait a few seconds for calls in flight, then end the threads of all queues."""
    for queue in _started:
        queue.drain(_EXIT_S)
        queue.stop()
        queue.join(_EXIT_S)


in_forks(_started.clear)
