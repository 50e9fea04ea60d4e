"""Messages that nobody can forge, alter, repeat or reorder.

Note [Sealed messages]
----------------------
A frame is ``length (4 bytes) | HMAC-SHA256(key, number (8 bytes) | body) | body``. Each direction has its own key, fresh
for each connection, and numbers its messages from 0; the number is not sent, both sides count. A length above the limit
ends the connection before anything is stored.
"""

from __future__ import annotations

import hmac
import struct

from .wire import ProtocolError

_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")
_SEAL_BYTES = 32
HEAD_BYTES = _LENGTH.size + _SEAL_BYTES
LONGEST_MESSAGE_BYTES = 64 * 1024 * 1024


def _seal(key: bytes, number: int, body: bytes) -> bytes:
    return hmac.digest(key, _NUMBER.pack(number) + body, "sha256")


class Sealer:
    """Turns messages into frames, in one direction of one connection."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0

    def seal(self, body: bytes) -> bytes:
        """The next frame."""
        seal = _seal(self._key, self._number, body)
        self._number += 1
        return _LENGTH.pack(len(body)) + seal + body


class Opener:
    """Turns bytes as they arrive into messages, in one direction of one connection.

    Args:
        key: the key of the other side's sealer.
        limit_bytes: the longest message that is accepted.
    """

    def __init__(self, key: bytes, limit_bytes: int) -> None:
        self._key = key
        self._limit_bytes = limit_bytes
        self._number = 0
        self._inbox = bytearray()

    def feed(self, data: bytes) -> None:
        """Take bytes as they came."""
        self._inbox += data

    def next(self) -> bytes | None:
        """The next message, or None if it has not come in full.

        Raises:
            ProtocolError: it is too long, or was not sealed by the other side.
        """
        if len(self._inbox) < HEAD_BYTES:
            return None
        end = HEAD_BYTES + self._length()
        if len(self._inbox) < end:
            return None
        seal, body = bytes(self._inbox[_LENGTH.size : HEAD_BYTES]), bytes(self._inbox[HEAD_BYTES:end])
        if not hmac.compare_digest(seal, _seal(self._key, self._number, body)):
            raise ProtocolError("a message with a wrong seal")
        self._number += 1
        del self._inbox[:end]
        return body

    def _length(self) -> int:
        length: int = _LENGTH.unpack_from(self._inbox)[0]
        if length > self._limit_bytes:
            raise ProtocolError(f"a message of {length} bytes, where {self._limit_bytes} are allowed")
        return length
