"""`FileStore`: a table in a folder of a file system that all processes share."""

from __future__ import annotations

import os
import re
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

from typing_extensions import override

from ...engine.cancel_scope import CancelScope
from ...errors import InvalidArgumentError, StoreError, StoreUnavailableError
from .. import table
from ..store import as_key, as_keys, key_timeout, poll
from .folder import Folder, LinkLock

_LOG = "log"
_HEAD = struct.Struct(">II")  # the number of bytes of the body, and their CRC-32
_BODY = struct.Struct(">?I")  # whether there is a value, and the number of bytes of the key


def encode(key: str, value: bytes | None) -> bytes:
    """Encode one record: `key` now has `value`. If `value` is None, the record says that `key` was removed."""
    name = key.encode()
    body = _BODY.pack(value is not None, len(name)) + name + (value or b"")
    return _HEAD.pack(len(body), zlib.crc32(body)) + body


def decode(data: bytes) -> tuple[list[tuple[str, bytes | None]], int]:
    """Return the complete records at the beginning of `data`, and the number of bytes of these records.

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
    """A table that is stored in the file `log` as a list of changes. A thread that uses the object must hold `lock`.

    Note [A log on a shared file system]
    ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
    If a process opens a file after another host has closed it, NFS shows the process everything that the host wrote. (For a
    *new name* in a folder, NFS guarantees nothing for up to a minute. So there is one file, and not a file for each key.)

    1. The log is created when a store is opened. From then on its name does not change.
    2. A writer takes the lock (Note [Locking by link] in `file.folder`), reads new records, appends one record, calls `fsync`,
       closes the file, and releases the lock. `fsync` also raises the error of a full disk or quota in the writer.
    3. A reader takes no lock. The reader opens the file again each time, and reads on from where it stopped.
    4. A record contains its length and checksum. A reader stops before an incomplete record, and tries again later. If a
       writer that holds the lock finds an incomplete record, an earlier write failed. The writer cuts this record off.
    5. Complete records are never removed, so the file grows. From the new size, an NFS client sees that its cache is out of
       date.

    Args:
        folder: the folder of the file. If the file does not exist, the constructor creates it, for the owner only.

    Attributes:
        values: the table after the last `refresh` or `append`.
        lock: a thread must hold `lock` while the thread uses this object.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._end = 0
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        with self._open(os.O_RDWR | os.O_CREAT):
            pass

    def in_fork(self) -> None:
        """Forget the table, so that the next `refresh` reads the whole file. A forked child calls this method."""
        # At the fork, a thread of the parent may have been in the middle of `refresh`.
        self.lock = threading.Lock()
        self._end = 0
        self.values = {}

    def refresh(self) -> None:
        """Read the records that other processes have appended, and update `values`.

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
        """Write one record (see `encode`) to the end of the file.

        The caller must take the `LinkLock` of the folder, then call `refresh`, then call `append`.
        """
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
        # Cut off the incomplete record of a write that failed; see point 4 of the note.
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


_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class FileStore(table.LockedStore):
    """A store in the folder `path/run_id`. If the folder does not exist, the constructor makes it.

    The store needs no daemon, port or lock server. The file system must have hard links and close-to-open consistency, as NFS,
    Lustre, BeeGFS, GPFS and local file systems have.

    Cost: a change takes about twenty operations on the file system, including one sync. A read takes two opens and one read. A
    call that waits reads every 1 to 50 ms. The store's file grows with every change, so do not use it as a database.

    `run_id` must be new in every run: with an old id, the run would read the data of an earlier run. Use the scheduler's job
    number and step number together, or use `file_rendezvous`, which needs no id.

    Only the owner can read and write the store's files. The store refuses a folder that other users can write.

    Args:
        path: a folder that all processes reach under this name.
        run_id: letters, digits, dot, dash and underscore; the same in all processes of a run.
        timeout: seconds or a timedelta; see `Store`. `timeout` also limits how long a change waits for the store's lock.

    Raises:
        StoreUnavailableError: the folder cannot be made or written, other users can write it, it is a symbolic link, or its
            file system has no hard links.
        InvalidArgumentError: `run_id` cannot be the name of a folder.
    """

    def __init__(self, path: str | os.PathLike[str], run_id: str, timeout: timedelta | float | None = None) -> None:
        super().__init__(timeout)
        if not _RUN_ID.fullmatch(run_id):
            raise InvalidArgumentError(
                f"run_id={run_id!r}: expected 1 to 200 letters, digits, dots, dashes and underscores, the first no dot or dash"
            )
        self._folder = Path(path).absolute() / run_id
        self._lock, self._log = self._open()

    @property
    def folder(self) -> Path:
        """The folder of this run."""
        return self._folder

    def describe(self) -> str:
        """Return the kind of the store, and the folder of this run, in words."""
        return f"file store {self._folder}"

    @override
    def get(self, key: str, timeout: timedelta | float | None = None) -> bytes:
        timeout_s, name = self._limit_s(timeout), as_key(key)
        found: list[bytes] = []

        def look() -> bool:
            value = self._values().get(name)
            found.extend([] if value is None else [value])
            return bool(found)

        if not poll(look, CancelScope(timeout_s)):
            raise key_timeout([name], self.describe(), timeout_s)
        return found[0]

    @override
    def wait(self, keys: Sequence[str], timeout: timedelta | float | None = None) -> None:
        timeout_s, names = self._limit_s(timeout), as_keys(keys)
        if not poll(lambda: not table.missing(names, self._values()), CancelScope(timeout_s)):
            raise key_timeout(table.missing(names, self._values()) or names, self.describe(), timeout_s)

    @override
    def check(self, keys: Sequence[str]) -> bool:
        return not table.missing(as_keys(keys), self._values())

    @override
    def num_keys(self) -> int:
        return len(self._values())

    def list_keys(self) -> list[str]:
        """Return all keys that have a value. Other kinds of stores lack this method."""
        return list(self._values())

    def change(self, key: str, change: table.Mutation[table.Answer]) -> table.Answer:
        """Apply `change` (see the module `table`) to the value of `key` in one atomic step, and return the answer of `change`.

        Other kinds of stores lack this method.
        """
        return self._apply(as_key(key), change)

    @override
    def _in_fork(self) -> None:
        self._log.in_fork()

    def _apply(self, key: str, change: table.Mutation[table.Answer]) -> table.Answer:
        with self._explained(), self._lock.held(self._timeout_s), self._log.lock:
            self._log.refresh()
            old = self._log.values.get(key)
            new, answer = change(old)
            # Write no record for an unchanged value, because the log never shrinks.
            if new != old:
                self._log.append(key, new)
            return answer

    def _values(self) -> dict[str, bytes]:
        with self._explained(), self._log.lock:
            self._log.refresh()
            # A copy, because other threads may change the log's table.
            return dict(self._log.values)

    def _open(self) -> tuple[LinkLock, Log]:
        try:
            folder = Folder(self._folder)
            lock = LinkLock(folder)
            # Try the lock once, so that problems appear now.
            with lock.held(self._timeout_s):
                return lock, Log(folder)
        except StoreError:
            # A StoreTimeout is an OSError, too, but has a message of its own already.
            raise
        except OSError as error:
            raise StoreUnavailableError(
                f"{self.describe()} cannot be opened: {error}; expected a folder that this process may write to, on a file "
                "system with hard links that all ranks share"
            ) from error

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except StoreError:
            # A StoreTimeout is an OSError, too, but has a message of its own already.
            raise
        except OSError as error:
            raise StoreError(
                f"{self.describe()} failed: {error}; was the folder removed while in use, or is the file system full?"
            ) from error
