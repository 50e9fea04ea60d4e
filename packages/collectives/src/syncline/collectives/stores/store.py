"""`Store`: a small table of keys and values, through which the processes of a job find each other."""

from __future__ import annotations

import copy
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

from typing_extensions import Self, override

from ..engine.cancel_scope import CancelScope, seconds
from ..engine.living_set import LivingSet
from ..errors import InvalidArgumentError, StoreTimeout
from ..forks import in_forks

DEFAULT_STORE_TIMEOUT_S = 300.0
"""The default time limit for a key, in seconds; the same as torch's."""

LONGEST_STORE_TIMEOUT_S = 20 * 86400.0
"""Longer limits, also infinity, are cut to twenty days, because system calls count milliseconds in 31 bits."""

_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.05


class Store(ABC):
    """A handle on a table that all processes (or threads) of a job share. The keys are text, and the values are bytes.

    **Callers:** any thread of any process that has a handle may call a method, at any time. No method is a collective. A call
    that waits blocks no other thread and no other process.

    **Atomicity:** each call of `set`, `add`, `compare_set` or `delete_key` is atomic. All handles see these calls in the same
    order, and see their effects after the call has returned. `check` and `wait` may look at their keys one after the other.

    **Keys** are any text that UTF-8 can encode, so lone surrogates are not allowed.

    **Values:** a str is stored as UTF-8, and a number as decimal text, as in torch: if `add` has returned 3, `get` returns
    ``b"3"``.

    **Waiting:** the `timeout` of a call limits how long the call waits. Without a `timeout`, the handle's time limit applies.

    Args:
        timeout: the time limit of calls without a `timeout`, in seconds or as a timedelta. None means 300 s.
    """

    def __init__(self, timeout: timedelta | float | None = None) -> None:
        self._timeout_s = _limited(timeout, DEFAULT_STORE_TIMEOUT_S)
        _stores.add(self)

    def _in_fork(self) -> None:  # noqa: B027 - a store without locks has nothing to do
        """Replace the locks of this handle. A forked child calls this method before other code runs."""

    @property
    def timeout(self) -> timedelta:
        """The time limit of this handle's calls without a `timeout`."""
        return timedelta(seconds=self._timeout_s)

    def set_timeout(self, timeout: timedelta | float) -> None:
        """Set the time limit of this handle, in seconds or as a timedelta. Calls that already wait keep the old limit.

        Raises:
            InvalidArgumentError: `timeout` is zero, negative or not a number.
        """
        self._timeout_s = _limited(timeout, self._timeout_s)

    @abstractmethod
    def describe(self) -> str:
        """Return the kind and the place of this store, as text for messages."""

    @abstractmethod
    def set(self, key: str, value: bytes | str) -> None:
        """Store `value` under `key`. An earlier value is overwritten."""

    @abstractmethod
    def get(self, key: str, timeout: timedelta | float | None = None) -> bytes:
        """Wait until `key` exists, and return its value.

        Raises:
            StoreTimeout: the key was not set in time.
        """

    @abstractmethod
    def add(self, key: str, amount: int) -> int:
        """Add `amount` to the number stored under `key` (0 if there is none), and return the sum.

        Raises:
            InvalidArgumentError: the key's value is not a number (digits, perhaps with a minus before them); `amount` is not an
                integer; or `amount` or the sum does not fit into 64 bits.
        """

    @abstractmethod
    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all of `keys` exist. The call does not wait for keys."""

    @abstractmethod
    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        """Return once all of `keys` exist.

        Raises:
            StoreTimeout: some keys were not set in time; the message names them.
        """

    @abstractmethod
    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        """Store `desired` under `key` if the key's value is `expected`. A key that does not exist counts as an empty value.

        Returns, as in torch: `desired` if it was stored; otherwise the key's value, or `expected` if the key does not exist.
        """

    @abstractmethod
    def delete_key(self, key: str) -> bool:
        """Remove `key`. Return whether the key existed."""

    @abstractmethod
    def num_keys(self) -> int:
        """Return the number of keys. A store may also count its own internal keys, as torch's FileStore does."""

    def clone(self) -> Self:
        """Make another handle on the same table, with its own time limit.

        Do not close either handle while you still use the other.
        """
        made = copy.copy(self)
        _stores.add(made)
        return made

    def close(self) -> None:  # noqa: B027 - most stores hold nothing
        """Release the resources of this handle. The keys stay. Do not use the handle afterwards."""

    def _limit_s(self, timeout: timedelta | float | None) -> float:
        return _limited(timeout, self._timeout_s)


