"""The monitor: one thread of the process that looks after time limits, lost ranks and stalls, for all groups.

Note [Who ends a call]
~~~~~~~~~~~~~~~~~~~~~~
A call runs on one thread: the caller's, or that of the group's queue. Three things can end it, in this order:

1. *The thread that calls.* Where it can, it waits by looking now and then, and checks the call's `CancelScope` between two
   looks. The scope ends when the time limit is reached, or with a reason, such as a lost rank. The thread raises the group's
   error. This is the usual end.
2. *The monitor, by the library.* If the thread is inside a library's C code, nobody checks the scope. The monitor looks at the
   call that each group runs every `PERIOD_S` seconds. When a rank is lost, it cancels the scope. If the scope is over and the
   thread has not noticed for `INTERRUPT_LOOKS` looks, the monitor has the library end the call (`interrupt`: ULFM revokes the
   communicator). Then the library returns with an error, and the thread goes on as in 1.
3. *The monitor, by ending the process.* If the thread still has not noticed after `END_LOOKS` looks, no error can be raised in
   it. The same if it has noticed and has not come back after `NOTICED_LOOKS` looks (step 2 comes half-way): it asks the other
   ranks why, and may be inside the library again. The monitor writes the group's report, prints which call it is, which ranks
   are waited for, and the stacks of all threads, and ends the process with status `END_STATUS`. The launcher then ends the job.

The monitor counts looks instead of seconds, so that a process that was stopped as a whole, and goes on, gets its time.

Order: the calling thread writes one attribute, which call runs, without a lock. The monitor's thread reads it, and cancels
scopes. The monitor never calls what may block: `interrupt`, and looks that call a library (`Looked`), run on threads of their
own, and the monitor does not wait for them. It holds its lock only while it copies or extends its lists. It takes no lock of
a group. A group is looked at as long as somebody else holds it.

At exit the monitor ends while there still is an interpreter. A group that is dropped while the monitor looks at it is freed by
the monitor, with its tensors, and torch lets the interpreter go for that. If the interpreter ends meanwhile, the thread cannot
come back, and the C++ library aborts the process ("terminate called without an active exception"). Handlers that run at exit
after this one have limits of their own.
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

from ..engine.cancel_scope import CancelScope, DetachedCall
from ..errors import TransportError

logger = logging.getLogger("syncline.collectives")

PERIOD_S = 0.1
INTERRUPT_LOOKS = 6
END_LOOKS = 22
# To ask the others takes 1.5 s, to write a report at most 11.
NOTICED_LOOKS = 200
END_STATUS = 70  # EX_SOFTWARE of sysexits.h
_STOP_S = 5.0


class Running(Protocol):
    """What runs, as the monitor sees it: a `Call`, or what a rank does until it has a group.

    Attributes:
        scope: ends it.
    """

    scope: CancelScope


class Monitored(Protocol):
    """A group whose calls block, as the monitor sees it."""

    @property
    def running(self) -> Running | None:
        """The call that runs now."""

    def reason_to_give_up(self) -> TransportError | None:
        """Why that call will never end, or None. Must not block, nor call a library that may."""

    def interrupt(self) -> None:
        """Have the library underneath end the call, if it can. May block."""

    def missing_in_words(self) -> str:
        """Which group this is, which call runs and which ranks are waited for."""

    def report(self, reason: str) -> None:
        """Write what is known to a file, if that can be done within a few seconds."""


class Looked(Protocol):
    """What wants to be called now and then.

    Attributes:
        period_s: seconds between two looks.
        may_block: whether a look may wait for a library's lock. Then each look runs on a thread of its own, and the next one
            comes only when it is over.
    """

    period_s: float
    may_block: bool

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to look at. Read on the monitor's thread; must not block."""

    def look(self, now_s: float) -> None:
        """Look once. Must wait for no rank. After an exception there are no more looks."""


class Step(Enum):
    """What is to be done about a call."""

    NOTHING = 0
    INTERRUPT = 1
    END = 2


class Escalation:
    """What is to be done about the call that a group runs: a state machine that counts looks."""

    def __init__(self) -> None:
        self._call: Running | None = None
        self._looks_over = 0
        self._looks_noticed = 0

    def look(self, call: Running | None) -> Step:
        """One look at the call; None: no call runs."""
        if call is None or call is not self._call:
            self._call, self._looks_over, self._looks_noticed = call, 0, 0
            return Step.NOTHING
        scope = call.scope
        if scope.was_noticed:
            self._looks_noticed += 1
            if self._looks_noticed == NOTICED_LOOKS // 2:
                return Step.INTERRUPT
            return Step.END if self._looks_noticed == NOTICED_LOOKS else Step.NOTHING
        if scope.remaining_s() > 0.0:
            return Step.NOTHING
        self._looks_over += 1
        if self._looks_over == INTERRUPT_LOOKS:
            return Step.INTERRUPT
        return Step.END if self._looks_over == END_LOOKS else Step.NOTHING

    def is_same_call(self, call: Running | None) -> bool:
        """Whether the call ran already at the last look. Short calls are not worth asking anybody."""
        return call is not None and call is self._call


