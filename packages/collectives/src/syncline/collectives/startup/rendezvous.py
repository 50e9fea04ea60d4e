"""Rendezvous: a store that all ranks of a job share, for a backend whose library does not connect them by itself.

Nothing here listens on more than one address or talks to a stranger. torch's own rendezvous does both (its TCPStore listens on
all addresses and asks for no credential, its FileStore reads what an earlier run has left), so it is used only under torchrun,
whose agent has opened its store already.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ..contract.object_exchange import exchange_objects
from ..contract.process_group import ProcessGroup
from ..errors import LaunchError
from ..forks import in_forks
from ..stores import AsTorchStore, FileStore, TCPStore, TCPStoreServer, file_rendezvous, join_latest_run, new_secret
from ..stores.file import leave_run
from ..stores.tcp.secret import require_pyzmq
from .addresses import chosen_interfaces
from .init_method import Address, address_by_environment, parse_address, parse_folder
from .launch import check_init_method
from .meeting import address_by_group
from .user_secret import is_loopback, user_secret

SECRET_VARIABLE = "SYNCLINE_SECRET"

logger = logging.getLogger("syncline.collectives")

_close_at_exit: list[Callable[[], None]] = []


def store_at(init_method: str, rank: int, size: int, timeout_s: float, environ: Mapping[str, str] = os.environ) -> dist.Store:
    """The store of all ranks that call it with the same URL.

    ``file:///folder``
        Ranks meet in a folder that all of them reach; see `stores.file_rendezvous`. It may hold the remains of earlier runs.
    ``tcp://host:port``
        Rank 0 serves a store on that address of its machine. All ranks prove the secret that they find in the file named by
        ``?secret_file=PATH`` or in the variable SYNCLINE_SECRET. On the loopback address they need none of these: there they
        share the one of their user, see `user_secret`.
    ``env://``
        Under torchrun the store of its agent; else the same as tcp:// with MASTER_ADDR and MASTER_PORT.

    Raises:
        InvalidArgumentError: the URL is not of one of these forms.
        LaunchError: there is no secret, or more than one, or others could read it.
        StoreError: the ranks did not find one another; see `TCPStore`, `TCPStoreServer`, `FileStore`.
    """
    scheme = check_init_method(init_method)
    if scheme == "file":
        logger.debug("rank %d of %d: rendezvous in the folder of %s", rank, size, init_method)
        return _left_at_exit(file_rendezvous(parse_folder(init_method), rank, size, timeout=timeout_s))
    if scheme == "tcp":
        return _over_tcp(parse_address(init_method), rank, timeout_s, environ)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        logger.debug("rank %d of %d: rendezvous in the store of torchrun's agent", rank, size)
        store: dist.Store = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout_s)))[0]
        return store
    return _over_tcp(address_by_environment(init_method, environ), rank, timeout_s, environ)


def store_of_running_job(init_method: str, timeout_s: float) -> dist.Store:
    """The store in which the ranks of a job met, for a process that comes later; `init_method` names a folder.

    Raises:
        InvalidArgumentError: it names none.
        StoreError: no job has met there; see `stores.join_latest_run`.
    """
    return _left_at_exit(join_latest_run(parse_folder(init_method), timeout=timeout_s))


def _left_at_exit(store: FileStore) -> dist.Store:
    """Subsets of a group's ranks meet there, too, and survivors; so it is needed until the process ends."""
    pid = os.getpid()
    _close_at_exit.append(lambda: leave_run(store) if os.getpid() == pid else None)  # a fork that exits has not used it
    return AsTorchStore(store)


def loopback_host(init_method: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The host on whose loopback address the ranks meet by that URL, or None if they meet in any other way."""
    scheme = check_init_method(init_method)
    if scheme == "tcp":
        host = parse_address(init_method).host
    elif scheme == "env" and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        host = address_by_environment(init_method, environ).host
    else:
        return None
    return host if is_loopback(host) else None


def find_secret(secret_file: str | None, environ: Mapping[str, str], host: str = "") -> str:
    """What all ranks of the job know and nobody else does.

    Args:
        secret_file: where it is, or None.
        environ: the environment variables.
        host: where the ranks meet.

    Raises:
        LaunchError: it is nowhere, in two places, or where others could read it.
    """
    value = environ.get(SECRET_VARIABLE)
    if value and secret_file is not None:
        raise LaunchError(f"found a secret in {SECRET_VARIABLE} and one in secret_file={secret_file}; leave one of the two out")
    if value:
        return value
    if secret_file is not None:
        return _read_secret(Path(secret_file))
    if is_loopback(host):
        return user_secret()
    raise LaunchError(
        f"ranks that meet over TCP must share a secret, or any process could join them: found neither {SECRET_VARIABLE} nor a "
        "secret_file. Put the output of `python -c 'import secrets; print(secrets.token_hex(32))'` into a file that only you "
        f"may read and add ?secret_file=PATH to the init_method, or export it as {SECRET_VARIABLE} to every rank; or meet in "
        "a folder (init_method 'file:///shared/folder'), which needs none"
    )


def _read_secret(path: Path) -> str:
    try:
        mode, text = path.stat().st_mode, path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read the secret_file {path}: {error}; every rank needs it") from error
    if mode & 0o077:
        raise LaunchError(f"the secret_file {path} is open to other users (mode {mode & 0o777:03o}); run `chmod 600 {path}`")
    return text


def _over_tcp(address: Address, rank: int, timeout_s: float, environ: Mapping[str, str]) -> dist.Store:
    secret = find_secret(address.secret_file, environ, address.host)
    logger.debug("rank %d: rendezvous in the TCP store at %s:%d", rank, address.host, address.port)
    if rank == 0:
        _serve(address.host, address.port, secret)
    return _client(address.host, address.port, secret, timeout_s)


def tcp_store_of_rank_0(group: ProcessGroup, timeout_s: float, address: str | None = None) -> dist.Store:
    """A store on rank 0, on one address and a port that the system chose; the group tells the others where, and its secret.

    Args:
        group: of the ranks.
        timeout_s: the store's time limit in seconds.
        address: at which each rank is reached, if that is known; see `address_by_group`.
    """
    require_pyzmq()  # before anybody waits for rank 0
    address = address or address_by_group(group, chosen_interfaces(os.environ), timeout_s)
    told = None
    if group.rank == 0:
        secret = new_secret()
        server = _serve(address, 0, secret)
        told = (server.host, server.port, secret)
    host, port, secret = exchange_objects(told, group=group)[0]
    logger.debug("rank %d: rendezvous in the TCP store of rank 0 at %s:%d", group.rank, host, port)
    return _client(host, port, secret, timeout_s)


@functools.cache
def _serve(host: str, port: int, secret: str) -> TCPStoreServer:
    """A server until this process exits: as long as a group lives, it may connect subsets of its ranks.

    The second group that meets at an address (after the first was destroyed) finds the server of the first.
    """
    server = TCPStoreServer(host, port, secret=secret)
    _close_at_exit.append(server.close)
    return server


def _client(host: str, port: int, secret: str, timeout_s: float) -> dist.Store:
    store = TCPStore(host, port, secret=secret, timeout=timeout_s)
    _close_at_exit.append(store.close)
    return AsTorchStore(store)


in_forks(_close_at_exit.clear)


@atexit.register
def _close_all() -> None:
    while _close_at_exit:
        _close_at_exit.pop()()
