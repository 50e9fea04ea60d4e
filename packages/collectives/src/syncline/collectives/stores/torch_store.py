"""Our stores where torch wants one, and torch's stores where we want one.

Note [A store that torch can hold]
----------------------------------
torch lets Python classes derive from `torch.distributed.Store`, with traps (measured with torch 2.13):

* C++ looks for two methods under their C++ names, `deleteKey` and `getNumKeys`; `clone` is called by `PrefixStore.clone`. All
  other methods have one name.
* torch asks `has_extended_api` before it calls `append`, `multi_get` or `multi_set`. The base class says no.
* C++ keeps only the C++ half of the object. When the last Python reference goes (``PrefixStore("p", AsTorchStore(s))``,
  ``init_process_group(store=AsTorchStore(s))``), so does the half that has the methods, and the next call aborts with an
  internal assertion. Hence `AsTorchStore` keeps itself alive, until `release` or the end of the process.
* The time limit lives in the C++ half: `set_timeout` from C++ never reaches Python. So each call that waits reads it there.
* A limit of zero means none to torch.

Note [Waiting in torch's stores]
--------------------------------
`FromTorchStore` waits by asking, every 1 to 50 ms, and not by torch's own `wait`, which breaks our contract in three ways:
a thread that waits in a TCPStore holds its mutex, so other threads of that handle stand still; who waits in a HashStore is
not woken by `add`, but at his scope; a FileStore looks once per second. (Measured with torch 2.13.)

Note [Set in torch's TCPStore]
------------------------------
Its `set` is sent and not answered, so another handle may still see the old value after it (measured between two handles on one
machine: 10 times in 5,000). The server answers a handle in the order in which that handle asked, so `FromTorchStore` asks one
thing more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch.distributed as dist
from typing_extensions import override

from .. import torch_internals
from ..engine.cancel_scope import CancelScope
from ..errors import InvalidArgumentError, StoreError, StoreTimeout
from .store import LONGEST_STORE_TIMEOUT_S, Store, as_bytes, as_key, as_keys, key_timeout, poll


class TorchStoreTimeout(StoreTimeout, dist.DistStoreError):
    """A key never came, for code of torch's that catches torch's own error."""


class AsTorchStore(dist.Store):
    """A store of ours, wherever torch takes a `torch.distributed.Store`: Gloo, `init_process_group(store=...)`, elastic.

    It lives until `release` or the end of the process.

    Args:
        store: where the values are. The time limit is its at first, then whatever `set_timeout` is told.
    """

    # See Note [A store that torch can hold].
    _alive: set[AsTorchStore] = set()  # noqa: RUF012 - of the class on purpose

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.set_timeout(store.timeout)
        self._alive.add(self)

    def release(self) -> None:
        """Let go of the store. Nothing of torch's may use it after this."""
        self._alive.discard(self)

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value."""
        with _as_torchs_timeout():
            return self._store.get(key, _limit(_torch_timeout(self)))

    def add(self, key: str, value: int) -> int:
        """Count."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait for keys."""
        with _as_torchs_timeout():
            self._store.wait(keys, _limit(_torch_timeout(self) if timeout is None else timeout))

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        """Exchange a value."""
        return self._store.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        """Count the keys."""
        return self._store.num_keys()

    def clone(self) -> AsTorchStore:
        """Another torch store on the same store of ours, which any thread may use."""
        return AsTorchStore(self._store)

    deleteKey = delete_key  # noqa: N815 - the name that C++ looks for
    getNumKeys = num_keys  # noqa: N815 - the name that C++ looks for


class FromTorchStore(Store):
    """A store of torch's, wherever we take a `Store`.

    It waits by asking again and again. What torch leaves to chance otherwise stays so: its FileStore counts
    a key of its own in `num_keys`, and its TCPStore ends the connection of a client that adds to a text.

    Args:
        store: where the values are.
        timeout: seconds or a timedelta; None takes the limit that `store` has now. Later changes of either leave the other.
    """

    def __init__(self, store: dist.Store, timeout: timedelta | float | None = None) -> None:
        super().__init__(_limit(_torch_timeout(store)) if timeout is None else timeout)
        self._store = store

    def describe(self) -> str:
        """Which of torch's stores it is, and where."""
        name = f"torch.distributed.{type(self._store).__name__}"
        return f"{name} at {self._store.host}:{self._store.port}" if isinstance(self._store, dist.TCPStore) else name

    def set(self, key: str, value: bytes | str) -> None:
        """See [`Store.set`][syncline.collectives.stores.Store.set]."""
        # See Note [Set in torch's TCPStore].
        name, raw = as_key(key), as_bytes(value)
        with self._explained():
            self._store.set(name, raw)  # type: ignore[arg-type]  # torch says str, and takes bytes
            self._store.check([name])

    @override
    def get(self, key: str, timeout: timedelta | float | None = None) -> bytes:
        self.wait([key], timeout)
        with self._explained():
            return self._store.get(key)

    @override
    def add(self, key: str, amount: int) -> int:
        try:
            with self._explained():
                return self._store.add(as_key(key), amount)
        except ValueError as error:
            raise InvalidArgumentError(f"{self.describe()}: add({key!r}, {amount}): the value is not a number") from error

    @override
    def check(self, keys: Sequence[str]) -> bool:
        names = as_keys(keys)
        with self._explained():
            return self._store.check(names)

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        timeout_s, names = self._limit_s(timeout), as_keys(keys)
        if not poll(lambda: self.check(names), CancelScope(timeout_s)):
            raise key_timeout(self._missing(names) or names, self.describe(), timeout_s)

    @override
    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        name, old, new = as_key(key), as_bytes(expected), as_bytes(desired)
        with self._explained():
            return self._store.compare_set(name, old, new)  # type: ignore[arg-type]  # torch says str, and takes bytes

    def delete_key(self, key: str) -> bool:
        """See [`Store.delete_key`][syncline.collectives.stores.Store.delete_key].

        torch's FileStore says yes even if there was nothing, so this asks before.
        """
        name = as_key(key)
        with self._explained():
            return self._store.check([name]) and self._store.delete_key(name)

    @override
    def num_keys(self) -> int:
        with self._explained():
            return self._store.num_keys()

    @override
    def clone(self) -> FromTorchStore:
        return FromTorchStore(torch_internals.clone_of_store(self._store), self.timeout)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn torch's errors into ours."""
        try:
            yield
        except StoreError:
            raise
        except RuntimeError as error:
            raise self._failed(error) from error

    def _missing(self, keys: list[str]) -> list[str]:
        return [key for key in keys if not self.check([key])]

    def _failed(self, error: BaseException) -> StoreError:
        return StoreError(f"{self.describe()} failed: {error}")


@contextmanager
def _as_torchs_timeout() -> Iterator[None]:
    """Turn our time-out into the one that torch's code catches, too."""
    try:
        yield
    except StoreTimeout as error:
        raise TorchStoreTimeout(str(error)) from error


def _torch_timeout(store: dist.Store) -> timedelta:
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # torch's type information lacks it
    return timeout


def _limit(timeout: timedelta) -> timedelta | float:
    return timeout if timeout else LONGEST_STORE_TIMEOUT_S
