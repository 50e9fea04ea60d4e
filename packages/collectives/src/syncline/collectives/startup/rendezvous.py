"""Make a store that all ranks of a job share, for a backend whose library cannot connect the ranks."""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.parse import SplitResult, parse_qsl, urlsplit

import torch.distributed as dist

from ..api.object_exchange import exchange_objects
from ..errors import InvalidArgumentError, LaunchError, StoreError, StoreTimeout, StoreUnavailableError
from ..forks import fork_count, in_forks
from ..group import ProcessGroup
from ..stores import AsTorchStore, FileStore, Store, TCPStore, TCPStoreServer, file_rendezvous, join_latest_run, new_secret
from ..stores.file import leave_run
from ..stores.tcp.sockets import require_pyzmq
from .addresses import chosen_interfaces
from .backend import ConnectRequest
from .launch import check_init_method
from .meeting import address_by_group
from .registry import load_backend
from .user_secret import is_loopback, user_secret

SECRET_VARIABLE = "SYNCLINE_SECRET"

logger = logging.getLogger("syncline.collectives")

_close_at_exit: list[Callable[[], None]] = []


def rendezvous(request: ConnectRequest) -> tuple[dist.Store, int, int]:
    """Return a store that all ranks share, this process's rank, and the number of ranks."""
    return meeting_place(request)[:3]


def meeting_place(request: ConnectRequest) -> tuple[dist.Store, int, int, str | None]:
    """Return the results of `rendezvous`, and the address at which all ranks reach this rank (None if it is not known yet)."""
    rank, size = _place(request)
    store, address = _shared_store(request, rank, size)
    return store, rank, size, address


def keys_of_connection(store: dist.Store, backend: str, rank: int | None) -> dist.Store:
    """Return the part of a shared store in which the ranks of one connection meet.

    A store may serve several connections, one after the other. Examples are the store of torchrun's agent, the server of rank
    0, and a store that the program passes twice. Each rank counts its connections in the store, and the count is the
    connection's number. All ranks connect in a store the same number of times, so all ranks get the same number.

    When torchrun starts the ranks again, it keeps its store, and some of the old ranks may not have connected. So the numbers
    begin again with each attempt.

    Args:
        store: the shared store.
        backend: the backend's name; each backend counts its own connections.
        rank: this rank; None for a process that joins the latest connection later.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    attempt_store = dist.PrefixStore(f"syncline/{backend}/{attempt}", store)
    # Adding 0 reads the number. If rank 0 has not come yet, it will make the first connection.
    number = max(attempt_store.add("connections/0", 0), 1) if rank is None else attempt_store.add(f"connections/{rank}", 1)
    return dist.PrefixStore(str(number), attempt_store)


def as_torch_store(store: Store | dist.Store) -> dist.Store:
    """Return the user's store as a store of torch."""
    return AsTorchStore(store) if isinstance(store, Store) else store


def _shared_store(request: ConnectRequest, rank: int, size: int) -> tuple[dist.Store, str | None]:
    # The caller's own choice comes before what the launcher offers.
    if request.store is not None:
        return as_torch_store(request.store), None
    if request.init_method is not None:
        return _at_url(request.init_method, rank, size, request)
    # A single rank needs no store that other processes can reach.
    if size == 1:
        return dist.HashStore(), None
    lack = None
    # Try MPI before MASTER_ADDR, because MPI needs no free port and no secret from the user.
    if request.launch is not None and request.launch.is_mpi:
        lack = load_backend("mpi").missing()
        if lack is None:
            return _over_mpi(request)
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return _at_url("env://", rank, size, request)
    ways = (
        "init_method='file:///shared/folder' or 'tcp://host:port?secret_file=PATH', a store, MASTER_ADDR and MASTER_PORT (as "
        "torchrun sets them), or a launch by MPI"
    )
    # An MPI launcher started this job, so repairing MPI may be the easiest remedy. The message begins with MPI's problem.
    if lack is not None:
        raise LaunchError(f"{lack}\nBackend 'gloo' needs MPI here, or another way for its {size} ranks to meet: {ways}")
    raise LaunchError(
        f"backend 'gloo' has {size} ranks and no way for them to meet: pass init_method='file:///shared/folder', or set "
        f"MASTER_ADDR and MASTER_PORT\nThe ways to meet: {ways}"
    )


def _at_url(url: str, rank: int, size: int, request: ConnectRequest) -> tuple[dist.Store, str | None]:
    is_one_host = size == 1 or (request.launch is not None and request.launch.local_world_size == size)
    store = store_at(url, rank, size, request.timeout_s, is_one_host=is_one_host)
    return store, None if size == 1 else loopback_host(url)