def _limited(timeout: timedelta | float | None, default_s: float) -> float:
    return min(seconds(timeout, default_s), LONGEST_STORE_TIMEOUT_S)


def as_bytes(value: bytes | str) -> bytes:
    """Return `value` as the bytes that a store keeps: a str is encoded as UTF-8.

    Raises:
        InvalidArgumentError: the value is neither bytes nor str, or is a str that UTF-8 cannot encode.
    """
    if isinstance(value, str):
        return _as_utf8(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise InvalidArgumentError(f"a value in a store is bytes or str, found {type(value).__name__}; encode it first")


def as_key(key: str) -> str:
    """Return `key` unchanged if a store accepts this key.

    Raises:
        InvalidArgumentError: the key is not a str, or UTF-8 cannot encode it.
    """
    if not isinstance(key, str):
        raise InvalidArgumentError(f"a key in a store is a str, found {key!r}")
    # Most stores keep the key as UTF-8. The other stores refuse the same keys, so that a program can switch between stores.
    if not key.isascii():
        _as_utf8(key)
    return key


def _as_utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"expected a key or value that UTF-8 can encode, found {text!r:.80}; replace its surrogates, or pass a value as "
            "bytes (os.fsencode)"
        ) from error


def as_keys(keys: Sequence[str]) -> list[str]:
    """Return `keys` as a list. Raise an InvalidArgumentError for a single str, and for an entry that `as_key` refuses."""
    # A single str would be taken for a list of letters.
    if isinstance(keys, (str, bytes)):
        raise InvalidArgumentError(f"expected a list of keys, found the single key {keys!r}; write [{keys!r}]")
    return [as_key(key) for key in keys]


def key_timeout(keys: Iterable[str], where: str, timeout_s: float) -> StoreTimeout:
    """Return the error for keys that were not set within `timeout_s` seconds."""
    names = ", ".join(repr(key) for key in keys)
    return StoreTimeout(
        f"{where}: nobody set {names} within {timeout_s:g} s (timeout); either the process that should set it has failed "
        "or never started, or the keys differ, or the time limit is too short"
    )


def poll(done: Callable[[], bool], scope: CancelScope) -> bool:
    """Call `done` again and again until `done` returns true or `scope` is over. Return whether `done` returned true.

    `done` is called at least once. The pauses between the calls grow from 1 to 50 milliseconds, with a random part, so that
    processes do not all call `done` at once.
    """
    pause_s = _FIRST_PAUSE_S
    while not done():
        if scope.is_over():
            return False
        time.sleep(min(scope.remaining_s(), pause_s * random.uniform(0.5, 1.0)))
        pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
    return True


class PrefixStore(Store):
    """A store that keeps the key `k` as the key `prefix/k` of `store`. So users with different prefixes can share one `store`.

    Args:
        prefix: the beginning of the keys, without the slash that follows.
        store: the store with the values. Closing this handle does not close `store`.
        timeout: seconds or a timedelta; None takes the limit that `store` has now.
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
        """Return the underlying store and the prefix in words."""
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
        """Return the number of all keys of the underlying store, with or without the prefix, as torch's PrefixStore does."""
        return self._store.num_keys()

    def _full(self, key: str) -> str:
        return self._prefix + as_key(key)


_stores: LivingSet[Store] = LivingSet()


def _renew_in_fork() -> None:
    for store in _stores:
        store._in_fork()


in_forks(_renew_in_fork)
