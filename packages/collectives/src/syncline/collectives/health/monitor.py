"""The monitor: one thread that watches time limits, lost ranks and stalls, for all groups of the process.

Note [Who ends a call]
~~~~~~~~~~~~~~~~~~~~~~
A call runs on the caller's thread, or on the thread of the group's queue. There are three ways to end the call, in this order:

1. *By this thread.* If the library allows it, the thread checks the call's `CancelScope` while the thread waits. The scope
   ends at the time limit, or for a reason such as a lost rank. Then the thread raises the group's error.
2. *By the monitor, through the library.* A thread inside a library does not check the scope. Every 0.1 seconds, the monitor
   looks at the running call of each group, and cancels the scope if a rank is lost. If the thread has not noticed the end of
   the scope for 6 looks (`INTERRUPT_LOOKS`), the monitor calls `interrupt`. (With MPI's ULFM, `interrupt` revokes the
   communicator.) Then the library returns with an error, and the thread goes on as in 1.
3. *By the monitor, through the end of the process.* If the thread has not noticed after 22 looks (`END_LOOKS`), the monitor
   ends the process. A thread that has noticed asks the other ranks for the reason, and may get stuck in the library again. So
   the monitor calls `interrupt` 100 looks after the thread has noticed, and ends the process after 200 looks (`NOTICED_LOOKS`).
   Before the end, the monitor writes the group's report, and prints the group, the ranks for which the call waits, and all
   stacks. The exit status is 70. The launcher then ends the job.

The monitor counts looks and not seconds, so the time during which the process is stopped (SIGSTOP) does not count.

Threads: the thread that runs a call sets the group's attribute `running`, without a lock. The monitor never makes a call that
may block: `interrupt`, and looks that call a library (`Looked.may_block`), run on other threads. The monitor takes no lock of a
group, and keeps only weak references to groups.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from typing_extensions import ParamSpec

from ..engine.cancel_scope import CancelScope, DetachedCall
from ..errors import TransportError

P = ParamSpec("P")

logger = logging.getLogger("syncline.collectives")

PERIOD_S = 0.1
INTERRUPT_LOOKS = 6
END_LOOKS = 22
# To ask the other ranks takes 1.5 s, and to write a report at most 11 s. Together this is less than 20 s.
NOTICED_LOOKS = 200
END_STATUS = 70  # EX_SOFTWARE of sysexits.h
_STOP_S = 5.0


class Running(Protocol):
    """A running operation: a `Call`, or the steps by which a rank connects its group.

    Attributes:
        scope: the operation ends when this scope is over.
    """

    scope: CancelScope


class Monitored(Protocol):
    """A group whose blocking calls the monitor watches."""

    @property
    def running(self) -> Running | None:
        """The call that runs now, or None."""

    def reason_to_give_up(self) -> TransportError | None:
        """Return an error if the running call will never end; else None. The method must not block, not even in a library."""

    def interrupt(self) -> None:
        """Make the library end the call, if possible. The method may block."""

    def missing_in_words(self) -> str:
        """Return a sentence that says where this rank waits, and for which ranks."""

    def report(self, reason: str) -> None:
        """Write a report to a file. Give up after a few seconds if the file system does not answer."""


class Looked(Protocol):
    """An object whose `look` the monitor calls now and then.

    Attributes:
        period_s: seconds between two looks.
        may_block: whether `look` may wait for a lock of a library. If so, each look runs on a new thread.
    """

    period_s: float
    may_block: bool

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to look at. The monitor's thread reads this property, so the property must not block."""

    def look(self, now_s: float) -> None:
        """Look once. The method must not wait for another rank. If `look` raises an error, the monitor stops calling `look`."""


class Step(Enum):
    """The monitor's action for a running call."""

    NOTHING = 0
    INTERRUPT = 1
    END = 2


