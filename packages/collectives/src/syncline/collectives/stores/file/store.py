"""FileStore: a table in a folder of a file system that all processes share."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

from typing_extensions import override

from ...engine.cancel_scope import CancelScope
from ...errors import InvalidArgumentError, StoreError, StoreUnavailableError
from .. import table
from ..store import as_key, as_keys, key_timeout, poll
from .folder import Folder
from .lock import LinkLock
from .log import Log

_RUN_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")


class FileStore(table.LockedStore):
    """A store in the folder `path/run_id`, which is made if it does not exist.

    It needs no daemon, port or lock server. Hard links and close-to-open consistency are enough, so NFS, Lustre, BeeGFS, GPFS
    and local file systems work. A change costs about twenty operations on the file system, including one sync. A read costs
    two opens and one read. A call that waits reads every 1 to 50 ms. The log grows with every change, so use the store only to
    let processes meet, not as a database.

    Data of an earlier run is in the folder of *that* run, and is never read. So `run_id` has no default: give an id that only
    this run has, such as the scheduler's job number and step number together. If you have no such id, use `file_rendezvous`.

    The store refuses a folder that other users can write. Only the owner can read and write the store's files.

    Args:
        path: a folder that all processes reach under this name.
        run_id: letters, digits, dot, dash and underscore; the same in all processes of a run, and new in every run.
        timeout: seconds or a timedelta; see `Store`. It also limits how long a change waits for the lock.

    Raises:
        StoreUnavailableError: the folder cannot be made or written, others can write it, it is a symbolic link, or its file
            system has no hard links.
        InvalidArgumentError: `run_id` cannot be the name of a folder.
    """

    def __init__(self, path: str | os.PathLike[str], run_id: str, timeout: timedelta | float | None = None) -> None:
        super().__init__(timeout)
        if not _RUN_ID.fullmatch(run_id):
            raise InvalidArgumentError(
                f"run_id={run_id!r}: expected 1 to 200 letters, digits, dots, dashes and underscores, the first no dot or dash"
            )
        self._folder = Path(path).absolute() / run_id
        self._reading = threading.Lock()  # because the threads of this handle share one Log
        self._lock, self._log = self._open()

    @property
    def folder(self) -> Path:
        """The folder of this run."""
        return self._folder

    def describe(self) -> str:
        """This store in words, with the folder of this run."""
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
        """All keys that have a value. Other kinds of stores do not have this method."""
        return list(self._values())

    def remove(self) -> None:
        """Delete the folder of this run. Call it in one process, when all processes are done with the store.

        Raises:
            StoreError: the folder cannot be deleted.
        """
        with self._explained():
            shutil.rmtree(self._folder)

    def _apply(self, key: str, change: table.Mutation[table.Answer]) -> table.Answer:
        with self._explained(), self._lock.held(self._timeout_s), self._reading:
            self._log.refresh()
            old = self._log.values.get(key)
            new, answer = change(old)
            # Write no record for an unchanged value, because the log never shrinks.
            if new != old:
                self._log.append(key, new)
            return answer

    def _values(self) -> dict[str, bytes]:
        """The current table. It is a copy, because other threads may change the log's table."""
        with self._explained(), self._reading:
            self._log.refresh()
            return dict(self._log.values)

    def _open(self) -> tuple[LinkLock, Log]:
        """Make the folder and its log, and try the lock once, so that problems appear now."""
        try:
            folder = Folder(self._folder)
            lock = LinkLock(folder)
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
