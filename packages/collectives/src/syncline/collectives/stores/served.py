"""A table that one process serves to other processes: the protocol, the server's side, and the client's side.

A message is a code (an `Op` or a `Status`), then fields. Before each field comes its length. No field is ever unpickled or
evaluated. `Service` does no I/O: it gets the time as an argument and returns the answers.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Generic, TypeVar

from typing_extensions import override

from ..errors import InvalidArgumentError
from . import table
from .store import LONGEST_STORE_TIMEOUT_S, Store, as_bytes, as_key, as_keys

_LENGTH = struct.Struct(">I")
_SECONDS = struct.Struct(">d")


class ProtocolError(Exception):
    """The other side of the connection sent a message that the protocol does not allow."""


class Op(IntEnum):
    """The operation that a client requests. The comments show the fields of the request and of the answer."""

    SET = 1  # key, value -> (nothing)
    GET = 2  # seconds, key -> value
    WAIT = 3  # seconds, keys... -> (nothing)
    CHECK = 4  # keys... -> 0 or 1
    ADD = 5  # key, amount -> sum
    COMPARE_SET = 6  # key, expected, desired -> value
    DELETE_KEY = 7  # key -> 0 or 1
    NUM_KEYS = 8  # (nothing) -> number


class Status(IntEnum):
    """The result of a request. An answer begins with its `Status`. The comments show the fields that follow."""

    DONE = 1  # the fields of the operation
    TIMED_OUT = 2  # the keys that are missing
    REFUSED = 3  # the caller's mistake in words
    OTHER_TABLE = 4  # (nothing): this is not the table that the client has used so far


def pack(code: int, *fields: bytes) -> bytes:
    """Make a message from a code and fields."""
    return bytes([code]) + b"".join(_LENGTH.pack(len(field)) + field for field in fields)


def unpack(message: bytes) -> tuple[int, list[bytes]]:
    """Return the code and the fields of a message.

    Raises:
        ProtocolError: a length does not fit the message.
    """
    if not message:
        raise ProtocolError("an empty message")
    fields, start = [], 1
    while start < len(message):
        field, start = _field(message, start)
        fields.append(field)
    return message[0], fields


def _field(message: bytes, start: int) -> tuple[bytes, int]:
    begin = start + _LENGTH.size
    if begin > len(message):
        raise ProtocolError("a length is cut off")
    end = begin + _LENGTH.unpack_from(message, start)[0]
    if end > len(message):
        raise ProtocolError("a field is longer than its message")
    return message[begin:end], end


def pack_seconds(seconds: float) -> bytes:
    """Encode a time limit in seconds as a field of a message."""
    return _SECONDS.pack(seconds)


def unpack_seconds(field: bytes) -> float:
    """Decode a time limit in seconds from a field of a message.

    Raises:
        ProtocolError: the field is not a number, is negative, or exceeds `LONGEST_STORE_TIMEOUT_S`.
    """
    if len(field) == _SECONDS.size:
        seconds: float = _SECONDS.unpack(field)[0]
        if 0 <= seconds <= LONGEST_STORE_TIMEOUT_S:  # false for NaN, too
            return seconds
    raise ProtocolError("not a time limit")


def unpack_text(field: bytes) -> str:
    """Decode a key from a field of a message.

    Raises:
        ProtocolError: the field is not UTF-8.
    """
    try:
        return field.decode()
    except UnicodeDecodeError:
        raise ProtocolError("a key is not UTF-8") from None


def unpack_int(field: bytes) -> int:
    """Decode a number from a field of a message.

    Raises:
        ProtocolError: the field is not a number of at most 20 characters.
    """
    try:
        # The text comes from outside, and `int` is slow for a long text.
        if len(field) <= 20:
            return table.decimal(field)
    except ValueError:
        pass
    raise ProtocolError("not a number")


Client = TypeVar("Client", bound=Hashable)

LONGEST_WAIT_S = 30.0
"""After this time the server tells a waiting client that its keys are missing, and the client asks again. So the server soon
forgets the wait of a client that is gone."""


@dataclass(frozen=True)
class _WaitingRequest:
    """A client's request that waits for keys. The server answers when all of `keys` exist, or else at the time `until`."""

    keys: list[str]
    until: float
    wants_value: bool


