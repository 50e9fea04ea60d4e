"""What the client and the server of a table say to each other, as bytes: a code, then fields, each after its length.

Nothing in it is code: no field is ever unpickled or evaluated.
"""

from __future__ import annotations

import struct
from enum import IntEnum

from .store import LONGEST_STORE_TIMEOUT_S

_LENGTH = struct.Struct(">I")
_SECONDS = struct.Struct(">d")


class ProtocolError(Exception):
    """The other side said something that it may not say."""


class Op(IntEnum):
    """What a client asks for, and the fields that follow."""

    SET = 1  # key, value -> (nothing)
    GET = 2  # seconds, key -> value
    WAIT = 3  # seconds, keys... -> (nothing)
    CHECK = 4  # keys... -> 0 or 1
    ADD = 5  # key, amount -> sum
    COMPARE_SET = 6  # key, expected, desired -> value
    DELETE_KEY = 7  # key -> 0 or 1
    NUM_KEYS = 8  # (nothing) -> number
    APPEND = 9  # key, value -> (nothing)
    LIST_KEYS = 10  # (nothing) -> keys...


class Status(IntEnum):
    """How it went, and the fields that follow."""

    DONE = 1  # as the operation says
    TIMED_OUT = 2  # the keys that are missing
    REFUSED = 3  # what the caller did wrong, in words
    OTHER_TABLE = 4  # (nothing): not the table that the client has spoken to so far


def pack(code: int, *fields: bytes) -> bytes:
    """One message."""
    return bytes([code]) + b"".join(_LENGTH.pack(len(field)) + field for field in fields)


def unpack(message: bytes) -> tuple[int, list[bytes]]:
    """The code and the fields of a message.

    Raises:
        ProtocolError: the lengths do not add up.
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
    """A time limit as a field."""
    return _SECONDS.pack(seconds)


def unpack_seconds(field: bytes) -> float:
    """A time limit from a field.

    Raises:
        ProtocolError: it is not a number, negative, or longer than any store waits.
    """
    if len(field) == _SECONDS.size:
        seconds: float = _SECONDS.unpack(field)[0]
        if 0 <= seconds <= LONGEST_STORE_TIMEOUT_S:  # not so for NaN
            return seconds
    raise ProtocolError("not a time limit")


def unpack_text(field: bytes) -> str:
    """A key from a field.

    Raises:
        ProtocolError: it is not UTF-8.
    """
    try:
        return field.decode()
    except UnicodeDecodeError:
        raise ProtocolError("a key is not UTF-8") from None


def unpack_int(field: bytes) -> int:
    """A number from a field.

    Raises:
        ProtocolError: it is not a number of at most 20 characters.
    """
    try:
        if len(field) <= 20:
            return int(field)
    except ValueError:
        pass
    raise ProtocolError("not a number")
