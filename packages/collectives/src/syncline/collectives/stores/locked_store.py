"""LockedStore: a store that carries out every change under one lock."""

from __future__ import annotations

from abc import abstractmethod
from operator import index

from typing_extensions import override

from . import mutations
from .store import Store, as_bytes, as_key


class LockedStore(Store):
    """The changing methods, on top of one: `_apply`."""

    @abstractmethod
    def _apply(self, key: str, change: mutations.Mutation[mutations.Answer]) -> mutations.Answer:
        """Carry out `change` on the value of `key`, atomically."""

    @override
    def set(self, key: str, value: bytes | str) -> None:
        self._apply(as_key(key), mutations.setting(as_bytes(value)))

    @override
    def append(self, key: str, value: bytes | str) -> None:
        self._apply(as_key(key), mutations.appending(as_bytes(value)))

    @override
    def add(self, key: str, amount: int) -> int:
        return self._apply(as_key(key), mutations.adding(key, index(amount)))

    @override
    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._apply(as_key(key), mutations.swapping(as_bytes(expected), as_bytes(desired)))

    @override
    def delete_key(self, key: str) -> bool:
        return self._apply(as_key(key), mutations.removing())
