"""Service: a table that is served to clients, and the clients that wait for it, without any input or output.

Time comes in as an argument and answers go out as return values, so it can be tested as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ..errors import InvalidArgumentError
from . import mutations
from .messages import Op, ProtocolError, Status, pack, unpack, unpack_int, unpack_seconds, unpack_text

Client = TypeVar("Client", bound=Hashable)

LONGEST_WAIT_S = 30.0
"""After this long a client is told that its keys are missing, however long it would wait; it asks again. So the server does
not keep for long what a client waited for that has gone."""


@dataclass(frozen=True)
class _Waiting:
    """A client that gets its answer when all of `keys` are there, or when the time is up."""

    keys: list[str]
    until: float
    wants_value: bool


class Service(Generic[Client]):
    """Answers requests. `Client` is whatever names a connection."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[Client, _Waiting] = {}
        self._handlers: dict[int, Callable[[list[bytes]], bytes]] = {
            Op.SET: self._set,
            Op.CHECK: self._check,
            Op.ADD: self._add,
            Op.COMPARE_SET: self._compare_set,
            Op.DELETE_KEY: self._delete_key,
            Op.NUM_KEYS: self._num_keys,
            Op.APPEND: self._append,
            Op.LIST_KEYS: self._list_keys,
        }

    def request(self, client: Client, message: bytes, now: float) -> list[tuple[Client, bytes]]:
        """Take one request; give the answers that are due, to this client and to those that waited for it.

        Raises:
            ProtocolError: it is not a request. Nothing was changed.
        """
        op, fields = unpack(message)
        if client in self._waiting:
            raise ProtocolError("a request before the answer to the one before")
        if op in (Op.GET, Op.WAIT):
            self._waiting[client] = _waiting(op, fields, now)
            return self._arrived([client]) or self.expire(now)
        return [(client, self._answer(op, fields)), *self._arrived(list(self._waiting))]

    def expire(self, now: float) -> list[tuple[Client, bytes]]:
        """The answers to those whose time is up."""
        late = [(client, waiting) for client, waiting in self._waiting.items() if waiting.until <= now]
        for client, _ in late:
            del self._waiting[client]
        return [(client, pack(Status.TIMED_OUT, *self._missing(waiting))) for client, waiting in late]

    def next_expiry(self) -> float | None:
        """When `expire` will have something to do, or None."""
        return min((waiting.until for waiting in self._waiting.values()), default=None)

    def forget(self, client: Client) -> None:
        """The client is gone."""
        self._waiting.pop(client, None)

    def _arrived(self, clients: list[Client]) -> list[tuple[Client, bytes]]:
        """The answers to those of `clients` whose keys are all there now."""
        served = [client for client in clients if not mutations.missing(self._waiting[client].keys, self._values)]
        return [(client, self._served(self._waiting.pop(client))) for client in served]

    def _served(self, waiting: _Waiting) -> bytes:
        return pack(Status.DONE, self._values[waiting.keys[0]]) if waiting.wants_value else pack(Status.DONE)

    def _missing(self, waiting: _Waiting) -> list[bytes]:
        return [key.encode() for key in mutations.missing(waiting.keys, self._values)]

    def _answer(self, op: int, fields: list[bytes]) -> bytes:
        handler = self._handlers.get(op)
        if handler is None:
            raise ProtocolError(f"an operation {op}, which there is not")
        try:
            return handler(fields)
        except InvalidArgumentError as error:
            return pack(Status.REFUSED, str(error).encode())

    def _set(self, fields: list[bytes]) -> bytes:
        key, value = _take(fields, 2)
        mutations.apply(self._values, unpack_text(key), mutations.setting(value))
        return pack(Status.DONE)

    def _append(self, fields: list[bytes]) -> bytes:
        key, value = _take(fields, 2)
        mutations.apply(self._values, unpack_text(key), mutations.appending(value))
        return pack(Status.DONE)

    def _check(self, fields: list[bytes]) -> bytes:
        return pack(Status.DONE, b"%d" % (not mutations.missing(map(unpack_text, fields), self._values)))

    def _add(self, fields: list[bytes]) -> bytes:
        key, amount = _take(fields, 2)
        name = unpack_text(key)
        total = mutations.apply(self._values, name, mutations.adding(name, unpack_int(amount)))
        return pack(Status.DONE, b"%d" % total)

    def _compare_set(self, fields: list[bytes]) -> bytes:
        key, expected, desired = _take(fields, 3)
        return pack(Status.DONE, mutations.apply(self._values, unpack_text(key), mutations.swapping(expected, desired)))

    def _delete_key(self, fields: list[bytes]) -> bytes:
        (key,) = _take(fields, 1)
        return pack(Status.DONE, b"%d" % mutations.apply(self._values, unpack_text(key), mutations.removing()))

    def _num_keys(self, fields: list[bytes]) -> bytes:
        _take(fields, 0)
        return pack(Status.DONE, b"%d" % len(self._values))

    def _list_keys(self, fields: list[bytes]) -> bytes:
        _take(fields, 0)
        return pack(Status.DONE, *(key.encode() for key in self._values))


def _waiting(op: int, fields: list[bytes], now: float) -> _Waiting:
    if not fields or (op == Op.GET and len(fields) != 2):
        raise ProtocolError("a wait without its fields")
    return _Waiting(
        [unpack_text(key) for key in fields[1:]], now + min(unpack_seconds(fields[0]), LONGEST_WAIT_S), op == Op.GET
    )


def _take(fields: list[bytes], count: int) -> list[bytes]:
    if len(fields) != count:
        raise ProtocolError(f"{len(fields)} fields, where {count} are expected")
    return fields