class Service(Generic[Client]):
    """The server's table, which answers requests. `Client` is the type of a client's id, which the caller chooses."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[Client, _WaitingRequest] = {}
        self._handlers: dict[int, Callable[[list[bytes]], bytes]] = {
            Op.SET: self._set,
            Op.CHECK: self._check,
            Op.ADD: self._add,
            Op.COMPARE_SET: self._compare_set,
            Op.DELETE_KEY: self._delete_key,
            Op.NUM_KEYS: self._num_keys,
        }

    def request(self, client: Client, message: bytes, now: float) -> list[tuple[Client, bytes]]:
        """Process one request of `client`. Return the answers to `client`, and to all clients whose wait this request ends.

        Raises:
            ProtocolError: the message is not a request. The table is not changed.
        """
        op, fields = unpack(message)
        # A client may have only one request in flight, because an answer does not say to which request it belongs.
        if client in self._waiting:
            raise ProtocolError("a request before the answer to the one before")
        if op in (Op.GET, Op.WAIT):
            self._waiting[client] = _waiting_request(op, fields, now)
            # The keys may exist already, or the limit may be zero. Then the answer is due at once.
            return self._arrived([client]) or self.expire(now)
        return [(client, self._carry_out(op, fields)), *self._arrived(list(self._waiting))]

    def expire(self, now: float) -> list[tuple[Client, bytes]]:
        """End each wait whose time limit is reached, and return the answers to the clients that waited."""
        late = [(client, waiting) for client, waiting in self._waiting.items() if waiting.until <= now]
        for client, _ in late:
            del self._waiting[client]
        return [(client, pack(Status.TIMED_OUT, *self._missing(waiting))) for client, waiting in late]

    def next_expiry(self) -> float | None:
        """Return the time at which the caller must call `expire` next, or None if no client waits."""
        return min((waiting.until for waiting in self._waiting.values()), default=None)

    def _arrived(self, clients: list[Client]) -> list[tuple[Client, bytes]]:
        served = [client for client in clients if not table.missing(self._waiting[client].keys, self._values)]
        return [(client, self._answer_to(self._waiting.pop(client))) for client in served]

    def _answer_to(self, waiting: _WaitingRequest) -> bytes:
        return pack(Status.DONE, self._values[waiting.keys[0]]) if waiting.wants_value else pack(Status.DONE)

    def _missing(self, waiting: _WaitingRequest) -> list[bytes]:
        return [key.encode() for key in table.missing(waiting.keys, self._values)]

    def _carry_out(self, op: int, fields: list[bytes]) -> bytes:
        handler = self._handlers.get(op)
        if handler is None:
            raise ProtocolError(f"an operation {op}, which there is not")
        try:
            return handler(fields)
        except InvalidArgumentError as error:
            # Answer a caller's mistake with REFUSED. The mistake does not end the connection.
            return pack(Status.REFUSED, str(error).encode())

    def _set(self, fields: list[bytes]) -> bytes:
        key, value = _fields_of(fields, 2)
        self._values[unpack_text(key)] = value
        return pack(Status.DONE)

    def _check(self, fields: list[bytes]) -> bytes:
        return pack(Status.DONE, b"%d" % (not table.missing(map(unpack_text, fields), self._values)))

    def _add(self, fields: list[bytes]) -> bytes:
        key, amount = _fields_of(fields, 2)
        name = unpack_text(key)
        total = table.apply(self._values, name, table.adding(name, unpack_int(amount)))
        return pack(Status.DONE, b"%d" % total)

    def _compare_set(self, fields: list[bytes]) -> bytes:
        key, expected, desired = _fields_of(fields, 3)
        return pack(Status.DONE, table.apply(self._values, unpack_text(key), table.swapping(expected, desired)))

    def _delete_key(self, fields: list[bytes]) -> bytes:
        (key,) = _fields_of(fields, 1)
        return pack(Status.DONE, b"%d" % table.apply(self._values, unpack_text(key), table.removing()))

    def _num_keys(self, fields: list[bytes]) -> bytes:
        _fields_of(fields, 0)
        return pack(Status.DONE, b"%d" % len(self._values))


def _waiting_request(op: int, fields: list[bytes], now: float) -> _WaitingRequest:
    if not fields or (op == Op.GET and len(fields) != 2):
        raise ProtocolError("a wait without its fields")
    return _WaitingRequest(
        [unpack_text(key) for key in fields[1:]], now + min(unpack_seconds(fields[0]), LONGEST_WAIT_S), op == Op.GET
    )


def _fields_of(fields: list[bytes], count: int) -> list[bytes]:
    if len(fields) != count:
        raise ProtocolError(f"{len(fields)} fields, where {count} are expected")
    return fields


class ServedStore(Store):
    """A handle on a table that another process or thread serves. Each method sends one operation to that server (`_call`)."""

    @abstractmethod
    def _call(self, op: Op, *fields: bytes) -> list[bytes]:
        """Ask the server to carry out the operation `op`, and return the fields of the server's answer."""

    @override
    def set(self, key: str, value: bytes | str) -> None:
        self._call(Op.SET, as_key(key).encode(), as_bytes(value))

    @override
    def add(self, key: str, amount: int) -> int:
        return int(self._call(Op.ADD, as_key(key).encode(), b"%d" % table.as_amount(key, amount))[0])

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
