"""Parse the URL of an `init_method`: a folder, or the address of a store. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, urlsplit

from ..errors import InvalidArgumentError, LaunchError


@dataclass(frozen=True)
class Address:
    """The address where rank 0 serves a TCP store, from a URL. `secret_file` is the path in the URL, or None."""

    host: str
    port: int
    secret_file: str | None


def parse_folder(url: str) -> Path:
    """The folder that a file:// URL names. A pure function.

    Raises:
        InvalidArgumentError: the URL has anything but an absolute path; for example, it has a host.
    """
    parts = urlsplit(url)
    if parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise InvalidArgumentError(
            f"expected an init_method such as 'file:///shared/folder', with nothing after it, found {url!r}"
        )
    return Path(parts.path)


def parse_address(url: str) -> Address:
    """Host, port and secret file of a tcp:// URL. A pure function.

    Raises:
        InvalidArgumentError: the host or the port is missing, or the URL has anything else but a secret_file.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        # The port is not a number, or is too large. The error below says so.
        port = None
    if not parts.hostname or not port or parts.username is not None or parts.path or parts.fragment:
        raise InvalidArgumentError(
            f"expected an init_method such as 'tcp://host:29500' or 'tcp://host:29500?secret_file=PATH', found {url!r}"
        )
    return Address(parts.hostname, port, _secret_file(parts))


def address_by_environment(url: str, environ: Mapping[str, str]) -> Address:
    """The address in MASTER_ADDR and MASTER_PORT. A pure function.

    Raises:
        LaunchError: one of the variables is missing, or the port is not a number.
        InvalidArgumentError: the URL has anything else but a secret_file.
    """
    parts = urlsplit(url)
    if parts.netloc or parts.path or parts.fragment:
        raise InvalidArgumentError(f"expected the init_method 'env://' or 'env://?secret_file=PATH', found {url!r}")
    lacks = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if lacks:
        raise LaunchError(f"init_method 'env://' needs {' and '.join(lacks)} in the environment; set them, or use another one")
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    if not port.isdigit() or not 0 < int(port) < 65536:
        raise LaunchError(f"expected MASTER_PORT to be a port, 1 to 65535, found {port!r}")
    return Address(host, int(port), _secret_file(parts))


def _secret_file(parts: SplitResult) -> str | None:
    fields = parse_qsl(parts.query, keep_blank_values=True)
    if [name for name, _ in fields] not in ([], ["secret_file"]) or ("secret_file", "") in fields:
        raise InvalidArgumentError(
            f"expected nothing but secret_file=PATH after the question mark, found {parts.query!r} (rank and world_size are "
            "arguments of init_process_group)"
        )
    return fields[0][1] if fields else None
