"""Adapters: use our stores where torch needs a store, and torch's stores where we need one.

Note [A store that torch can hold]
----------------------------------
Python classes can derive from `torch.distributed.Store`, but there are traps (measured with torch 2.13):

* C++ looks for two methods under their C++ names, `deleteKey` and `getNumKeys`. torch's `PrefixStore.clone` also calls `clone`
  of the store that it wraps.
* C++ keeps only the C++ half of the object. When the last Python reference is dropped
  (``init_process_group(store=AsTorchStore(s))``), the Python half with the methods is freed. The next call then aborts with an
  internal assertion. So `AsTorchStore` keeps itself alive, until `release` or the end of the process.
* The time limit is in the C++ half, and C++ may set it. So each call that waits reads the limit from the C++ half.
* In torch, a limit of zero means that there is no limit.

Note [Waiting in torch's stores]
--------------------------------
`FromTorchStore` checks the keys every 1 to 50 ms, because torch's own `wait` breaks our contract in three ways (measured with
torch 2.13):

* A thread that waits in a TCPStore holds the store's mutex, so it blocks other threads that use this handle.
* `add` does not wake a thread that waits in a HashStore; the thread returns only at its time limit.
* In a FileStore, `wait` checks the keys only once per second.

Note [Set in torch's TCPStore]
------------------------------
The server of torch's TCPStore does not answer a `set`. So another handle may still see the old value afterwards (10 times in
5,000 between two handles on one machine). The server answers the requests of a handle in order. So `FromTorchStore` sends one
more request after a `set`, and waits for its answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist
from typing_extensions import override

from .. import torch_internals
from ..engine.cancel_scope import CancelScope, seconds
from ..errors import InvalidArgumentError, StoreError, StoreTimeout, SynclineError
from .store import LONGEST_STORE_TIMEOUT_S, Store, as_bytes, as_key, as_keys, key_timeout, poll
from .table import as_amount

T = TypeVar("T")

_SLICE_S = 0.25  # inside `waits_end_with`, a wait checks this often whether its scope is cancelled


class TorchStoreTimeout(StoreTimeout, dist.DistStoreError):
    """A key was not set in time. The class also derives from torch's error class, which torch's code catches."""


class AsTorchStore(dist.Store):
    """A store of Syncline as a `torch.distributed.Store`, for Gloo, `init_process_group(store=...)`, and torch elastic.

    The object lives until `release` or the end of the process.

    Args:
        store: the store with the values. Its time limit is used until `set_timeout` is called.
    """

    # See Note [A store that torch can hold].
    _alive: set[AsTorchStore] = set()  # noqa: RUF012 - shared by all objects on purpose

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.set_timeout(store.timeout)
        self._alive.add(self)

    def release(self) -> None:
        """Allow this object to be freed. After this call torch must not use this object."""
        self._alive.discard(self)

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait until `key` exists, and return its value."""
        limit = _limit(_torch_timeout(self))
        with _as_torchs_timeout():
            return self._while_wanted(lambda limit: self._store.get(key, limit), [key], limit)

    def add(self, key: str, value: int) -> int:
        """Add `value` to the number stored under `key`, and return the sum."""
        return self._store.add(key, value)

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist. The call does not wait for keys."""
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Return once all keys exist."""
        limit = _limit(_torch_timeout(self) if timeout is None else timeout)
        with _as_torchs_timeout():
            self._while_wanted(lambda limit: self._store.wait(keys, limit), keys, limit)

    def compare_set(self, key: str, expected_value: bytes | str, desired_value: bytes | str) -> bytes:
        """Store `desired_value` if the key's value is `expected_value`; see `Store.compare_set`."""
        return self._store.compare_set(key, expected_value, desired_value)

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        """Return the number of keys."""
        return self._store.num_keys()

    def clone(self) -> AsTorchStore:
        """Make another `AsTorchStore` over the same Syncline store. Any thread may use the new object."""
        return AsTorchStore(self._store)

    def _while_wanted(self, wait: Callable[[timedelta | float], T], keys: Sequence[str], limit: timedelta | float) -> T:
        """Wait for the keys by calling `wait`. Within `waits_end_with(scope)`, raise a StoreError once `scope` is cancelled."""
        scope: CancelScope | None = getattr(_here, "scope", None)
        if scope is None:
            return wait(limit)
        whole = CancelScope(seconds(limit))
        while True:
            # Only `cancel` counts. At the time limit, the thread that waits for this thread raises the better error.
            if scope.reason is not None:
                raise StoreError(f"{self._store.describe()}: nobody waits for {', '.join(map(repr, keys))} any more")
            try:
                return wait(max(min(whole.remaining_s(), _SLICE_S), 1e-3))
            except StoreTimeout:
                if whole.is_over():
                    raise key_timeout(keys, self._store.describe(), whole.timeout_s) from None

    deleteKey = delete_key  # noqa: N815 - the name that C++ looks for
    getNumKeys = num_keys  # noqa: N815 - the name that C++ looks for


