"""Two ranks that send to one another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from threading import Lock
from typing import TypeAlias

from ...engine.cancel_scope import DetachedCall
from .connector import StreamCommunicator

Direction: TypeAlias = tuple[int, int]
Task: TypeAlias = Callable[[StreamCommunicator], None]


class Pair:
    """Connects with the peer at the first transfer, without blocking the caller, and issues transfers in order.

    The caller must not be blocked: in a ring where all ranks send first, each would wait for the next one to connect. So what
    is submitted before the connection is there waits for it on a thread, which ends when nothing waits any more; from then on
    transfers are issued by the caller.

    Args:
        connect: gives the communicator for each direction; called on that thread.
        fail: is told if it cannot.
        context: entered on that thread.
    """

    def __init__(
        self,
        connect: Callable[[], Mapping[Direction, StreamCommunicator]],
        fail: Callable[[BaseException], object],
        context: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._connect = connect
        self._fail = fail
        self._context = context
        self._lock = Lock()
        self._waiting: deque[tuple[Direction, Task]] = deque()
        self._stream_comms: Mapping[Direction, StreamCommunicator] | None = None
        self._is_started = False

    @property
    def is_connected(self) -> bool:
        """Whether transfers are issued by the caller."""
        return self._stream_comms is not None

    def submit(self, direction: Direction, task: Task) -> None:
        """Issue a transfer on the communicator of its direction: now, or when there is one."""
        with self._lock:
            if self._stream_comms is None:
                self._waiting.append((direction, task))
                if not self._is_started:
                    self._is_started = True
                    DetachedCall(self._run, self._context, "syncline-nccl-pair")
                return
        task(self._stream_comms[direction])

    def _run(self) -> None:
        try:
            stream_comms = self._connect()
            while (entry := self._next(stream_comms)) is not None:
                direction, task = entry
                task(stream_comms[direction])
        except BaseException as error:  # noqa: BLE001 - the group's waiters raise it
            self._fail(error)
            self._waiting.clear()  # after that: what waits holds the works, which must hear of it

    def _next(self, stream_comms: Mapping[Direction, StreamCommunicator]) -> tuple[Direction, Task] | None:
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            self._stream_comms = stream_comms
            return None
