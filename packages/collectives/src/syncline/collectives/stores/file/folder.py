"""A folder in which no other user can make, change or replace files, and a lock in this folder.

Note [A folder of our own]
--------------------------
An attacker who can write into a folder could put a symbolic link in the place of a file that we truncate. Or the attacker could
write false records. So:

1. The folders and files that we make, also parent folders, are for their owner only (folders 0700, files 0600).
2. We follow no symbolic link when we open the folder and its files, and we open the files relative to the opened folder. So
   nobody can replace the folder or a file between the check and the use. Links in the path above the folder are allowed.
3. An opened folder or file must belong to the user of this process, and nobody else may write it. NFS may map users to other
   ids, so we make a file and look at its owner to learn this user's id there.
"""

from __future__ import annotations

import errno
import os
import secrets
import socket
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...engine.cancel_scope import CancelScope
from ...errors import StoreTimeout, StoreUnavailableError
from ...health.liveness import ProcessIdentity, has_ended, own_identity
from ..store import poll


class Folder:
    """A folder that belongs to this user; see Note [A folder of our own]. Any thread or process may use the object.

    Args:
        path: the folder. If the folder does not exist, the constructor makes it, for the owner only.

    Raises:
        StoreUnavailableError: the folder is a symbolic link, belongs to another user, or other users can write it.
        OSError: the folder cannot be made or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._owner: int | None = None
        _make(path)
        self._owner = self._who_we_are()
        # Check the folder again, now that the owner is known.
        with self.opened():
            pass

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Return a context manager that opens the folder and gives its file descriptor, for use as `dir_fd`."""
        descriptor = _open_here(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._check(self.path, descriptor)
            yield descriptor
        finally:
            os.close(descriptor)

    def open_file(self, folder: int, name: str, flags: int) -> int:
        """Open the file `name`, and return the file's descriptor. `folder` is a descriptor of the folder, from `opened`.

        `flags` are those of `os.open`.
        """
        path = self.path / name
        descriptor = _open_here(path, flags | os.O_NONBLOCK, folder)  # opening a pipe would block without O_NONBLOCK
        try:
            self._check(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check(self, path: Path, descriptor: int) -> None:
        status = os.fstat(descriptor)
        # `_owner` is None while `_who_we_are` finds out the owner.
        if self._owner is not None and status.st_uid != self._owner:
            raise _refused(path, f"it belongs to user {status.st_uid}, and this process is user {self._owner}")
        if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise _refused(path, f"others can write it (mode {stat.S_IMODE(status.st_mode):03o}); run `chmod go-w {path}`")
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise _refused(path, "it is no regular file")

    def _who_we_are(self) -> int:
        name = f"ticket-{secrets.token_hex(8)}"
        with self.opened() as folder:
            descriptor = self.open_file(folder, name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                return os.fstat(descriptor).st_uid
            finally:
                os.close(descriptor)
                os.unlink(name, dir_fd=folder)


def _make(path: Path) -> None:
    # `mkdir(parents=True)` would make the folders above with the usual mode and not with 0700.
    if not path.parent.is_dir():
        _make(path.parent)
    path.mkdir(mode=0o700, exist_ok=True)


def _open_here(path: Path, flags: int, folder: int | None = None) -> int:
    try:
        return os.open(path if folder is None else path.name, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)
    except OSError as error:
        # For a link, the flags decide which of the two errors comes. Check for a link, because ENOTDIR has other causes, too.
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and path.is_symlink():
            raise _refused(path, "it is a symbolic link") from error
        raise


def _refused(path: Path, reason: str) -> StoreUnavailableError:
    return StoreUnavailableError(
        f"file store: {path} is not used: {reason}; expected a folder and files of this user that nobody else can write. Give "
        "another folder, or remove this one if no job uses it"
    )


_LOCK = "lock"
_LONGEST_NAME = 2000  # read at most this many characters of a ticket; a ticket contains the host name three times


class LinkLock:
    """A lock between processes on any hosts. The lock is a hard link with the name `lock` in `folder`.

    Note [Locking by link]
    ~~~~~~~~~~~~~~~~~~~~~~
    On several cluster file systems, `flock` and `fcntl` locks silently work on one host only (BeeGFS, Lustre mounted with
    `localflock`, NFS mounted with `nolock` or `local_lock`). Making a hard link is atomic on the *server* of all these file
    systems: exactly one process can give the name `lock` to its own file. So::

        1. write a file `ticket-<random>` that says who we are
        2. link(ticket, "lock"), again and again until the time limit
        3. the lock is ours if link succeeds, or if the ticket now has two names (open(2) recommends this check). An NFS client
           that lost the server's answer asks again: then link fails, although the lock is ours
        4. release: unlink("lock"), but only if the ticket has two names; then unlink the ticket

    A process that is killed between 2 and 4 leaves the lock behind. A process on the same machine can find out that the holder
    has ended (`ProcessIdentity`), and removes the lock. But only the process that first creates the file `break-<the holder's
    ticket>` may remove this lock. So nobody removes the lock of the next holder. The `break` file is never removed. A process
    on another machine fails at its time limit, with an error that names the holder and the file to delete.

    Args:
        folder: a folder on a file system with hard links.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    @contextmanager
    def held(self, timeout_s: float) -> Iterator[None]:
        """Return a context manager that holds the lock.

        Raises:
            StoreTimeout: the lock was not free within `timeout_s` seconds.
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
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        mine = own_identity()
        identity = "" if mine is None else mine.to_text()
        descriptor = self._folder.open_file(folder, ticket, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(f"process {os.getpid()} on {socket.gethostname()} since {now}\n{ticket}\n{identity}\n")
        except BaseException:  # for example, the file system is full: nobody else would remove the ticket
            with suppress(OSError):
                os.unlink(ticket, dir_fd=folder)
            raise
        return ticket

    def _take_over(self, folder: int, ticket: str) -> bool:
        try:
            _, theirs, process, *_ = [*self._read_lock(folder).split("\n"), "", ""]
            # Take the lock away only from a holder that has certainly ended. No holder writes a lock without a ticket.
            if not theirs.startswith("ticket-") or not has_ended(ProcessIdentity.parse(process)):
                return False
            os.close(self._folder.open_file(folder, f"break-{theirs}", os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        except OSError:
            return False  # the lock was released meanwhile, or another process removes the lock
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
