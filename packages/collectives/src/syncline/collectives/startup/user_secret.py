"""A secret that the processes of one user on one machine share, in a file that nobody else can read.

Ranks that meet on the loopback address need the secret, because every user of this machine can reach this address.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..errors import LaunchError


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is a loopback address, which other machines cannot reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def user_secret(folder: Path | None = None) -> str:
    """Return the secret of this user on this machine. The first process that calls this function makes the secret.

    `folder` is as in `private_folder`.

    Raises:
        LaunchError: the folder or the file belongs to another user, or other users can read it.
    """
    path = Path("secret")
    try:
        path = private_folder(folder) / path
        if not path.exists():
            _make(path)
        # Check an older file, too: another user may have put it there.
        _check_private(path, stat.S_ISREG)
        return path.read_text()
    except OSError as error:
        raise LaunchError(
            "cannot write or read the secret file for ranks on this machine: set TMPDIR to a folder that this user can write, "
            f"or give every rank the same SYNCLINE_SECRET\nThe system said of {path}: {error}"
        ) from error


def private_folder(folder: Path | None = None) -> Path:
    """Return a folder on this machine that only this user can use. The function makes the folder if it does not exist.

    By default, this is a folder of this user in the folder for temporary files.

    Raises:
        LaunchError: the folder belongs to another user, or other users can use it.
        OSError: the folder cannot be made.
    """
    folder = folder or _default_folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    _check_private(folder, stat.S_ISDIR)
    return folder


def _default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"syncline-{os.getuid()}"


_REMEDY = "Remove it, or give every rank a secret of your own: ?secret_file=PATH in the init_method, or SYNCLINE_SECRET"


def _make(path: Path) -> None:
    from ..stores import new_secret  # here, because `stores` loads torch, and `syncline run` must not load torch

    # `path` appears only when the secret is complete, so no process can read half a secret.
    aside = path.with_name(f"secret-{secrets.token_hex(8)}")
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(new_secret())
    try:
        os.link(aside, path)
    except FileExistsError:
        # Another process was faster, and its secret counts.
        pass
    finally:
        aside.unlink()


def _check_private(path: Path, is_kind: Callable[[int], bool]) -> None:
    found = path.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077 or not is_kind(found.st_mode):
        raise LaunchError(
            f"expected {path} to belong to this user and to be open to nobody else, found owner {found.st_uid} and mode "
            f"{stat.filemode(found.st_mode)}. {_REMEDY}"
        )
