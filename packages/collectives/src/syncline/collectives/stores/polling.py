"""Asking again and again, for places that cannot be told: a file, a port that nobody listens on yet."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from ..engine.cancel_scope import CancelScope

FIRST_PAUSE_S = 0.001
LONGEST_PAUSE_S = 0.05


def poll(done: Callable[[], bool], scope: CancelScope) -> bool:
    """Ask `done` until it says yes, at least once; whether it did before the scope was over.

    The pauses grow from 1 to 50 milliseconds, each cut by a random part so that processes do not ask in step.
    """
    pause_s = FIRST_PAUSE_S
    while not done():
        if scope.is_over():
            return False
        time.sleep(min(scope.remaining_s(), pause_s * random.uniform(0.5, 1.0)))
        pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
    return True