class Monitor:
    """Looks at groups until it is stopped. See Note [Who ends a call].

    Args:
        end_process: is told why, in words, when a call cannot be ended otherwise.
    """

    def __init__(self, end_process: Callable[[str], object]) -> None:
        self._end_process = end_process
        self._lock = threading.Lock()
        self._groups: list[tuple[weakref.ref[Monitored], Escalation]] = []
        self._looked: list[tuple[weakref.ref[Looked], _Turn]] = []
        self._has_warned = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncline-monitor", daemon=True)

    def start(self) -> None:
        """Look every `PERIOD_S` seconds, on a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread that was started, once it has looked."""
        self._stopping.set()
        self._thread.join(_STOP_S)
        with self._lock:
            looked = list(self._looked)
        for _, turn in looked:
            turn.finish(_STOP_S)

    def watch(self, group: Monitored) -> None:
        """Look at the group's calls from now on, as long as somebody holds it."""
        with self._lock:
            self._groups.append((weakref.ref(group), Escalation()))

    def call_now_and_then(self, looked: Looked) -> None:
        """Call its `look` from now on, as long as somebody holds it."""
        with self._lock:
            self._looked.append((weakref.ref(looked), _Turn()))

    def look(self, now_s: float | None = None) -> None:
        """One look at everything."""
        now_s = time.monotonic() if now_s is None else now_s
        with self._lock:
            self._groups = [entry for entry in self._groups if entry[0]() is not None]
            self._looked = [entry for entry in self._looked if entry[0]() is not None and not entry[1].is_over]
            groups, looked = list(self._groups), list(self._looked)
        for reference, escalation in groups:
            group = reference()
            if group is not None:
                self._guarded(self._end_if_in_vain, group, escalation)
                self._guarded(self._escalate, group, escalation)
        for other, turn in looked:
            thing = other()
            if thing is not None:
                turn.look(thing, now_s)

    def _guarded(self, look: Callable[[Monitored, Escalation], object], group: Monitored, escalation: Escalation) -> None:
        """What goes wrong with one group must not end the looks at all others."""
        try:
            look(group, escalation)
        except Exception:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("the monitor goes on after an error", exc_info=True)

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self.look()

    def _end_if_in_vain(self, group: Monitored, escalation: Escalation) -> None:
        call = group.running
        if call is not None and escalation.is_same_call(call) and call.scope.reason is None:
            reason = group.reason_to_give_up()
            if reason is not None:
                call.scope.cancel(reason)

    def _escalate(self, group: Monitored, escalation: Escalation) -> None:
        call = group.running
        step = escalation.look(call)
        if step is Step.INTERRUPT:
            threading.Thread(target=group.interrupt, name="syncline-interrupt", daemon=True).start()
        elif step is Step.END and group.running is call:
            words = "a collective did not end"
            try:
                words = group.missing_in_words()
                group.report(words)
            finally:
                self._end_process(words)


class _Turn:
    """When one `Looked` is called again.

    Attributes:
        is_over: its look has raised, so there are no more.
    """

    def __init__(self) -> None:
        self._next_s = 0.0
        self._running: DetachedCall[None] | None = None
        self.is_over = False

    def look(self, looked: Looked, now_s: float) -> None:
        """Let it look if it is time, and the look before is over."""
        is_looking = self._running is not None and not self._running.done.is_set()
        if now_s < self._next_s or is_looking or looked.is_idle:
            return
        self._next_s = now_s + looked.period_s
        if looked.may_block:
            self._running = DetachedCall(lambda: self._look(looked, now_s), "syncline-look")
        else:
            self._look(looked, now_s)

    def finish(self, limit_s: float) -> None:
        """Wait for the look that runs: a thread that is inside torch when the interpreter ends crashes the process."""
        if self._running is not None:
            self._running.done.wait(limit_s)

    def _look(self, looked: Looked, now_s: float) -> None:
        try:
            looked.look(now_s)
        except Exception as error:  # noqa: BLE001 - a warning shall not become a failure
            logger.debug("no more looks at %s: %s: %s", type(looked).__name__, type(error).__name__, error)
            self.is_over = True


def end_process(words: str) -> None:
    """Print why, and the stacks of all threads, and end this process without another word to any library."""
    stream = sys.__stderr__ or sys.stderr
    stream.write(f"[syncline] {words}. The library does not return from that call; this process ends here. Stacks:\n")
    stream.flush()
    faulthandler.dump_traceback(file=stream, all_threads=True)
    os._exit(END_STATUS)


# The monitor of this process. A forked child has none until it makes a group: the parent's thread does not run there.
_starting = threading.Lock()
_monitor: Monitor | None = None
_has_ended = False


def monitor() -> Monitor | None:
    """The monitor of this process; the first call starts its thread. None while the process ends."""
    global _monitor
    with _starting:
        if _monitor is None and not _has_ended:
            _monitor = Monitor(end_process)
            _monitor.start()
        return _monitor


def watch(group: Monitored) -> None:
    """Have the monitor look at a group's calls."""
    found = monitor()
    if found is not None:
        found.watch(group)


def call_now_and_then(looked: Looked) -> None:
    """Have the monitor call a `look`, as long as somebody holds the object."""
    found = monitor()
    if found is not None:
        found.call_now_and_then(looked)


def _forget() -> None:
    """In a forked child the parent's thread does not run, and another thread may have held the lock."""
    global _starting, _monitor
    _starting, _monitor = threading.Lock(), None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@atexit.register
def _stop() -> None:
    global _monitor, _has_ended
    with _starting:
        _has_ended, found, _monitor = True, _monitor, None
    if found is not None:
        found.stop()
