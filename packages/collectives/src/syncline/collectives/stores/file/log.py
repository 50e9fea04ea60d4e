"""Log: a table kept as a file to which changes are appended.

Note [A log on a shared file system]
------------------------------------
NFS guarantees this: if a process opens a file after another host has closed it, the process sees everything that the host
wrote. (NFS guarantees nothing about a *new name* in a folder for up to a minute, so a file for each key would be slow to
appear.) So:

1. The log is created when a store is opened. From then on its name does not change.
2. A writer holds the lock (Note [Locking by link] in `file.lock`), reads new records, appends one record, and syncs and closes
   the file before it releases the lock. The sync also makes errors of a full disk or quota appear in the writer.
3. A reader takes no lock. It opens the file again each time, and reads on from where it stopped.
4. A record contains its length and checksum. If a record is incomplete, a reader stops before it, and tries again later. A
   writer holds the lock, so it knows that an incomplete record comes from a write that failed, and cuts it off.
5. Complete records are never removed, so the file grows. An NFS client sees from the new size that its cache is out of date.
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
_HEAD = struct.Struct(">II")  # the number of bytes of the body, and their CRC-32
_BODY = struct.Struct(">?I")  # whether there is a value, and the number of bytes of the key


def encode(key: str, value: bytes | None) -> bytes:
    """Encode one record, which says that `key` now has `value`, or was removed if `value` is None."""
    name = key.encode()
    body = _BODY.pack(value is not None, len(name)) + name + (value or b"")
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def decode(data: bytes) -> tuple[list[tuple[str, bytes | None]], int]:
    """The complete records at the beginning of `data`, and the number of bytes that they take.

    Raises:
        ValueError: a record is complete, but `encode` cannot have made it.
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
    """A table that is stored in the file `log` as a list of changes. Only one thread at a time may use the object.

    Args:
        folder: the folder of the file. The file is created, for the owner only, if it does not exist.

    Attributes:
        values: the table as of the last `refresh` or `append`.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._end = 0
        self.values: dict[str, bytes] = {}
        with self._open(os.O_RDWR | os.O_CREAT):
            pass

    def refresh(self) -> None:
        """Read new records, which others have appended, and change `values` accordingly.

        Raises:
            StoreError: the file has a record that this version of Syncline cannot have written.
        """
        with self._open(os.O_RDONLY) as file:
            file.seek(self._end)
            data = file.read()
        try:
            records, size = decode(data)
        except ValueError as error:  # a UnicodeDecodeError is a ValueError
            raise StoreError(
                f"file store {self._folder.path}: the file {_LOG} holds a record that this version of Syncline does not "
                f"understand ({error}); it was damaged, or written by something else. Remove the folder if no job uses it, or "
                "give another"
            ) from error
        for key, value in records:
            self._note(key, value)
        self._end += size

    def append(self, key: str, value: bytes | None) -> None:
        """Write one record (see `encode`) to the end of the file. Before, take the lock and call `refresh`."""
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
        # This cuts off the incomplete record of a write that failed; see point 4 of the note.
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
