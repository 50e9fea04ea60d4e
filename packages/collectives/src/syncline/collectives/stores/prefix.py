"""PrefixStore: the part of another store whose keys have a common prefix."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from typing_extensions import override

from .store import Store, as_key, as_keys


class PrefixStore(Store):
    """Every key `k` is `prefix/k` in `store`, so that several users share one store without knowing of each other.

    Args:
        prefix: the beginning of the keys, without the slash that follows.
        store: the store with the values. Closing this handle does not close it.
        timeout: seconds or a timedelta; None takes the limit that `store` has now. A later change of one limit does not change
            the other.
    """

    def __init__(self, prefix: str, store: Store, timeout: timedelta | float | None = None) -> None:
        super().__init__(store.timeout if timeout is None else timeout)
        self._prefix = f"{as_key(prefix)}/"
        self._store = store

    @property
    def underlying_store(self) -> Store:
        """The store that contains the keys."""
        return self._store

    def describe(self) -> str:
        """The underlying store and the prefix in words."""
        return f"{self._store.describe()}, keys {self._prefix}*"

    @override
    def set(self, key: str, value: bytes | str) -> None:
        self._store.set(self._full(key), value)

    @override
    def get(self, key: str, timeout: timedelta | float | None = None) -> bytes:
        return self._store.get(self._full(key), self._limit_s(timeout))

    @override
    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._full(key), amount)

    @override
    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check([self._full(key) for key in as_keys(keys)])

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        self._store.wait([self._full(key) for key in as_keys(keys)], self._limit_s(timeout))

    @override
    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._store.compare_set(self._full(key), expected, desired)

    @override
    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._full(key))

    def num_keys(self) -> int:
        """How many keys the whole underlying store has, as in torch's PrefixStore."""
        return self._store.num_keys()

    def _full(self, key: str) -> str:
        return self._prefix + as_key(key)
