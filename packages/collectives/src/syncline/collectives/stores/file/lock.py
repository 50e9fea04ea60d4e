"""LinkLock: mutual exclusion between processes on any hosts, by a hard link.

Note [Locking by link]
----------------------
On several cluster file systems in their usual configuration (BeeGFS, Lustre mounted with `localflock`, NFS mounted with
`nolock` or `local_lock`), `flock` and `fcntl` locks silently work on one host only. `fcntl` locks also do not exclude threads
of one process. Making a hard link is atomic on the *server* of all these file systems: exactly one process can give the name
`lock` to its own file. So::

    1. write a file `ticket-<random>` that says who we are
    2. link(ticket, "lock"), again and again until the time limit
    3. the lock is ours if link succeeds, or if the ticket now has two names: an NFS client that lost the server's answer
       asks again, and is told that the name exists (open(2) recommends this check)
    4. release: unlink("lock"), but only if the ticket has two names; then unlink the ticket

A process that is killed between 2 and 4 (some milliseconds) leaves the lock behind. A process on the same machine can find out
that the holder has ended (`ProcessIdentity`), and takes the lock away. Only one process may do so, and this process must
not take away the lock of the next holder. So it must first create the file `break-<the holder's ticket>`, which is never
removed. Processes on other machines cannot find out that the holder has ended. They fail at their time limit, with an error
that names the holder and the file to delete. If we broke the lock by its age, two processes could hold it.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ...engine.cancel_scope import CancelScope
from ...errors import StoreTimeout
from ...health.liveness import ProcessIdentity, has_ended, own_identity
from ..store import poll
from .folder import Folder

_LOCK = "lock"
_LONGEST_NAME = 2000  # no more characters of a ticket are read; a ticket contains the host name three times


class LinkLock:
    """A lock called `lock` in `folder`; see Note [Locking by link]. Any thread or process may use it.

    Args:
        folder: a folder on a file system with hard links.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        """A context that holds the lock.

        Raises:
            StoreTimeout: other processes held the lock for all of `timeout_s` seconds.
            OSError: the folder cannot be written, or its file system has no hard links.
        """
        with self._folder.opened() as folder:
            ticket = self._write_ticket(folder)
            try:
                if not poll(lambda: _take(folder, ticket) or self._take_over(folder, ticket), CancelScope(timeout_s)):
                    raise self._not_free(timeout_s, self._holder(folder))
                yield
            finally:
                _release(folder, ticket)

    def _write_ticket(self, folder: int) -> str:
        ticket = f"ticket-{secrets.token_hex(8)}"
        with os.fdopen(self._folder.open_file(folder, ticket, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            mine = own_identity()
            identity = "" if mine is None else mine.to_text()
            file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}\n{ticket}\n{identity}\n")
        return ticket

    def _take_over(self, folder: int, ticket: str) -> bool:
        """Remove the lock of a holder that has certainly ended, and try to take it. Returns whether this process has it now."""
        try:
            _, theirs, process, *_ = [*self._read_lock(folder).split("\n"), "", ""]
            # Only a holder that has certainly ended loses the lock. A file without a ticket was not written by a holder.
            if not theirs.startswith("ticket-") or not has_ended(ProcessIdentity.parse(process)):
                return False
            os.close(self._folder.open_file(folder, f"break-{theirs}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except OSError:
            return False  # the lock was released meanwhile, or another process takes it away
        os.unlink(_LOCK, dir_fd=folder)
        return _take(folder, ticket)

    def _holder(self, folder: int) -> str:
        try:
            return self._read_lock(folder).partition("\n")[0] or "a process that left no name"
        except OSError:
            return "a process that has just released it"

    def _read_lock(self, folder: int) -> str:
        with os.fdopen(self._folder.open_file(folder, _LOCK, os.O_RDONLY), errors="replace") as file:
            return file.read(_LONGEST_NAME)

    def _not_free(self, timeout_s: float, holder: str) -> StoreTimeout:
        return StoreTimeout(
            f"file store {self._folder.path}: its lock was not free within {timeout_s:g} s (timeout); it is held by {holder}. "
            f"If that process is no longer running, it was killed while it wrote: delete {self._folder.path / _LOCK}"
        )


def _take(folder: int, ticket: str) -> bool:
    # If the server says that the name exists, the name may be our own link: see point 3 of the note.
    try:
        os.link(ticket, _LOCK, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
    except FileExistsError:
        return _has_two_names(folder, ticket)
    return True


def _release(folder: int, ticket: str) -> None:
    if _has_two_names(folder, ticket):
        os.unlink(_LOCK, dir_fd=folder)
    with suppress(FileNotFoundError):
        os.unlink(ticket, dir_fd=folder)


def _has_two_names(folder: int, ticket: str) -> bool:
    try:
        return os.stat(ticket, dir_fd=folder, follow_symlinks=False).st_nlink == 2
    except FileNotFoundError:  # the folder was removed meanwhile
        return False
