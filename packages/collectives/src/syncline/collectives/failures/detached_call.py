"""A call that may never return, on a thread of its own, which is then left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Generic, TypeVar

T = TypeVar("T")


class DetachedCall(Generic[T]):
    """Calls once, in the background. Libraries wait for other ranks (NCCL for kernels, too) and cannot be asked to stop.

    Args:
        call: what is called.
        context: entered around it, on its thread.
        name: of the thread.

    Attributes:
        done: set when the call has returned or raised.
    """

    def __init__(self, call: Callable[[], T], context: Callable[[], AbstractContextManager[object]], name: str) -> None:
        self._call = call
        self._context = context
        self._result: list[T] = []
        self._error: BaseException | None = None
        self.done = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def result(self) -> T:
        """What it returned, or raised; to be asked when it is done."""
        if self._error is not None:
            raise self._error
        return self._result[0]

    def _run(self) -> None:
        try:
            with self._context():
                self._result.append(self._call())
        except BaseException as error:  # noqa: BLE001 - who asks for the result raises it
            self._error = error
        self.done.set()
