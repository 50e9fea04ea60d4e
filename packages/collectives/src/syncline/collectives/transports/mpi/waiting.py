"""Wait for MPI requests, or in shared memory. Between two checks, the thread first yields the core, and later sleeps."""

from __future__ import annotations

import os
import time

from ...startup.settings import DEFAULT_SPIN_S

_LOOKS_BETWEEN_CLOCKS = 32
_SHORTEST_NAP_S = 50e-6
# The longest sleep while other ranks have not come. A check takes 10 to 30 us, so such a wait uses less than 1 % of a core.
ARRIVAL_NAP_S = 5e-3
# The longest sleep while a large message is in flight. MPI libraries move data only when called, one buffer each time.
MESSAGE_NAP_S = 1e-3
# For a collective of the MPI library. It takes many steps, and each step waits for the next check. So the thread never sleeps.
NO_NAP_S = 0.0

_spin_s = DEFAULT_SPIN_S


def spin_for(seconds: float) -> None:
    """Set for how many seconds each waiting thread of this process yields the core between checks, before it sleeps.

    With infinity, threads never sleep.
    """
    global _spin_s
    _spin_s = seconds


def yield_cpu() -> None:
    """Let another thread use the core, if another thread is ready to run."""
    os.sched_yield()


class Patience:
    """Lets a thread rest between two checks of a wait. Make this object if the first few checks have not ended the wait.

    Note [How long to spin]
    ~~~~~~~~~~~~~~~~~~~~~~~
    [1] For the time that `spin_for` sets (by default 2 ms), the thread yields between checks. If each rank has a core, the
        thread sees the end of the wait within microseconds, but the thread keeps its core busy.
    [2] Then the thread sleeps between checks. Each sleep takes a hundredth of the time that the thread has waited so far, but
        at least 50 us. So a rank that waits for seconds uses about a hundredth of its core.

    Args:
        longest_nap_s: the longest sleep, in seconds. 0: never sleep.
        naps_at_once: leave out phase [1], unless `spin_for` was called with infinity.
    """

    __slots__ = ("_began_s", "_longest_nap_s", "_looks", "_nap_s", "_spin_s")

    def __init__(self, longest_nap_s: float, *, naps_at_once: bool = False) -> None:
        self._longest_nap_s = longest_nap_s
        self._spin_s = 0.0 if naps_at_once and _spin_s != float("inf") else _spin_s
        self._looks = 0
        self._began_s = time.monotonic()
        self._nap_s = 0.0
        self._choose_nap(0.0)

    def rest_then_is_check_due(self) -> bool:
        """Rest before the next look at the wait. Return whether the caller must now check the call's `CancelScope`."""
        if self._nap_s:
            time.sleep(self._nap_s)
        else:
            yield_cpu()
            self._looks += 1
            # To check the scope after each rest would slow down short waits.
            if self._looks % _LOOKS_BETWEEN_CLOCKS:
                return False
        self._choose_nap(time.monotonic() - self._began_s)
        return True

    def _choose_nap(self, waited_s: float) -> None:
        if self._longest_nap_s and waited_s >= self._spin_s:
            self._nap_s = min(max(waited_s / 100, _SHORTEST_NAP_S), self._longest_nap_s)
