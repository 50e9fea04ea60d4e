"""Folder: a folder in which only this user can have put, changed or replaced files.

Note [A folder of our own]
--------------------------
Another user who can write into a folder could put a symbolic link there, with the name of a file that we are about to truncate,
or false records that we would read. So:

1. Folders and files that we make are for their owner only, including folders above (folders 0700, files 0600).
2. We do not follow symbolic links when we open the folder and its files, and we open the files relative to the opened folder.
   So neither the folder nor a file can be replaced between the check and the use. Links above the folder are allowed:
   `~/scratch` is often a link.
3. An opened folder or file must belong to this user, and nobody else may write it. We take the user's number from the owner of
   a file that we make, because NFS may map root, or all users, to another number.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...errors import StoreUnavailableError


class Folder:
    """A folder of this user; see Note [A folder of our own]. Any thread or process may use it.

    Args:
        path: the folder; it is made, for the owner only, if it does not exist.

    Raises:
        StoreUnavailableError: the folder is a symbolic link, belongs to another user, or others can write it.
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
        """A context with a descriptor of the folder, to be used as `dir_fd`."""
        descriptor = _open_here(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._check(self.path, descriptor)
            yield descriptor
        finally:
            os.close(descriptor)

    def open_file(self, folder: int, name: str, flags: int) -> int:
        """Open the file `name` with the `flags` of `os.open`, and return its descriptor. `folder` comes from `opened`."""
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
    """Open a file or folder, but no symbolic link. If `folder` is given, open the name of `path` inside this folder."""
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