class Escalation:
    """A state machine that counts the looks at a running call of one group, and decides what to do."""

    def __init__(self) -> None:
        self._call: Running | None = None
        self._looks_over = 0
        self._looks_noticed = 0

    def look(self, call: Running | None) -> Step:
        """Count one look at the running call, and return the action. If `call` is None, no call runs."""
        if call is None or call is not self._call:  # another call than at the last look: count anew
            self._call, self._looks_over, self._looks_noticed = call, 0, 0
            return Step.NOTHING
        scope = call.scope
        # The thread acts by itself, so it gets more time than a thread that is stuck.
        if scope.was_noticed:
            self._looks_noticed += 1
            if self._looks_noticed == NOTICED_LOOKS // 2:
                return Step.INTERRUPT
            return Step.END if self._looks_noticed == NOTICED_LOOKS else Step.NOTHING
        # Usually the time limit was not reached, and nobody has cancelled the scope.
        if scope.remaining_s() > 0.0:
            return Step.NOTHING
        self._looks_over += 1
        if self._looks_over == INTERRUPT_LOOKS:
            return Step.INTERRUPT
        return Step.END if self._looks_over == END_LOOKS else Step.NOTHING

    def is_same_call(self, call: Running | None) -> bool:
        """Whether the call already ran at the last look."""
        return call is not None and call is self._call


class Monitor:
    """Looks at groups until it is stopped. See Note [Who ends a call].

    If the monitor cannot end a call in another way, it calls `end_process` with the reason.
    """

    def __init__(self, end_process: Callable[[str], object]) -> None:
        self._end_process = end_process
        self._lock = threading.Lock()
        self._groups: list[tuple[weakref.ref[Monitored], Escalation]] = []
        self._looked: list[tuple[weakref.ref[Looked], _Schedule]] = []
        self._has_warned = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncline-monitor", daemon=True)

    def start(self) -> None:
        """Start the monitor's thread, which looks every `PERIOD_S` seconds."""
        self._thread.start()

    def stop(self) -> None:
        """End the monitor's thread after its current look."""
        self._stopping.set()
        self._thread.join(_STOP_S)
        with self._lock:
            looked = list(self._looked)
        # A thread that is inside torch while the interpreter ends crashes the process.
        for _, schedule in looked:
            schedule.finish(_STOP_S)

    def watch(self, group: Monitored) -> None:
        """Look at the group's calls from now on, as long as the group exists."""
        with self._lock:
            self._groups.append((weakref.ref(group), Escalation()))

    def call_now_and_then(self, looked: Looked) -> None:
        """Call the object's `look` every `period_s` seconds from now on, as long as the object exists."""
        with self._lock:
            self._looked.append((weakref.ref(looked), _Schedule()))

    def look(self, now_s: float | None = None) -> None:
        """Look once at each group, and call `look` of each `Looked` object that is due."""
        now_s = time.monotonic() if now_s is None else now_s
        with self._lock:
            self._groups = [entry for entry in self._groups if entry[0]() is not None]
            self._looked = [entry for entry in self._looked if entry[0]() is not None and not entry[1].is_over]
            groups, looked = list(self._groups), list(self._looked)
        for reference, escalation in groups:
            group = reference()
            # The group may have gone since the list was made.
            if group is not None:
                self._guarded(self._end_if_in_vain, group, escalation)
                self._guarded(self._escalate, group, escalation)
        for other, schedule in looked:
            thing = other()
            if thing is not None:
                self._guarded(schedule.look, thing, now_s)

    def _guarded(self, look: Callable[P, object], *arguments: P.args, **options: P.kwargs) -> None:
        try:
            look(*arguments, **options)
        except Exception:
            # Warn only once, because the same error may come ten times a second.
            if not self._has_warned:
                self._has_warned = True
                logger.warning("the monitor goes on after an error", exc_info=True)

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self.look()

    def _end_if_in_vain(self, group: Monitored, escalation: Escalation) -> None:
        call = group.running
        # A call whose scope has a reason is already ending. A call that began after the last look is still too new to ask.
        if call is not None and escalation.is_same_call(call) and call.scope.reason is None:
            reason = group.reason_to_give_up()
            if reason is not None:
                call.scope.cancel(reason)

    def _escalate(self, group: Monitored, escalation: Escalation) -> None:
        call = group.running
        step = escalation.look(call)
        if step is Step.INTERRUPT:
            # Use a new thread, because `interrupt` may block in the library, too.
            threading.Thread(target=group.interrupt, name="syncline-interrupt", daemon=True).start()
        # If the call ended since the look, the process must go on.
        elif step is Step.END and group.running is call:
            words = "a collective did not end"
            try:
                words = group.missing_in_words()
                group.report(words)
            # End the process even if the report fails, because a process that hangs for ever is worse.
            finally:
                self._end_process(words)