def _place(request: ConnectRequest) -> tuple[int, int]:
    launch = request.launch
    if launch is None:
        # Nothing says that there are other processes.
        if request.world_size is None:
            if request.rank not in (None, 0):
                raise LaunchError(
                    f"rank={request.rank} was given without a world_size, and nothing launched this process; pass both"
                )
            return 0, 1
        if request.rank is None:
            raise LaunchError(f"world_size={request.world_size} was given without a rank, and nothing launched this process")
        if request.rank >= request.world_size:
            raise LaunchError(f"expected a rank in 0..{request.world_size - 1} for that world_size, found {request.rank}")
        return request.rank, request.world_size
    if launch.world_size is None and request.world_size is None:
        raise LaunchError(f"{launch.launcher} does not say how many processes there are; give world_size, or use backend 'mpi'")
    for what, asked, told in (
        ("world_size", request.world_size, launch.world_size),
        ("rank", request.rank, launch.rank),
    ):
        if asked is not None and told is not None and asked != told:
            raise LaunchError(
                f"{what}={asked} was asked for, but {launch.launcher} says {told}; leave {what} out, or launch differently"
            )
    return launch.rank, launch.world_size or request.world_size or 1


def _over_mpi(request: ConnectRequest) -> tuple[dist.Store, str]:
    mpi = load_backend("mpi").connect(request)
    try:
        address = address_by_group(mpi, request.interfaces, request.timeout_s)
        return tcp_store_of_rank_0(mpi, request.timeout_s, address), address
    finally:
        # The group was needed only until all ranks have the address of the store. From here on the ranks use the store.
        mpi.close()


def store_at(
    init_method: str,
    rank: int,
    size: int,
    timeout_s: float,
    environ: Mapping[str, str] = os.environ,
    *,
    is_one_host: bool = False,
) -> dist.Store:
    """Return the store for a URL. All ranks that call this function with the same URL share the store.

    `is_one_host` says whether all ranks are known to be on this host. If so, there is no warning about a loopback address.

    ``file:///folder``
        Ranks meet in a folder that all of them can reach. The folder may contain files of earlier runs. If two jobs start in
        one folder at the same time, their ranks may mix.
    ``tcp://host:port``
        Rank 0 serves a store on this address of its machine. If the host is a name that means a loopback address on this
        machine, rank 0 logs a warning. All ranks must have the same secret, from the file named by ``?secret_file=PATH`` or
        from the variable SYNCLINE_SECRET. On the loopback address, neither is needed: the ranks share the secret of their
        user; see `user_secret`.
    ``env://``
        Under torchrun, ranks use the store of torchrun's agent. Otherwise, the URL means ``tcp://$MASTER_ADDR:$MASTER_PORT``.

    Raises:
        InvalidArgumentError: the URL has none of these forms.
        LaunchError: there is no secret, there are two secrets, or other users could read the secret file. Or MASTER_ADDR or
            MASTER_PORT is not set for ``env://``.
        StoreError: the ranks did not find each other; see `TCPStore`, `TCPStoreServer`, `FileStore`.
    """
    scheme = check_init_method(init_method)
    if scheme == "file":
        logger.debug("rank %d of %d: rendezvous in the folder of %s", rank, size, init_method)
        return _left_at_exit(file_rendezvous(parse_folder(init_method), rank, size, timeout=timeout_s))
    if scheme == "tcp":
        return _over_tcp(parse_address(init_method), rank, timeout_s, environ, is_one_host=is_one_host)
    # Use torch's rendezvous only under torchrun, whose agent has opened a TCPStore of torch already. In other cases, use no
    # store of torch: its TCPStore listens on all addresses without a secret, and its FileStore reads data of earlier runs.
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        logger.debug("rank %d of %d: rendezvous in the store of torchrun's agent", rank, size)
        store: dist.Store = next(dist.rendezvous("env://", rank, size, timeout=timedelta(seconds=timeout_s)))[0]
        # When nodes join or leave, the agent keeps its store, and does not count a restart. The new ranks must not meet among
        # the keys of the old ones.
        return dist.PrefixStore(f"syncline/of {size}", store)
    return _over_tcp(address_by_environment(init_method, environ), rank, timeout_s, environ, is_one_host=is_one_host)


