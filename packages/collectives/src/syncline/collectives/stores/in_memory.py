"""InMemoryStore: a store for the threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from datetime import timedelta

from typing_extensions import override

from . import mutations
from .locked_store import LockedStore
from .store import as_key, as_keys, key_timeout


class InMemoryStore(LockedStore):
    """A table in this process, for ranks that are threads: share the object.

    Args:
        timeout: seconds or a timedelta; see `Store`.
    """

    def __init__(self, timeout: timedelta | float | None = None) -> None:
        super().__init__(timeout)
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def describe(self) -> str:
        """It has no address but the process."""
        return "in-memory store"

    @override
    def get(self, key: str, timeout: timedelta | float | None = None) -> bytes:
        timeout_s = self._limit_s(timeout)
        with self._changed:
            self._hold_until([as_key(key)], timeout_s)
            return self._values[key]

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        timeout_s = self._limit_s(timeout)
        with self._changed:
            self._hold_until(as_keys(keys), timeout_s)

    @override
    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return not mutations.missing(as_keys(keys), self._values)

    @override
    def num_keys(self) -> int:
        with self._changed:
            return len(self._values)

    @override
    def list_keys(self) -> list[str]:
        with self._changed:
            return list(self._values)

    def _apply(self, key: str, change: mutations.Mutation[mutations.Answer]) -> mutations.Answer:
        with self._changed:
            answer = mutations.apply(self._values, key, change)
            self._changed.notify_all()
            return answer

    def _hold_until(self, keys: list[str], timeout_s: float) -> None:
        if not self._changed.wait_for(lambda: not mutations.missing(keys, self._values), timeout_s):
            raise key_timeout(mutations.missing(keys, self._values), self.describe(), timeout_s)
