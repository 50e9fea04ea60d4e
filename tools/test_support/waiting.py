"""Waits of tests for another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable

WAIT_S = 60.0


def wait_until(condition: Callable[[], object]) -> None:
    """Ask again and again until the condition is true; fails after a minute."""
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s, f"still false after {WAIT_S:g} s: {condition}"
        time.sleep(0.005)