class _Schedule:
    def __init__(self) -> None:
        self._next_s = 0.0
        self._running: DetachedCall[None] | None = None
        self.is_over = False

    def look(self, looked: Looked, now_s: float) -> None:
        is_looking = self._running is not None and not self._running.done.is_set()
        # Do nothing if no look is due, if a look still runs, or if there is nothing to look at.
        if now_s < self._next_s or is_looking or looked.is_idle:
            return
        self._next_s = now_s + looked.period_s
        if looked.may_block:
            self._running = DetachedCall(lambda: self._look(looked, now_s), "syncline-look")
        else:
            self._look(looked, now_s)

    def finish(self, limit_s: float) -> None:
        if self._running is not None:
            self._running.done.wait(limit_s)

    def _look(self, looked: Looked, now_s: float) -> None:
        try:
            looked.look(now_s)
        except Exception as error:  # noqa: BLE001 - a look only warns, so its error must not fail anything
            logger.debug("no more looks at %s: %s: %s", type(looked).__name__, type(error).__name__, error)
            self.is_over = True


def end_process(words: str) -> None:
    """Print the reason and the stacks of all threads, and end this process without calling any library."""
    stream = sys.__stderr__ or sys.stderr
    try:
        stream.write(f"[syncline] {words}. The library does not return from that call; this process ends here. Stacks:\n")
        stream.flush()
        faulthandler.dump_traceback(file=stream, all_threads=True)
    # End the process even if the stream is closed, or its reader is gone.
    finally:
        os._exit(END_STATUS)


# The monitor of this process. The thread of the parent's monitor does not run in a forked child. The child starts its own
# monitor with its first group.
_starting = threading.Lock()
_monitor: Monitor | None = None
_has_ended = False


def monitor() -> Monitor | None:
    """Return the monitor of this process, or None if the process is ending. The first call starts the monitor's thread."""
    global _monitor
    # A process that ends gets no new monitor, because nothing would stop its thread.
    with _starting:
        if _monitor is None and not _has_ended:
            _monitor = Monitor(end_process)
            _monitor.start()
        return _monitor


def watch(group: Monitored) -> None:
    """From now on, the monitor of this process watches the group's calls, as long as the group exists."""
    found = monitor()
    if found is not None:
        found.watch(group)


def call_now_and_then(looked: Looked) -> None:
    """From now on, the monitor of this process calls `looked.look` now and then, as long as `looked` exists."""
    found = monitor()
    if found is not None:
        found.call_now_and_then(looked)


def _forget() -> None:
    # In a forked child the monitor's thread does not run, and the monitor's lock may stay locked.
    global _starting, _monitor
    _starting, _monitor = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@atexit.register
def _stop() -> None:
    global _monitor, _has_ended
    # The monitor's thread may free a group's tensors, and torch releases the GIL meanwhile. If the interpreter ended then, the
    # thread could not get the GIL again, and C++ would abort the process.
    with _starting:
        _has_ended, found, _monitor = True, _monitor, None
    if found is not None:
        found.stop()
