"""The watchdog: one thread of the process that ends calls which do not end by themselves, for all groups and backends.

Note [Who ends a call]
~~~~~~~~~~~~~~~~~~~~~~
A call of a group runs on one thread: the caller's, or the group's progress thread. Three things end it, in this order:

1. *The thread that calls.* Wherever it can, it waits by asking now and then, and asks the call's `Deadline` as well, which
   says that the time is up, or that a rank is lost (see `Liveness`). It raises the group's error. That is the usual end.
2. *The watchdog, by the library.* If the thread sits inside a library's C code, nobody asks. The watchdog looks at the call
   that each group runs every `PERIOD_S` seconds. When a rank is lost it cancels the deadline. `INTERRUPT_LOOKS` looks after
   the time was up, or the deadline was cancelled, if the calling thread has not noticed, it has the library end the
   call (`interrupt`: ULFM revokes the communicator). The library then returns with an error, and the thread goes on as in 1.
3. *The watchdog, by ending the process.* `END_LOOKS` looks after the time was up, if the thread still has not come back, no
   error can be raised in it. The same `NOTICED_LOOKS` looks after it has noticed, with step 2 half-way: it asks the other ranks
   why then, and may sit in the library again. The watchdog writes the group's report, prints which call it is, who is waited
   for and the stacks of all threads, and ends the process with status `END_STATUS`; the launcher ends the job.

Looks are counted rather than seconds: a process that was stopped as a whole and goes on gets its time.

Which thread does what: the calling thread writes which call runs (one attribute, without a lock: that is all a call pays)
and raises errors. The watchdog's thread reads it, cancels deadlines, prints and exits. `interrupt` runs on a thread of
its own, as a library may block in it, too. A group is looked at as long as somebody holds it.

At exit the watchdog is ended while there is still an interpreter: a group that is dropped while the watchdog looks at it is
freed by the watchdog, with its tensors. Torch releases the interpreter for that; if the interpreter has been taken down
meanwhile, the thread cannot return from torch, and the C++ library aborts the process ("terminate called without an active
exception"). What handlers that run later wait for is not watched; they have limits of their own.

Locks: `_lock` guards the list of what is watched, and is held only while it is copied or added to, never while anything is
asked or ended. No lock of a group is taken.
"""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from enum import Enum
from typing import Protocol

from ..contract.deadline import Deadline
from ..errors import TransportError

logger = logging.getLogger("syncline.collectives")

PERIOD_S = 0.2
_STOP_S = 5.0
INTERRUPT_LOOKS = 3
END_LOOKS = 11
# To ask the others takes 1.5 s, to write a report at most 11.
NOTICED_LOOKS = 100
END_STATUS = 70  # EX_SOFTWARE of sysexits.h


class Watched(Protocol):
    """A group, as the watchdog sees it."""

    @property
    def running_deadline(self) -> Deadline | None:
        """That of the call that runs now."""

    def reason_to_give_up(self) -> TransportError | None:
        """Why that call will never end, or None. Must not block, nor call a library that may."""

    def interrupt(self) -> None:
        """Have the library underneath end the call, if it can. May block."""

    def missing_in_words(self) -> str:
        """Which group this is, which call runs and who is waited for."""

    def report(self, reason: str) -> None:
        """Write what is known to a file, if it can be done within a few seconds."""


class Step(Enum):
    """What is to be done about a call."""

    NOTHING = 0
    INTERRUPT = 1
    END = 2


class CallEscalation:
    """What is to be done about the call that a group runs: pure but for what it is told at each look."""

    def __init__(self) -> None:
        self._deadline: Deadline | None = None
        self._looks_over = 0
        self._looks_noticed = 0

    def look(self, deadline: Deadline | None) -> Step:
        """One look at the call with that deadline; None: no call runs."""
        if deadline is None or deadline is not self._deadline:
            self._deadline, self._looks_over, self._looks_noticed = deadline, 0, 0
            return Step.NOTHING
        if deadline.was_noticed:
            self._looks_noticed += 1
            if self._looks_noticed == NOTICED_LOOKS // 2:
                return Step.INTERRUPT
            return Step.END if self._looks_noticed == NOTICED_LOOKS else Step.NOTHING
        if deadline.remaining_s() > 0.0:
            return Step.NOTHING
        self._looks_over += 1
        if self._looks_over == INTERRUPT_LOOKS:
            return Step.INTERRUPT
        return Step.END if self._looks_over == END_LOOKS else Step.NOTHING

    def is_same_call(self, deadline: Deadline | None) -> bool:
        """Whether the call ran already at the last look: short calls are not worth asking anybody."""
        return deadline is not None and deadline is self._deadline


