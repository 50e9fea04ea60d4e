"""The one thread that runs a group's collectives, one after the other."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from threading import get_ident

from ..contract.work import before_blocking
from ..forks import in_forks

Task = Callable[[], None]

# How often `drain` looks again while the thread comes to its turn.
_LOOK_S = 0.001


class Progress:
    """Runs tasks one at a time in the order of their issue, on its own thread or, when nothing is in flight, the caller's.

    Note [One total order]
    ~~~~~~~~~~~~~~~~~~~~~~
    The tasks of one `Progress` are the collectives of one group. They run in one order:

    1. Tasks issued from outside run in the order in which `run_here` and `enqueue` were called.
    2. While a task runs (its future's callbacks included) no other task starts: its thread holds the lock `turn`, and
       `running_on` names it. Whoever holds the turn, and nobody else, takes tasks out of the queue. While there are any,
       `run_here` runs nothing, so what is queued comes before what is issued later.
    3. A task issued *from a callback of a running task* runs at once, on the same thread, inside that callback: before
       every task that waits in the queue, on every rank alike. The callback may therefore wait for it.
    4. A callback that waits for a task still in the queue, for its work or for a future that depends on it, runs the queue
       up to that task (`run_until`). Not so for a future of torch's own, such as that of `torch.futures.collect_all`.
    5. Whoever waits for a work outside of a callback takes the turn, if it is free, and runs the queue up to that task on its
       own thread (`help`): to wake another thread takes longer than a small collective. The callbacks of what was run so are
       the next task (`hand_over`), for which that thread does not wait: they may want a lock that it holds.

    So if every rank issues the same collectives from its main thread, and attaches to each the same callbacks before it
    issues the next, the order is the same on every rank, however the threads are scheduled: the children of a collective
    come after it and before its successor. (A callback attached to a collective that has already finished runs on the
    attaching thread, which has not issued the successor yet: the same place in the order.)

    A task that is queued never raises: it records its outcome itself. What a task raises in `run_here` reaches the caller.

    The thread starts with the first queued task and is a daemon, so that a rank that dies of an exception is not kept
    alive by it.

    Attributes:
        turn: the lock.
        running_on: the thread that has it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.turn = threading.Lock()
        self._changed = threading.Condition()  # the thread waits for tasks, or for the end
        self._queue: deque[Task] = deque()
        self.running_on: int | None = None
        self._helper: int | None = None  # the thread that runs a task by `help`
        self._stopping = False
        self._thread: threading.Thread | None = None

    def is_running_here(self) -> bool:
        """Whether the calling thread is inside a task, that is, in a callback."""
        return self.running_on == get_ident()

    def run_here(self, task: Callable[..., None], *arguments: object) -> bool:
        """Run a task on this thread if nothing comes before it, or if this thread is inside a task already.

        Returns:
            Whether the task was run; if not, call `enqueue`.
        """
        if self.running_on == get_ident():
            task(*arguments)
            return True
        if not self.take_turn():
            return False
        try:
            task(*arguments)
        finally:
            self.running_on = None
            self.turn.release()
        return True

    def take_turn(self) -> bool:
        """Let the calling thread run something, as the next in the order; false if something comes before, or it has the turn.

        It gives the turn back by two lines in a `finally`, `running_on = None` and `turn.release()`. They are no method: the
        handler of a signal, such as Ctrl-C, could raise where that begins, and nobody would ever have the turn again.
        """
        me = get_ident()  # before the turn is taken, for the same reason
        if self._queue or not self.turn.acquire(False):
            return False
        self.running_on = me
        return True

    def enqueue(self, task: Task) -> bool:
        """Run a task on the progress thread, after all that were issued before it; inside a callback, at once and here.

        Returns:
            False if `stop` was called: the task will not run.

        Raises:
            RuntimeError: the thread cannot start; the task will not run.
        """
        if self.is_running_here():
            task()
            return True
        with self._changed:
            if self._stopping:
                return False
            if self._thread is None:
                thread = threading.Thread(target=self._loop, name=self._name, daemon=True)
                thread.start()  # before anything is queued: where no thread can start, what comes later can still run here
                _started.add(self)
                self._thread = thread
            self._queue.append(task)
            self._changed.notify_all()
        return True

    def run_until(self, is_done: Callable[[], bool]) -> None:
        """From inside a callback: run queued tasks, in order, until `is_done` or none is left."""
        while self._queue and not is_done():
            self._queue.popleft()()

    def help(self, is_done: Callable[[], bool]) -> None:
        """On a thread that is about to wait: run queued tasks, in order, until `is_done` or another thread has the turn."""
        me = get_ident()
        while self._queue and not is_done() and self.turn.acquire(False):
            try:
                self._helper = me
                self._run_first()
            finally:
                self._helper = None
                self.turn.release()

    def hand_over(self, task: Task) -> bool:
        """Inside a task that runs by `help`: let the progress thread run this one next, before all that are queued.

        Returns:
            False, for the caller to run it: this is another task, or the progress thread may have ended.
        """
        if self._helper != get_ident():
            return False
        with self._changed:
            if self._stopping:
                return False
            self._queue.appendleft(task)
            self._changed.notify_all()
        return True

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing runs and nothing is queued; false if that took longer than `timeout_s` seconds."""
        end = time.monotonic() + min(timeout_s, threading.TIMEOUT_MAX)
        while self.turn.acquire(timeout=max(0.0, end - time.monotonic())):
            is_empty = not self._queue
            self.turn.release()
            if is_empty:
                return True
            time.sleep(_LOOK_S)
        return False

    def stop(self) -> None:
        """End the thread once the queue is empty. Does not wait for it."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def drop(self) -> None:
        """`stop`, from the finalizer of whoever holds it: on any thread, whatever locks that one has, so it waits for no lock.

        While another thread has the lock, nobody is woken; at worst the progress thread sleeps on.
        """
        self._stopping = True
        if self._changed.acquire(blocking=False):
            try:
                self._changed.notify_all()
            finally:
                self._changed.release()

    def leave_to_parent(self) -> None:
        """In a fork, which has no such thread, and in which a lock may be held for ever. Nothing runs any more."""
        self.turn, self.running_on = threading.Lock(), None
        self._changed = threading.Condition()
        self._queue.clear()
        self._stopping, self._thread = True, None

    def is_idle(self) -> bool:
        """Whether nothing runs and nothing is queued."""
        return not (self.turn.locked() or self._queue)

    def join(self, timeout_s: float) -> None:
        """After `stop`: wait for the thread to end, at most `timeout_s` seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._stopping)
                if not self._queue:
                    return
            with self.turn:
                self._run_first()

    def _run_first(self) -> None:
        if not self._queue:
            return  # a callback that waited for it has run it
        self.running_on = get_ident()
        try:
            self._queue.popleft()()
        finally:
            self.running_on = None


def _run_queues_here(is_done: Callable[[], bool]) -> None:
    """Point 4 of Note [One total order], for a future that does not know whose callback this thread is in."""
    for progress in list(_started):
        if progress.is_running_here():
            progress.run_until(is_done)


# A daemon thread that is inside torch when the interpreter is taken down crashes the process, so before that happens every
# thread gets a little time to finish what is in flight.
_EXIT_S = 5.0
_started: weakref.WeakSet[Progress] = weakref.WeakSet()

before_blocking.append(_run_queues_here)
in_forks(_started.clear)


def a_queue_runs_here() -> bool:
    """Whether this thread is inside a callback of some group's collective, or inside the collective itself."""
    return any(progress.is_running_here() for progress in tuple(_started))


def all_idle() -> bool:
    """Whether no group of this process has a collective in flight on a thread of its own."""
    return all(progress.is_idle() for progress in list(_started))


@atexit.register
def finish_all() -> None:
    """Give what is in flight a few seconds to finish, and end the threads."""
    for progress in list(_started):
        progress.drain(_EXIT_S)
        progress.stop()
        progress.join(_EXIT_S)
