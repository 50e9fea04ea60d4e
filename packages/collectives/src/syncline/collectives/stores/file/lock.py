"""LinkLock: mutual exclusion between processes, on any hosts, by the one name of a file.

Note [Locking by link]
----------------------
`flock` and `fcntl` locks are local to one host, without a word, on several cluster file systems in their usual
configuration (BeeGFS, Lustre mounted with `localflock`, NFS mounted with `nolock` or `local_lock`); `fcntl` locks moreover
do not exclude threads of one process. Making a hard link is atomic on the *server* of all of them: exactly one process
succeeds in giving the name `lock` to its own file. So::

    1. write a file `ticket-<random>` that says who we are
    2. link(ticket, "lock"), again and again until the deadline
    3. ours, if link said so, or if the ticket now has two names: an NFS client that lost the server's answer
       asks again, and is told that the name exists (open(2) recommends this check)
    4. release: unlink("lock"), but only if the ticket has two names; then unlink the ticket

The price: nobody releases the lock of a process that was killed between 2 and 4, some milliseconds. The others then fail at
their deadline, with an error that names the holder and the file to delete. Breaking the lock by age would let two in.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...contract.deadline import Deadline
from ...errors import StoreTimeout
from ..polling import poll


class LinkLock:
    """A lock called `lock` in `folder`; see Note [Locking by link]. It may be used by any thread or process.

    Args:
        folder: an existing folder on a file system with hard links.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._path = folder / "lock"

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        """Hold the lock for the length of a `with` statement.

        Raises:
            StoreTimeout: another process held it for all of `timeout_s` seconds.
            OSError: the folder cannot be written, or its file system has no hard links.
        """
        ticket = self._write_ticket()
        try:
            if not poll(lambda: self._take(ticket), Deadline(timeout_s)):
                raise StoreTimeout(
                    f"file store {self._folder}: its lock was not free within {timeout_s:g} s; it is held by {self._holder()}. "
                    f"If that process is no longer running, it was killed while it wrote: delete {self._path}"
                )
            yield
        finally:
            self._release(ticket)

    def _write_ticket(self) -> Path:
        ticket = self._folder / f"ticket-{secrets.token_hex(8)}"
        descriptor = os.open(ticket, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        return ticket

    def _take(self, ticket: Path) -> bool:
        try:
            os.link(ticket, self._path)
        except FileExistsError:
            return _has_two_names(ticket)
        return True

    def _release(self, ticket: Path) -> None:
        if _has_two_names(ticket):
            self._path.unlink(missing_ok=True)
        ticket.unlink(missing_ok=True)

    def _holder(self) -> str:
        try:
            return self._path.read_text() or "a process that left no name"
        except OSError:
            return "a process that has just released it"


def _has_two_names(ticket: Path) -> bool:
    try:
        return ticket.stat().st_nlink == 2
    except FileNotFoundError:  # somebody removed the folder while we were in it
        return False