def store_of_running_job(init_method: str, timeout_s: float) -> dist.Store:
    """Return the store of a running job, for a process that joins the job later. `init_method` names the job's folder.

    Raises:
        InvalidArgumentError: `init_method` does not name a folder.
        StoreError: no job has met in the folder, or the latest job has ended.
    """
    return _left_at_exit(join_latest_run(parse_folder(init_method), timeout=timeout_s))


def _left_at_exit(store: FileStore) -> dist.Store:
    """Return `store` as a store of torch. When the last process of the run exits, it removes the run's folder."""
    # At exit and not earlier, because the ranks of a new subgroup may meet in this folder until then.
    pid = os.getpid()
    _close_at_exit.append(lambda: leave_run(store) if os.getpid() == pid else None)  # a forked child has not joined the run
    return AsTorchStore(store)


def loopback_host(init_method: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the host in a URL if this host is a loopback address; else None."""
    scheme = check_init_method(init_method)
    if scheme == "tcp":
        host = parse_address(init_method).host
    elif scheme == "env" and environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        host = address_by_environment(init_method, environ).host
    else:
        return None
    return host if is_loopback(host) else None


def find_secret(secret_file: str | None, environ: Mapping[str, str], host: str = "") -> str:
    """Return the secret that only the ranks of the job know: from SYNCLINE_SECRET in `environ`, or from the file `secret_file`.

    The ranks meet at `host`. If `host` is a loopback address, and there is no other secret, the result is the secret of this
    user; see `user_secret`.

    Raises:
        LaunchError: there is no secret, there are two secrets, or other users could read the secret file.
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


def _over_tcp(address: Address, rank: int, timeout_s: float, environ: Mapping[str, str], *, is_one_host: bool) -> dist.Store:
    secret = find_secret(address.secret_file, environ, address.host)
    logger.debug("rank %d: rendezvous in the TCP store at %s:%d", rank, address.host, address.port)
    # Rank 0 is the server, and a client like all others.
    if rank == 0:
        server = _serve(address.host, address.port, secret, fork_count())
        # Debian gives a host's own name the address 127.0.1.1. If all ranks are on this host, they reach this address.
        if not is_one_host and is_loopback(server.host) and not is_loopback(address.host):
            logger.warning(
                "rank 0: the name %r leads to %s on host %s, so ranks on other hosts cannot reach rank 0. If there are any, "
                "give all ranks an IP address of this host (in MASTER_ADDR or the init_method)\n"
                "`hostname -I` lists the addresses. Or correct /etc/hosts on this host. Ranks on this host do reach rank 0",
                address.host,
                server.host,
                socket.gethostname(),
            )
    return _client(address.host, address.port, secret, timeout_s)


def tcp_store_of_rank_0(group: ProcessGroup, timeout_s: float, address: str | None = None) -> dist.Store:
    """Start a TCP store on rank 0 of `group`, and connect all ranks to this store. All ranks of the group call this function.

    Each call makes a new, empty store. All these stores of rank 0 have the same server, which listens on a port that the system
    chooses. `address` is the address at which the other ranks reach this rank. If it is None, the function calls
    `address_by_group`. `timeout_s` is the store's time limit in seconds.

    Raises:
        LaunchError: `address` is None, and `address_by_group` found no address. All ranks raise this error.
        StoreUnavailableError: rank 0 cannot serve the store, or a rank lacks pyzmq. All ranks raise this error.
    """
    address = address or address_by_group(group, chosen_interfaces(os.environ), timeout_s)
    told: tuple[str, int, str, int] | str | None = None
    try:
        require_pyzmq()
        if group.rank == 0:
            secret = _secret_of_this_process()
            server = _serve(address, 0, secret, fork_count())
            told = (server.host, server.port, secret, next(_tables))
    except Exception as error:
        # Send the error, so that the other ranks fail, too, and do not wait for this rank.
        exchange_objects(str(error), group=group)
        raise
    said = exchange_objects(told, group=group)
    for rank, problem in enumerate(said):
        # If a rank sends a text, it is the rank's error.
        if isinstance(problem, str):
            raise StoreUnavailableError(
                f"rank {group.rank}: rank {rank} cannot use the TCP store in which the ranks meet: look at its error\n"
                f"rank {rank}: {problem}"
            )
    host, port, secret, table = said[0]
    logger.debug("rank %d: rendezvous in the TCP store of rank 0 at %s:%d", group.rank, host, port)
    # The server serves all such stores of rank 0. The stores may belong to groups of different ranks, so each has its own keys.
    return dist.PrefixStore(f"table {table}", _client(host, port, secret, timeout_s))


_tables = itertools.count()


@functools.cache
def _secret_of_this_process() -> str:
    return new_secret()


@functools.cache
def _serve(host: str, port: int, secret: str, forks: int) -> TCPStoreServer:  # noqa: ARG001 - only a key of the cache
    """Start a server that lives until this process exits, because new subgroups may need the store at any time.

    `forks` is `fork_count()`, so a forked child starts servers of its own. The threads of its parent's servers do not run in
    the child. The cache keeps those servers in the child for ever, because not even their destructors may run there.
    """
    server = TCPStoreServer(host, port, secret=secret)
    _close_at_exit.append(server.close)
    return server


_clients: dict[tuple[str, int, str, float], AsTorchStore] = {}


def _client(host: str, port: int, secret: str, timeout_s: float) -> dist.Store:
    """Return a store's client, which lives until this process exits. The same arguments give the same client."""
    place = (host, port, secret, timeout_s)
    known = _clients.get(place)
    if known is not None:
        try:
            known.num_keys()
            return known
        except StoreTimeout:
            # The whole time limit is over.
            raise
        except StoreError as error:
            # The server has ended. A new server may listen at this address now, or soon. The code below connects to that one.
            logger.debug("the server at %s:%d is not there any more: %s", host, port, error)
    store = TCPStore(host, port, secret=secret, timeout=timeout_s)
    _close_at_exit.append(store.close)
    _clients[place] = AsTorchStore(store)
    return _clients[place]


# A forked child must not close the stores of its parent, and starts stores of its own.
in_forks(_close_at_exit.clear)
in_forks(_clients.clear)
in_forks(_secret_of_this_process.cache_clear)


@atexit.register
def _close_all() -> None:
    # Close the newest first, so that a client closes before the server in the same process.
    while _close_at_exit:
        _close_at_exit.pop()()


@dataclass(frozen=True)
class Address:
    """The host and the port where rank 0 serves a TCP store, and the path of the secret file (or None)."""

    host: str
    port: int
    secret_file: str | None


def parse_folder(url: str) -> Path:
    """Return the folder that a file:// URL names.

    Raises:
        InvalidArgumentError: the URL has no absolute path, or has other parts than a path, such as a host or a query.
    """
    parts = urlsplit(url)
    if parts.netloc or not parts.path.startswith("/") or parts.query or parts.fragment:
        raise InvalidArgumentError(
            f"expected an init_method such as 'file:///shared/folder', with nothing after it, found {url!r}"
        )
    return Path(parts.path)


def parse_address(url: str) -> Address:
    """Return the host, the port and the secret file of a tcp:// URL.

    Raises:
        InvalidArgumentError: the host or the port is missing, or the URL has more parts than host, port and secret_file.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        # The port is not a number, or is too large. The code below raises the error.
        port = None
    if not parts.hostname or not port or parts.username is not None or parts.path or parts.fragment:
        raise InvalidArgumentError(
            f"expected an init_method such as 'tcp://host:29500' or 'tcp://host:29500?secret_file=PATH', found {url!r}"
        )
    return Address(parts.hostname, port, _secret_file(parts))


def address_by_environment(url: str, environ: Mapping[str, str]) -> Address:
    """Return the host and port in MASTER_ADDR and MASTER_PORT, and the secret file of an env:// URL.

    Raises:
        LaunchError: one of the variables is missing, or the port is not a number from 1 to 65535.
        InvalidArgumentError: the URL has other parts than a secret_file.
    """
    parts = urlsplit(url)
    if parts.netloc or parts.path or parts.fragment:
        raise InvalidArgumentError(f"expected the init_method 'env://' or 'env://?secret_file=PATH', found {url!r}")
    lacks = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not environ.get(name)]
    if lacks:
        raise LaunchError(f"init_method 'env://' needs {' and '.join(lacks)} in the environment; set them, or use another one")
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    if not port.isdecimal() or not 0 < int(port) < 65536:
        raise LaunchError(f"expected MASTER_PORT to be a port, 1 to 65535, found {port!r}")
    return Address(host, int(port), _secret_file(parts))


def _secret_file(parts: SplitResult) -> str | None:
    # In forms a plus means a space, but in a path it means itself.
    fields = parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True)
    if [name for name, _ in fields] not in ([], ["secret_file"]) or ("secret_file", "") in fields:
        raise InvalidArgumentError(
            f"expected nothing but secret_file=PATH after the question mark, found {parts.query!r} (rank and world_size are "
            "arguments of init_process_group)"
        )
    return fields[0][1] if fields else None