class FromTorchStore(Store):
    """A store of torch as a `Store` of Syncline.

    Five differences from Syncline's own stores remain:

    * torch's FileStore counts an internal key in `num_keys`.
    * If several threads or processes delete the same key of torch's FileStore at the same time, `delete_key` may return true
      for more than one of them.
    * torch's TCPStore closes the client's connection after an `add` to a value that is not a number.
    * If a value begins with a number, such as " 3abc", `add` uses this number.
    * If a sum does not fit into 64 bits, the sum wraps around without an error.

    Args:
        timeout: seconds or a timedelta; None takes the limit that `store` has now.
    """

    def __init__(self, store: dist.Store, timeout: timedelta | float | None = None) -> None:
        super().__init__(_limit(_torch_timeout(store)) if timeout is None else timeout)
        self._store = store

    def describe(self) -> str:
        """Return the class of torch's store, and the address of a TCPStore."""
        name = f"torch.distributed.{type(self._store).__name__}"
        return f"{name} at {self._store.host}:{self._store.port}" if isinstance(self._store, dist.TCPStore) else name

    def set(self, key: str, value: bytes | str) -> None:
        """Store a value; see [`Store.set`][syncline.collectives.stores.Store.set]."""
        # See Note [Set in torch's TCPStore].
        name, raw = as_key(key), as_bytes(value)
        with self._explained():
            self._store.set(name, raw)  # type: ignore[arg-type]  # torch's type says str, but bytes work
            self._store.check([name])

    @override
    def get(self, key: str, timeout: timedelta | float | None = None) -> bytes:
        self.wait([key], timeout)
        with self._explained():
            return self._store.get(key)

    @override
    def add(self, key: str, amount: int) -> int:
        name, number = as_key(key), as_amount(key, amount)
        try:
            with self._explained():
                return self._store.add(name, number)
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
            # All keys may have been set since the last check. Then the message names all keys.
            raise key_timeout(self._missing(names) or names, self.describe(), timeout_s)

    @override
    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        name, old, new = as_key(key), as_bytes(expected), as_bytes(desired)
        with self._explained():
            return self._store.compare_set(name, old, new)  # type: ignore[arg-type]  # torch's type says str, but bytes work

    def delete_key(self, key: str) -> bool:
        """Remove a key; see [`Store.delete_key`][syncline.collectives.stores.Store.delete_key]."""
        # torch's FileStore returns true even if the key did not exist, so first ask whether it exists.
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
        try:
            yield
        except SynclineError:
            # torch's store uses one of our stores, which has explained the error already.
            raise
        except RuntimeError as error:
            raise self._failed(error) from error

    def _missing(self, keys: list[str]) -> list[str]:
        return [key for key in keys if not self.check([key])]

    def _failed(self, error: BaseException) -> StoreError:
        return StoreError(f"{self.describe()} failed: {error}")


_here = threading.local()


@contextmanager
def waits_end_with(scope: CancelScope) -> Iterator[None]:
    """Return a context in which this thread's waits in an `AsTorchStore` raise a `StoreError` once `scope` is cancelled.

    C++ code such as Gloo, which waits in the store, knows only its own time limit. But no thread may still wait when the
    interpreter ends: the thread could not return through the C++ code, so the process would abort.
    """
    _here.scope = scope
    try:
        yield
    finally:
        del _here.scope


@contextmanager
def _as_torchs_timeout() -> Iterator[None]:
    try:
        yield
    except StoreTimeout as error:
        raise TorchStoreTimeout(str(error)) from error


def _torch_timeout(store: dist.Store) -> timedelta:
    timeout: timedelta = store.timeout  # type: ignore[attr-defined]  # torch's type information lacks it
    return timeout


def _limit(timeout: timedelta) -> timedelta | float:
    return timeout if timeout else LONGEST_STORE_TIMEOUT_S