class Watchdog:
    """Looks at what is watched until it is stopped. See Note [Who ends a call].

    Args:
        end_process: told why, in words.
    """

    def __init__(self, end_process: Callable[[str], object]) -> None:
        self._end_process = end_process
        self._lock = threading.Lock()
        self._watched: list[tuple[weakref.ref[Watched], CallEscalation]] = []
        self._has_warned = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="syncline-watchdog", daemon=True)

    def start(self) -> None:
        """Look every `PERIOD_S` seconds, on a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread that was started, once it has looked."""
        self._stopping.set()
        self._thread.join(_STOP_S)

    def watch(self, group: Watched) -> None:
        """Look at the group's calls from now on, as long as somebody holds it."""
        with self._lock:
            self._watched.append((weakref.ref(group), CallEscalation()))

    def look(self) -> None:
        """One look at all."""
        with self._lock:
            self._watched = [entry for entry in self._watched if entry[0]() is not None]
            watched = list(self._watched)
        for reference, escalation in watched:
            group = reference()
            if group is not None:
                self._guarded(self._end_if_in_vain, group, escalation)
                self._guarded(self._escalate, group, escalation)

    def _guarded(self, look: Callable[[Watched, CallEscalation], object], group: Watched, escalation: CallEscalation) -> None:
        """What goes wrong with one group must not end the watch over all."""
        try:
            look(group, escalation)
        except Exception:
            if not self._has_warned:
                self._has_warned = True
                logger.warning("the watchdog goes on after an error", exc_info=True)

    def _run(self) -> None:
        while not self._stopping.wait(PERIOD_S):
            self.look()

    def _end_if_in_vain(self, group: Watched, escalation: CallEscalation) -> None:
        deadline = group.running_deadline
        if deadline is not None and escalation.is_same_call(deadline) and not deadline.was_cancelled:
            reason = group.reason_to_give_up()
            if reason is not None:
                deadline.cancel(reason)

    def _escalate(self, group: Watched, escalation: CallEscalation) -> None:
        deadline = group.running_deadline
        step = escalation.look(deadline)
        if step is Step.INTERRUPT:
            threading.Thread(target=group.interrupt, name="syncline-interrupt", daemon=True).start()
        elif step is Step.END and group.running_deadline is deadline:
            words = "a collective did not end"
            try:
                words = group.missing_in_words()
                group.report(words)
            finally:
                self._end_process(words)


def end_process(words: str) -> None:
    """Print why, and the stacks of all threads, and end this process without another word to any library."""
    stream = sys.__stderr__ or sys.stderr
    stream.write(f"[syncline] {words}. The library does not return from that call; this process ends here. Stacks:\n")
    stream.flush()
    faulthandler.dump_traceback(file=stream, all_threads=True)
    os._exit(END_STATUS)


_starting = threading.Lock()
_watchdogs: dict[int, Watchdog] = {}
_ended: set[int] = set()


def watch(group: Watched) -> None:
    """Have the watchdog of this process look at a group. The first call starts its thread, but not while the process ends."""
    pid = os.getpid()
    with _starting:
        if pid in _ended:
            return
        watchdog = _watchdogs.get(pid)
        if watchdog is None:  # also in a fork, in which the thread of the parent does not run
            watchdog = Watchdog(end_process)
            _watchdogs.clear()
            _watchdogs[pid] = watchdog
            watchdog.start()
    watchdog.watch(group)


def _forget() -> None:
    """In a fork another thread of the parent may hold the lock for ever."""
    global _starting
    _starting = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@atexit.register
def _stop() -> None:
    pid = os.getpid()
    with _starting:
        _ended.add(pid)
        watchdog = _watchdogs.pop(pid, None)
    if watchdog is not None:
        watchdog.stop()
