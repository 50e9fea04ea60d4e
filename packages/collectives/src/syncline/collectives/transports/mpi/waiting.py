"""How a rank waits for others, by MPI requests and in shared memory: it gives the core away between two looks, then sleeps."""

from __future__ import annotations

import os
import time

from ...engine.cancel_scope import CancelScope
from ...startup.settings import DEFAULT_SPIN_S

_LOOKS_BETWEEN_CLOCKS = 32
_SHORTEST_NAP_S = 50e-6
# The longest sleep while other ranks have not come. A look takes 10 to 30 us, so less than 1 % of a core is used then.
ARRIVAL_NAP_S = 5e-3
# While a large message is on its way. MPI libraries move data only when they are asked, a buffer's worth each time.
MESSAGE_NAP_S = 1e-3
# A collective of the library takes many steps, each of which waits for a look: it is never slept through.
NO_NAP_S = 0.0

_spin_s = DEFAULT_SPIN_S


def spin_for(seconds: float) -> None:
    """Let waits of this process sleep after so many seconds from now on; infinity: never. A setting of the site."""
    global _spin_s
    _spin_s = seconds


def yield_cpu() -> None:
    """Give the core to another thread, if one wants it."""
    os.sched_yield()


class Patience:
    """What a rank does between two looks for others, once it has looked a few times in vain. One for each wait.

    Note [How long to spin]
    ~~~~~~~~~~~~~~~~~~~~~~~
    [1] For `spin_s` it yields. With a core for each rank it is back at once, and sees what it waits for within microseconds;
        but the core is used. Most waits of a training step end here.
    [2] Then it sleeps, for a hundredth of the time that it has waited so far, at least 50 us (which the system makes 100). So
        a sleep makes a wait longer by 1 % at most, but for waits that have just come to [2], and a rank that waits for seconds
        uses a hundredth of its core.

    Args:
        scope: of the call.
        longest_nap_s: the longest sleep; 0: it never sleeps.
        naps_at_once: do without [1], where the system knows better when this rank is to look again; see `library.wait`.
    """

    __slots__ = ("_began_s", "_longest_nap_s", "_looks", "_nap_s", "_scope", "_spin_s")

    def __init__(self, scope: CancelScope, longest_nap_s: float, *, naps_at_once: bool = False) -> None:
        self._scope = scope
        self._longest_nap_s = longest_nap_s
        self._spin_s = 0.0 if naps_at_once and _spin_s != float("inf") else _spin_s
        self._looks = 0
        self._began_s = time.monotonic()
        self._nap_s = 0.0
        self._choose_nap(0.0)

    def rest(self, what: str) -> None:
        """Rest before the next look.

        Args:
            what: as for `CancelScope.check`.

        Raises:
            BaseException: what `CancelScope.check` raises.
        """
        if self._nap_s:
            time.sleep(self._nap_s)
        else:
            yield_cpu()
            self._looks += 1
            if self._looks % _LOOKS_BETWEEN_CLOCKS:
                return
        self._choose_nap(time.monotonic() - self._began_s)
        self._scope.check(what)

    def _choose_nap(self, waited_s: float) -> None:
        if self._longest_nap_s and waited_s >= self._spin_s:
            self._nap_s = min(max(waited_s / 100, _SHORTEST_NAP_S), self._longest_nap_s)
