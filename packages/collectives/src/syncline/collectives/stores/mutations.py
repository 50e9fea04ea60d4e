"""What each change of a store does to one value: pure functions, shared by every store that keeps the table itself.

A change takes the value of a key (None if absent) and gives the new value (None to remove it) and the caller's answer.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import TypeAlias, TypeVar

from ..errors import InvalidArgumentError

Answer = TypeVar("Answer")
Mutation: TypeAlias = Callable[[bytes | None], tuple[bytes | None, Answer]]

SMALLEST, LARGEST = -(2**63), 2**63 - 1


def setting(value: bytes) -> Mutation[None]:
    """Whatever was there, `value` is now."""
    return lambda _: (value, None)


def appending(value: bytes) -> Mutation[None]:
    """What was there, then `value`."""
    return lambda old: ((old or b"") + value, None)


def adding(key: str, amount: int) -> Mutation[int]:
    """Decimal text plus `amount`."""

    def change(old: bytes | None) -> tuple[bytes, int]:
        total = _number(key, old) + amount
        if not SMALLEST <= total <= LARGEST:
            raise InvalidArgumentError(f"add({key!r}, {amount}): the sum {total} does not fit into 64 bits")
        return str(total).encode(), total

    return change


def _number(key: str, value: bytes | None) -> int:
    if value is None:
        return 0
    try:
        return int(value)
    except ValueError:
        raise InvalidArgumentError(f"add({key!r}): expected a decimal number as value, found {value[:40]!r}") from None


def swapping(expected: bytes, desired: bytes) -> Mutation[bytes]:
    """`desired` if the value is `expected`, with torch's answers; see `Store.compare_set`."""

    def change(old: bytes | None) -> tuple[bytes | None, bytes]:
        if (old or b"") == expected:
            return desired, desired
        return old, expected if old is None else old

    return change


def removing() -> Mutation[bool]:
    """Nothing is there any more; whether something was."""
    return lambda old: (None, old is not None)


def missing(keys: Iterable[str], present: Container[str]) -> list[str]:
    """Those of `keys` that are not there, in order."""
    return [key for key in keys if key not in present]


def apply(values: dict[str, bytes], key: str, change: Mutation[Answer]) -> Answer:
    """Carry out `change` on a table in memory. The caller holds the lock."""
    new, answer = change(values.get(key))
    if new is None:
        values.pop(key, None)
    else:
        values[key] = new
    return answer
