"""Changes of one value of a table, and stores that carry out changes under one lock.

A change is a function of the type `Mutation`. The function takes the value of a key (None if there is no value). The function
returns the new value (None to remove the key), and the answer for the caller.
"""

from __future__ import annotations

import re
import threading
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Sequence
from datetime import timedelta
from operator import index
from typing import TypeAlias, TypeVar

from typing_extensions import override

from ..errors import InvalidArgumentError
from .store import Store, as_bytes, as_key, as_keys, key_timeout

Answer = TypeVar("Answer")
Mutation: TypeAlias = Callable[[bytes | None], tuple[bytes | None, Answer]]

_DECIMAL = re.compile(rb"-?[0-9]+")
SMALLEST, LARGEST = -(2**63), 2**63 - 1


def setting(value: bytes) -> Mutation[None]:
    """Return a `Mutation` (see the module `table`) that sets the value of a key. The answer is None."""
    return lambda _: (value, None)


def adding(key: str, amount: int) -> Mutation[int]:
    """Return a `Mutation` (see the module `table`) that adds `amount` to a number in decimal text. `key` is only for errors."""

    def change(old: bytes | None) -> tuple[bytes, int]:
        total = _number(key, old) + amount
        if not SMALLEST <= total <= LARGEST:
            raise InvalidArgumentError(f"add({key!r}, {amount}): the sum {total} does not fit into 64 bits")
        return str(total).encode(), total

    return change


def as_amount(key: str, amount: int) -> int:
    """Return the argument `amount` of `Store.add` as an int. The error message names `key`.

    Raises:
        InvalidArgumentError: the amount is not an integer, or does not fit into 64 bits.
    """
    try:
        number = index(amount)
    except TypeError as error:
        raise InvalidArgumentError(f"add({key!r}, ...): expected an integer as the amount, found {amount!r}") from error
    if not SMALLEST <= number <= LARGEST:
        raise InvalidArgumentError(f"add({key!r}, {amount}): the amount does not fit into 64 bits")
    return number


def decimal(text: bytes) -> int:
    """Convert decimal text (digits, perhaps with a minus before them) to a number.

    Raises:
        ValueError: `text` is something else, or too long.
    """
    # `int` alone would also take spaces, a plus, and underscores between digits.
    if not _DECIMAL.fullmatch(text):
        raise ValueError(f"not a decimal number: {text[:40]!r}")
    return int(text)


def _number(key: str, value: bytes | None) -> int:
    if value is None:
        return 0
    try:
        return decimal(value)
    except ValueError:
        raise InvalidArgumentError(f"add({key!r}): expected a decimal number as value, found {value[:40]!r}") from None


def swapping(expected: bytes, desired: bytes) -> Mutation[bytes]:
    """Return a `Mutation` (see the module `table`) that sets `desired` if the value is `expected`; see `Store.compare_set`."""

    def change(old: bytes | None) -> tuple[bytes | None, bytes]:
        if (old or b"") == expected:
            return desired, desired
        return old, expected if old is None else old

    return change


def removing() -> Mutation[bool]:
    """Return a `Mutation` (see the module `table`) that removes the value. The answer says whether there was a value."""
    return lambda old: (None, old is not None)


def missing(keys: Iterable[str], present: Container[str]) -> list[str]:
    """Return the keys that are not in `present`, in the order of `keys`."""
    return [key for key in keys if key not in present]


def apply(values: dict[str, bytes], key: str, change: Mutation[Answer]) -> Answer:
    """Apply `change` (see the module `table`) to the value of `key` in `values`, and return the answer of `change`.

    No other thread may use `values` during the call.
    """
    new, answer = change(values.get(key))
    if new is None:
        values.pop(key, None)
    else:
        values[key] = new
    return answer


class LockedStore(Store):
    """A store whose methods change values only through `_apply`. A subclass implements `_apply` with a lock."""

    @abstractmethod
    def _apply(self, key: str, change: Mutation[Answer]) -> Answer:
        """Apply `change` (see the module `table`) to the value of `key` in one atomic step, and return the change's answer."""

    @override
    def set(self, key: str, value: bytes | str) -> None:
        self._apply(as_key(key), setting(as_bytes(value)))

    @override
    def add(self, key: str, amount: int) -> int:
        return self._apply(as_key(key), adding(key, as_amount(key, amount)))

    @override
    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        return self._apply(as_key(key), swapping(as_bytes(expected), as_bytes(desired)))

    @override
    def delete_key(self, key: str) -> bool:
        return self._apply(as_key(key), removing())


class _Table:
    """The values of an `InMemoryStore`, and the lock for them. An `InMemoryStore` and its clones share one `_Table`."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.changed = threading.Condition()


class InMemoryStore(LockedStore):
    """A table in this process, for ranks that are threads. All ranks share one store. A forked child has its own copy.

    Args:
        timeout: seconds or a timedelta; see `Store`.
    """

    def __init__(self, timeout: timedelta | float | None = None) -> None:
        super().__init__(timeout)
        self._table = _Table()

    def describe(self) -> str:
        """Return the words "in-memory store"."""
        return "in-memory store"

    @override
    def get(self, key: str, timeout: timedelta | float | None = None) -> bytes:
        timeout_s = self._limit_s(timeout)
        with self._table.changed:
            self._hold_until([as_key(key)], timeout_s)
            return self._table.values[key]

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        timeout_s = self._limit_s(timeout)
        with self._table.changed:
            self._hold_until(as_keys(keys), timeout_s)

    @override
    def check(self, keys: Sequence[str]) -> bool:
        with self._table.changed:
            return not missing(as_keys(keys), self._table.values)

    @override
    def num_keys(self) -> int:
        with self._table.changed:
            return len(self._table.values)

    def _apply(self, key: str, change: Mutation[Answer]) -> Answer:
        with self._table.changed:
            answer = apply(self._table.values, key, change)
            self._table.changed.notify_all()
            return answer

    @override
    def _in_fork(self) -> None:
        # At the fork, a thread of the parent may have held the lock. All handles get the same new lock.
        self._table.changed = threading.Condition()

    def _hold_until(self, keys: list[str], timeout_s: float) -> None:
        if not self._table.changed.wait_for(lambda: not missing(keys, self._table.values), timeout_s):
            raise key_timeout(missing(keys, self._table.values), self.describe(), timeout_s)
