"""ServedStore: a handle on a table that somebody else holds, and answers requests about."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from operator import index

from typing_extensions import override

from .messages import Op
from .store import Store, as_bytes, as_key, as_keys


class ServedStore(Store):
    """All methods that do not wait, on top of one: `_call`."""

    @abstractmethod
    def _call(self, op: Op, *fields: bytes) -> list[bytes]:
        """Ask for `op` and return the fields of the answer."""

    @override
    def set(self, key: str, value: bytes | str) -> None:
        self._call(Op.SET, as_key(key).encode(), as_bytes(value))

    @override
    def append(self, key: str, value: bytes | str) -> None:
        self._call(Op.APPEND, as_key(key).encode(), as_bytes(value))

    @override
    def add(self, key: str, amount: int) -> int:
        return int(self._call(Op.ADD, as_key(key).encode(), b"%d" % index(amount))[0])

    @override
    def check(self, keys: Sequence[str]) -> bool:
        return self._call(Op.CHECK, *(key.encode() for key in as_keys(keys)))[0] == b"1"

    @override
    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._call(Op.COMPARE_SET, as_key(key).encode(), as_bytes(expected), as_bytes(desired))[0]

    @override
    def delete_key(self, key: str) -> bool:
        return self._call(Op.DELETE_KEY, as_key(key).encode())[0] == b"1"

    @override
    def num_keys(self) -> int:
        return int(self._call(Op.NUM_KEYS)[0])

    @override
    def list_keys(self) -> list[str]:
        return [key.decode() for key in self._call(Op.LIST_KEYS)]
