"""Store: the contract of a small key-value table that the processes of a job share to find one another."""

from __future__ import annotations

import copy
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta

from typing_extensions import Self

from ..engine.cancel_scope import CancelScope, seconds
from ..errors import InvalidArgumentError, StoreTimeout

DEFAULT_STORE_TIMEOUT_S = 300.0
"""How long a store waits for a key unless told otherwise; as long as torch's."""

LONGEST_STORE_TIMEOUT_S = 20 * 86400.0
"""Longer limits, infinity among them, are cut to twenty days: the system's calls count milliseconds in 31 bits."""

_LOOK_AGAIN_S = 0.05


class Store(ABC):
    """A table from text to bytes that every process (or thread) of a job sees alike.

    **Who may call:** any process that holds a handle, any thread of it, at any time, without agreement with the others;
    no method is a collective. A call that waits in one thread holds up neither other threads of the same handle nor
    other processes.

    **Atomicity:** each of `set`, `append`, `add`, `compare_set` and `delete_key` happens at one instant between call and
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
    def append(self, key: str, value: bytes | str) -> None:
        """Put `value` behind what is stored under `key`; an absent key counts as an empty value."""

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

    @abstractmethod
    def list_keys(self) -> list[str]:
        """The keys that there are, in no order. A store may list keys of its own, as `barrier` and the queues keep some."""

    # ---- made of the others ----

    def multi_get(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> list[bytes]:
        """The values of several keys, one after the other; waits until all are there.

        Raises:
            StoreTimeout: they did not all come in time.
        """
        self.wait(keys, timeout)
        return [self.get(key, timeout) for key in as_keys(keys)]

    def multi_set(self, keys: Sequence[str], values: Sequence[bytes | str]) -> None:
        """Set several keys, one after the other, in this order.

        Raises:
            InvalidArgumentError: there are more keys than values, or fewer. Nothing was stored.
        """
        if len(as_keys(keys)) != len(values):
            raise InvalidArgumentError(f"multi_set: expected a value for each of {len(keys)} keys, found {len(values)} values")
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def barrier(self, key: str, world_size: int, timeout: timedelta | float | None = None) -> None:
        """Return when `world_size` callers have come to the barrier of this name; it may be used again after that.

        Raises:
            StoreTimeout: they did not all come in time. The barrier cannot be used any more.
            InvalidArgumentError: `world_size` is below 1.
        """
        if world_size < 1:
            raise InvalidArgumentError(f"barrier({key!r}): expected a world_size of at least 1, found {world_size}")
        came = self.add(f"{as_key(key)}/came", 1)
        opened = f"{key}/opened {(came - 1) // world_size}"
        if came % world_size == 0:
            self.set(opened, b"")
        self.wait([opened], timeout)

    def queue_push(self, key: str, value: bytes | str) -> None:
        """Put a value at the end of the queue of this name. The items of a queue are keys of their own, beside `key`."""
        number = self.add(f"{as_key(key)}/pushed", 1)
        self.set(_item(key, number), value)

    def queue_pop(self, key: str, block: bool = True, timeout: timedelta | float | None = None) -> bytes:
        """Take the first value out of a queue; no two callers get the same.

        Args:
            key: the queue's name.
            block: wait for one, if there is none.
            timeout: seconds or a timedelta; None takes that of the handle.

        Raises:
            StoreTimeout: there was none, or with `block` none came in time.
        """
        scope, me = CancelScope(self._limit_s(timeout)), uuid.uuid4().hex
        while True:
            before = self._latest_taken(key)
            number = _count(before) + 1
            item = _item(key, number)
            if self.check([item]):
                mine = f"{number} {me}".encode()  # unlike whatever another caller stores
                if self.compare_set(_taken(key), before, mine) == mine:
                    value = self.get(item)
                    self.delete_key(item)
                    return value
            elif self._latest_taken(key) == before:  # else another has taken it, and there may be a next one
                if not (block and scope.remaining_s()):
                    raise StoreTimeout(f"{self.describe()}: timeout: queue {key!r} is empty (block={block})")
                # Another may take and delete the item before this handle sees it: look again now and then.
                with suppress(StoreTimeout):
                    self.wait([item], min(scope.remaining_s() or 1e-3, _LOOK_AGAIN_S))

    def queue_len(self, key: str) -> int:
        """How many values a queue has."""
        pushed = self.add(f"{as_key(key)}/pushed", 0)
        return pushed - _count(self._latest_taken(key))

    def _latest_taken(self, queue: str) -> bytes:
        """What the latest who took an item of the queue has stored; empty if nobody has."""
        taken = _taken(queue)
        return self.get(taken) if self.check([taken]) else b""

    def clone(self) -> Self:
        """Another handle on the same table, with a time limit of its own. Close them when neither is in use any more."""
        return copy.copy(self)

    def close(self) -> None:  # noqa: B027 - most stores hold nothing
        """Release what this handle holds; the keys stay for the others. Calls after it are errors where it held anything."""

    def _limit_s(self, timeout: timedelta | float | None) -> float:
        """The limit of one call, in seconds."""
        return _limited(timeout, self._timeout_s)


def _taken(queue: str) -> str:
    return f"{as_key(queue)}/taken"


def _item(queue: str, number: int) -> str:
    return f"{queue}/item {number}"


def _count(taken: bytes) -> int:
    """How many items of a queue are taken, by what the latest who took one has stored."""
    return int(taken.split()[0]) if taken else 0


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
