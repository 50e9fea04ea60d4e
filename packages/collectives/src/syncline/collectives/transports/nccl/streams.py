"""CUDA streams that nobody shares."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from threading import Lock

import torch


class StreamPool:
    """Makes streams and lends them; what is no longer used is lent again.

    Two users of one stream would wait for one another, which they must not: a send and a receive, for one, may each be what
    lets the other go on. Streams are never destroyed, because torch's allocator keeps memory for each by its handle.

    Args:
        make: makes a stream on a device, and returns its handle.
    """

    def __init__(self, make: Callable[[torch.device], int]) -> None:
        self._make = make
        self._idle: dict[torch.device, list[int]] = defaultdict(list)
        self._lock = Lock()

    def acquire(self, device: torch.device, user: object) -> int:
        """The handle of a stream that is the user's as long as that lives."""
        with self._lock:
            idle = self._idle[device]
            handle = idle.pop() if idle else self._make(device)
        weakref.finalize(user, idle.append, handle).atexit = False
        return handle
