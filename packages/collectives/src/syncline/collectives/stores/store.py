"""Store: the contract of a small key-value table that the processes of a job share to find one another."""

from __future__ import annotations

import copy
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

from typing_extensions import Self

from ..engine.cancel_scope import CancelScope, seconds
from ..errors import InvalidArgumentError, StoreTimeout

DEFAULT_STORE_TIMEOUT_S = 300.0
"""How long a store waits for a key unless told otherwise; as long as torch's."""

LONGEST_STORE_TIMEOUT_S = 20 * 86400.0
"""Longer limits, infinity among them, are cut to twenty days: the system's calls count milliseconds in 31 bits."""

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05


class Store(ABC):
    """A table from text to bytes that every process (or thread) of a job sees alike.

    **Who may call:** any process that holds a handle, any thread of it, at any time, without agreement with the others;
    no method is a collective. A call that waits in one thread holds up neither other threads of the same handle nor
    other processes.

    **Atomicity:** each of `set`, `add`, `compare_set` and `delete_key` happens at one instant between call and
    return, in one order that all handles agree on. When it has returned, every handle sees its effect. `check` and `wait` look
    at several keys, possibly one after the other.

    **Values** are bytes. A str is stored as UTF-8. Numbers are stored as decimal text, so `get` after `add` returns
    ``b"3"``, as in torch.

    **Waiting** is bounded by the `timeout` of the call, or else by that of the handle. A limit belongs to the handle and is
    not seen by others.

    Args:
        timeout: seconds or a timedelta; how long a call of this handle waits unless it says otherwise. 300 s if None.
    """

    def __init__(self, timeout: timedelta | float | None = None) -> None:
        self._timeout_s = _limited(timeout, DEFAULT_STORE_TIMEOUT_S)

    @property
    def timeout(self) -> timedelta:
        """How long a call of this handle waits unless it says otherwise."""
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Change the limit of this handle, in seconds or as a timedelta; calls that wait already keep theirs.

        Raises:
            InvalidArgumentError: it is zero, negative or not a number.
        """
        self._timeout_s = _limited(timeout, self._timeout_s)

    @abstractmethod
    def describe(self) -> str:
        """What kind of store this is and where it lives, for messages."""

    @abstractmethod
    def set(self, key: str, value: bytes | str) -> None:
        """Store `value` under `key`, in place of what was there."""

    @abstractmethod
    def get(self, key: str, timeout: timedelta | float | None = None) -> bytes:
        """The value of `key`; waits until it is there.

        Raises:
            StoreTimeout: the key did not come in time.
        """

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add to the number stored under `key` (0 if there is none) and return the sum.

        Raises:
            InvalidArgumentError: the value is not a number, or the sum does not fit into 64 bits.
        """

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of `keys` are there. Does not wait."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        """Return once all of `keys` are there.

        Raises:
            StoreTimeout: they did not all come in time; the message names those that are missing.
        """

    @abstractmethod
    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Store `desired` if the value is `expected`; an absent key counts as an empty value.

        Returns:
            What torch returns: `desired` if it was stored; the present value if that differs from `expected`; and
            `expected` itself if the key is absent and `expected` is not empty (then nothing is stored).
        """

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Remove `key`; whether it was there."""

    @abstractmethod
    def num_keys(self) -> int:
        """How many keys there are. A store may count keys of its own, as torch's FileStore does."""

    def clone(self) -> Self:
        """Another handle on the same table, with a time limit of its own. Close them when neither is in use any more."""
        return copy.copy(self)

    def close(self) -> None:  # noqa: B027 - most stores hold nothing
        """Release what this handle holds; the keys stay for the others. Calls after it are errors where it held anything."""

    def _limit_s(self, timeout: timedelta | float | None) -> float:
        """The limit of one call, in seconds."""
        return _limited(timeout, self._timeout_s)


def _limited(timeout: timedelta | float | None, default_s: float) -> float:
    return min(seconds(timeout, default_s), LONGEST_STORE_TIMEOUT_S)


def as_bytes(value: bytes | str) -> bytes:
    """A value as it is stored.

    Raises:
        InvalidArgumentError: it is neither bytes nor str.
    """
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise InvalidArgumentError(f"a value in a store is bytes or str, found {type(value).__name__}; encode it first")


def as_key(key: str) -> str:
    """A key that is text.

    Raises:
        InvalidArgumentError: it is not a str.
    """
    if not isinstance(key, str):
        raise InvalidArgumentError(f"a key in a store is a str, found {key!r}")
    return key


def as_keys(keys: Sequence[str]) -> list[str]:
    """A list of keys.

    Raises:
        InvalidArgumentError: it is a single str (which would be taken for a list of letters), or holds something else.
    """
    if isinstance(keys, (str, bytes)):
        raise InvalidArgumentError(f"expected a list of keys, found the single key {keys!r}; write [{keys!r}]")
    return [as_key(key) for key in keys]


def key_timeout(keys: Iterable[str], where: str, timeout_s: float) -> StoreTimeout:
    """The error for keys that did not come within `timeout_s` seconds."""
    names = ", ".join(repr(key) for key in keys)
    return StoreTimeout(
        f"{where}: nobody set {names} within {timeout_s:g} s (timeout); either the process that should set it has failed "
        "or never started, or the keys differ, or the time limit is too short"
    )


def poll(done: Callable[[], bool], scope: CancelScope) -> bool:
    """Ask `done` until it says yes, at least once; for places that cannot tell: a file, a port that nobody listens on yet.

    The pauses grow from 1 to 50 milliseconds, each cut by a random part so that processes do not ask in step.

    Returns:
        Whether `done` said yes before the scope was over.
    """
    pause_s = _FIRST_PAUSE_S
    while not done():
        if scope.is_over():
            return False
        time.sleep(min(scope.remaining_s(), pause_s * random.uniform(0.5, 1.0)))
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
    return True
