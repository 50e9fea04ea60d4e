"""Log: a table kept as a file to which changes are appended.

Note [A log on a shared file system]
------------------------------------
NFS promises little, but this it does: who opens a file after another host has closed it sees what that host wrote. (About
a *new name* in a folder it promises nothing for up to a minute, so a file for each key would be slow to appear.) Hence:

1. The log is created when a store is opened; from then on its name does not change.
2. A writer holds the lock (Note [Locking by link] in `file.lock`), reads what is new, appends one record, and syncs and closes
   the file before it releases the lock. The sync also brings out errors of a full disk or quota, in the writer.
3. A reader takes no lock. It opens the file anew each time, and reads on from where it stopped.
4. A record carries its length and checksum. A reader stops before one that is not whole yet, and tries again later. A
   writer, who knows that nobody else is writing, cuts off the remains of one that failed.
5. The file only grows, so a client's cache can tell by the size alone that it is out of date.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from ...errors import StoreError
from .folder import Folder

_LOG = "log"
_HEAD = struct.Struct(">II")  # bytes of the body, and their CRC-32
_BODY = struct.Struct(">?I")  # whether there is a value, and bytes of the key


def encode(key: str, value: bytes | None) -> bytes:
    """One record: from now on `key` has `value`, or is gone."""
    name = key.encode()
    body = _BODY.pack(value is not None, len(name)) + name + (value or b"")
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def decode(data: bytes) -> tuple[list[tuple[str, bytes | None]], int]:
    """The whole records at the beginning of `data`, and how many bytes they take.

    Raises:
        ValueError: a record is whole, and not one that `encode` makes.
    """
    records: list[tuple[str, bytes | None]] = []
    start = 0
    while (body := _whole_body(data, start)) is not None:
        records.append(_split(body))
        start += _HEAD.size + len(body)
    return records, start


def _whole_body(data: bytes, start: int) -> bytes | None:
    if len(data) < start + _HEAD.size:
        return None
    size, checksum = _HEAD.unpack_from(data, start)
    body = data[start + _HEAD.size : start + _HEAD.size + size]
    whole = len(body) == size >= _BODY.size and zlib.crc32(body) == checksum
    return body if whole else None


def _split(body: bytes) -> tuple[str, bytes | None]:
    has_value, key_bytes = _BODY.unpack_from(body)
    end = _BODY.size + key_bytes
    if end > len(body):
        raise ValueError("a key is longer than its record")
    return body[_BODY.size : end].decode(), body[end:] if has_value else None


class Log:
    """The table that the file `log` describes. Not for several threads at once.

    Args:
        folder: where the file is; it is created, for the owner only, if it is not there.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._end = 0
        self.values: dict[str, bytes] = {}
        with self._open(os.O_RDWR | os.O_CREAT):
            pass

    def refresh(self) -> None:
        """Bring `values` up to date with what others appended.

        Raises:
            StoreError: a record is not one of ours.
        """
        with self._open(os.O_RDONLY) as file:
            file.seek(self._end)
            data = file.read()
        try:
            records, size = decode(data)
        except ValueError as error:  # a UnicodeDecodeError is one
            raise StoreError(
                f"file store {self._folder.path}: the file {_LOG} holds a record that this version of Syncline does not "
                f"understand ({error}); it was damaged, or written by something else. Remove the folder if no job uses it, or "
                "give another"
            ) from error
        for key, value in records:
            self._note(key, value)
        self._end += size

    def append(self, key: str, value: bytes | None) -> None:
        """Write one change. Call it with the lock held, after `refresh`."""
        record = encode(key, value)
        with self._open(os.O_RDWR) as file:
            self._write(file, record)
        self._end += len(record)
        self._note(key, value)

    @contextmanager
    def _open(self, flags: int) -> Iterator[BinaryIO]:
        with self._folder.opened() as folder:
            descriptor = self._folder.open_file(folder, _LOG, flags)
        with os.fdopen(descriptor, "rb" if flags == os.O_RDONLY else "r+b") as file:
            yield file

    def _write(self, file: BinaryIO, record: bytes) -> None:
        file.truncate(self._end)
        file.seek(self._end)
        file.write(record)
        file.flush()
        os.fsync(file.fileno())

    def _note(self, key: str, value: bytes | None) -> None:
        if value is None:
            self.values.pop(key, None)
        else:
            self.values[key] = value
