"""The default group of this process. Also `NonMember`, a placeholder for a group that this rank is not in."""

from __future__ import annotations

import logging
import multiprocessing
import os
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from ..engine.cancel_scope import seconds
from ..errors import BackendUnavailableError, InvalidArgumentError, MisuseError, NotInitializedError, UnknownBackendError
from ..forks import in_forks
from ..group import ProcessGroup
from ..health.report import latest_reporter
from ..startup.backend import Backend, ConnectRequest, apply_to_process
from ..startup.launch import check_init_method, launch_by, several_torchrun_jobs, take_launch
from ..startup.nodes import host_identity, in_words
from ..startup.registry import BackendChoice, choose_backend, load_backend, what_is_missing
from ..startup.settings import load_settings
from ..startup.silent_ranks import watch_for_note
from ..startup.uncaught_errors import print_failure_once, print_failures_of_the_run
from ..tensors.checks import is_integer

if TYPE_CHECKING:
    import torch.distributed as dist
    from mpi4py import MPI

    from ..stores import Store

logger = logging.getLogger("syncline.collectives")

_ALONE_AMONG_SIBLINGS = (
    "multiprocessing started this process, and nothing says which rank it is and how many ranks there are. So this process is "
    "a group of one: it averages nothing with the processes that were started beside it. Pass rank=..., world_size=... and set "
    "MASTER_ADDR=localhost and MASTER_PORT (or pass init_method='file:///folder'); for a single process, pass rank=0, "
    "world_size=1"
)

_lock = threading.Lock()  # held while a thread connects


@in_forks
def _renew_lock() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held the old lock at the fork


_default: ProcessGroup | None = None
_followers: list[Callable[[ProcessGroup], None]] = []


class NonMember:
    """The result of `new_group` on a rank that is not in the new group.

    `get_rank` and `get_world_size` return -1 for this object. Every other use as a group raises a `MisuseError`.
    """

    def __init__(self, name: str, ranks: Sequence[int], rank: int) -> None:
        self.name = name
        self.ranks = tuple(ranks)
        self._rank = rank

    def error_message(self) -> str:
        """Return the message of the `MisuseError` that a rank gets when the rank uses this object as a group."""
        return (
            f"rank {self._rank} is not in group '{self.name}', which has ranks {list(self.ranks)}; call its collectives only "
            "on those ranks (get_rank(group) is -1 elsewhere)"
        )

    @staticmethod
    def refuse(group: object) -> None:
        """Check that this rank is in `group`: raise an error if `group` is a `NonMember`, otherwise do nothing.

        Raises:
            MisuseError: `group` is a `NonMember`.
        """
        if isinstance(group, NonMember):
            raise MisuseError(group.error_message())

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):  # Python itself looks these up, for example to copy or pickle
            raise AttributeError(attribute)
        raise MisuseError(f"{attribute}: {self.error_message()}")


def init_process_group(
    backend: str | None = None,
    init_method: str | None = None,
    timeout: timedelta | float | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Store | dist.Store | None = None,
    *,
    communicator: MPI.Intracomm | None = None,
    reproducible: bool | None = None,
    check_calls: bool = False,
) -> ProcessGroup:
    """Connect all ranks of the job and make their group the default group. Every rank calls this function once.

    Under mpirun, mpiexec or srun the function needs no argument, no exported variable and no port.

    A process with SYNCLINE_JOIN=1 in its environment joins a running job over Gloo. In this process, pass the `init_method`
    ("file://") or the store of the job. `rank`, `world_size` and the launcher's values are ignored. The returned group has only
    this rank. To enter the job, the process calls `admit` of this group. The members of the job call `admit` of their group.

    Args:
        backend: a name from `backend_names()`, or a name for each type of device, such as "cpu:mpi,cuda:nccl". None takes the
            name in the environment variable `SYNCLINE_BACKEND`, or otherwise the name in the site file. If there is no name,
            the first case that fits decides. Under an MPI launcher: MPI, or Gloo if MPI cannot be used. Under another launcher,
            or with `init_method`, `store` or `world_size`: Gloo. Otherwise: a group of one rank. If NCCL can be used (GPUs and
            CuPy are there), Syncline also chooses NCCL, for tensors on GPUs.
        init_method: how the ranks find each other over Gloo: "file:///shared/folder", "tcp://host:port?secret_file=PATH" or
            "env://"; see `rendezvous.store_at`. "mpi://" is the same as backend "mpi".
        timeout: the time limit of each collective, in seconds or as a timedelta. None takes the environment variable
            `SYNCLINE_TIMEOUT_S`, or otherwise the site file's limit, or otherwise 30 minutes.
        world_size: number of ranks; -1 takes the launcher's number. If you pass a number to a process that a launcher started,
            it must be the launcher's number. Only a child process of a rank may pass a different number.
        rank: this process's rank; -1 takes the launcher's rank. For other values, see `world_size`.
        store: replaces `init_method`: a store of the package `stores` or a `torch.distributed.Store`. The store must hold no
            keys of an earlier run.
        communicator: an mpi4py communicator, whose ranks become the ranks of the group. Only these ranks call this function.
        reproducible: if true, reductions give the same bits in every run; the backend's documentation states the cost. None
            takes the site file's value, or otherwise False. (Within one run, all ranks always get the same bits.)
        check_calls: for debugging. If true, the ranks compare their calls before each collective, in a small exchange. If the
            calls differ, the collective does not run, and a `DisagreementError` shows the calls.

    Returns:
        The default group. From now on `get_default_group()` returns this group.

    Raises:
        MisuseError: there is a default group already.
        InvalidArgumentError: an argument is wrong, such as an unknown kind of `init_method`. Or two arguments contradict each
            other, such as an `init_method` and a `store`.
        DisagreementError: the ranks passed different options, such as `check_calls`.
        SiteFileError: the site file cannot be read, or has a wrong entry.
        UnknownBackendError: no installed backend has this name.
        BackendUnavailableError: something that the backend needs is missing, such as a library.
        LaunchError: the arguments contradict the launcher or MPI, or the ranks cannot find each other.
    """
    global _default
    launch, is_known = None, False
    try:
        _check_arguments(world_size, rank, init_method, store)
        world_size, rank = int(world_size), int(rank)  # JSON cannot encode integers of NumPy
        settings, joins = load_settings(os.environ), _joins(os.environ)
        timeout_s = seconds(timeout, settings.timeout_s)
        # A communicator knows its ranks, so do not read the launcher's variables.
        if communicator is None:
            launch = take_launch(os.environ, is_given=joins or (rank != -1 and world_size != -1))
        else:
            launch = launch_by(communicator)
        is_known = True
        scheme = check_init_method(init_method)
        if communicator is not None and (store is not None or scheme not in (None, "mpi") or joins):
            raise InvalidArgumentError(
                "a communicator was given, whose ranks meet over MPI: leave out init_method and store, and unset SYNCLINE_JOIN"
            )
        with _lock:
            # Connect inside the lock, so that only one thread of this process can connect.
            if _default is not None:
                raise MisuseError(
                    f"init_process_group was called before and made {_default!r}; call destroy_process_group first"
                )
            choice = choose_backend(
                backend,
                os.environ,
                launch,
                what_is_missing,
                scheme=scheme,
                rendezvous_given=init_method is not None or store is not None or world_size != -1,
                settings=settings,
            )
            apply_to_process(settings)
            request = ConnectRequest.from_settings(
                settings,
                os.environ,
                timeout_s,
                launch=launch,
                rank=None if rank == -1 else rank,
                world_size=None if world_size == -1 else world_size,
                init_method=init_method,
                reproducible=settings.reproducible if reproducible is None else reproducible,
                store=store,
                check_calls=check_calls,
                joins=joins,
                communicator=communicator,
            )
            logger.debug("backend %s: %s", choice.name, choice.reason)
            chosen = _load(choice)
            if joins and not chosen.serves_newcomers:
                raise BackendUnavailableError(
                    f"SYNCLINE_JOIN=1 says that this process joins a job that runs, and backend '{choice.name}' cannot "
                    "let it in; use backend 'gloo' with init_method='file:///shared/folder'"
                )
            connected = chosen.connect(request)
            # A newcomer is alone until it is let in.
            if not joins:
                _learn_hosts(connected)
            _default = connected
    except Exception as error:
        # An error before the launcher is known may be the launcher's fault, so assume that other ranks fail, too.
        print_failure_once(is_initialized, has_siblings=launch is not None or not is_known, failure=error)
        raise
    print_failures_of_the_run(has_siblings=launch is not None)
    watch_for_note(latest_reporter())
    # Only warn here, because a process may train alone on purpose.
    if not joins and _default.rank == 0 and world_size == -1:
        warning = None if launch is None else several_torchrun_jobs(launch, os.environ)
        if launch is None and _default.size == 1 and multiprocessing.parent_process() is not None:
            warning = _ALONE_AMONG_SIBLINGS
        if warning is not None:
            warnings.warn(warning, stacklevel=2)
    logger.info("rank %d of %d: host %s, pid %d", _default.rank, _default.size, socket.gethostname(), os.getpid())
    if _default.rank == 0:
        logger.info("%d rank(s) over %s (%s)", _default.size, _default.describe(), choice.reason)
    return _default


def _learn_hosts(group: ProcessGroup) -> None:
    try:
        group.hosts = group.exchange_texts(in_words(host_identity()))
    except BaseException:
        # This rank cannot go on, and the other ranks must not wait for it.
        group.abort()
        raise


def _check_arguments(world_size: int, rank: int, init_method: str | None, store: object) -> None:
    for name, number in (("world_size", world_size), ("rank", rank)):
        if not is_integer(number):  # a text of os.environ, for example
            raise InvalidArgumentError(f"expected an int as {name}, found {type(number).__name__} {number!r}")
    if world_size != -1 and world_size < 1:
        raise InvalidArgumentError(f"expected a world_size of at least 1 (or -1 for the launcher's), found {world_size}")
    if rank < -1:
        raise InvalidArgumentError(f"expected a rank of at least 0 (or -1 for the launcher's), found {rank}")
    if store is not None and init_method is not None:
        raise InvalidArgumentError(f"expected an init_method or a store, found both ({init_method!r} and {store!r})")


def _joins(environ: Mapping[str, str]) -> bool:
    value = environ.get("SYNCLINE_JOIN", "")
    if value not in ("", "0", "1"):
        raise InvalidArgumentError(f"expected SYNCLINE_JOIN to be 1 (this process joins a job that runs) or 0, found {value!r}")
    return value == "1"


def _load(choice: BackendChoice) -> Backend:
    try:
        return load_backend(choice.name)
    except UnknownBackendError as error:
        raise UnknownBackendError(f"{error} (the backend was {choice.reason})") from None


def destroy_process_group() -> None:
    """Finish all calls in flight and close the default group. Every rank calls this function.

    If there is no default group, the function does nothing. If the program is handling an exception (in an `except:` block, or
    in a `finally:` block after an error), the function aborts the group and does not wait for other ranks.
    """
    global _default
    with _lock:
        group, _default = _default, None
    if group is None:
        return
    if sys.exc_info()[0] is None:
        group.close()
    else:
        group.abort()


def replace_default_group(old: ProcessGroup, new: ProcessGroup) -> bool:
    """Make `new` the default group if `old` is the default group. Returns whether `old` was the default group.

    All ranks of `new` call this function. This function calls each function that was given to `follow_default_group`.

    Raises:
        TransportError: a rank was lost while a function of `follow_default_group` ran. `new` is the default group nevertheless.
            Make a group without the lost rank, and call `replace_default_group` again.
    """
    global _default
    with _lock:
        if _default is not old:
            return False
        _default = new
    for follower in _followers:
        follower(new)
    return True


def follow_default_group(follower: Callable[[ProcessGroup], None]) -> None:
    """From now on, `replace_default_group` calls `follower` with each new default group. `follower` may communicate."""
    if follower not in _followers:
        _followers.append(follower)


def is_initialized() -> bool:
    """Whether `init_process_group` has made a default group, and `destroy_process_group` has not closed it yet."""
    return _default is not None


def get_default_group() -> ProcessGroup:
    """Return the default group: the group of all ranks, which `init_process_group` has made.

    Raises:
        NotInitializedError: there is no default group.
    """
    return resolve_group(None)


_GROUPS = (ProcessGroup, NonMember)


def resolve_group(group: ProcessGroup | None) -> ProcessGroup:
    """Return `group`, or the default group if `group` is None.

    Raises:
        NotInitializedError: `group` is None and there is no default group.
        MisuseError: this rank is not in the group.
        InvalidArgumentError: `group` is not a group.
    """
    if group is not None and group is not _default and not isinstance(group, _GROUPS):
        raise InvalidArgumentError(f"expected a ProcessGroup of syncline.collectives as group, found {type(group).__name__}")
    chosen = _default if group is None else group
    if chosen is None:
        raise NotInitializedError(
            "there is no default process group: call syncline.collectives.init_process_group() first (and not after "
            "destroy_process_group()), or pass a group"
        )
    if isinstance(chosen, NonMember):
        raise MisuseError(chosen.error_message())
    return chosen


def rank_in(group: ProcessGroup, rank: int | None, group_rank: int | None, *, default: int | None = None) -> int:
    """Return a rank of `group`, for a pair of arguments such as `src` and `group_src`. `rank` is a rank of the default group.

    `default` is the result if `rank` and `group_rank` are None.

    Raises:
        InvalidArgumentError: both ranks are given, or `rank` is not in the group, or there is neither a rank nor a default.
    """
    for given in (rank, group_rank):
        if given is not None and not is_integer(given):
            raise InvalidArgumentError(f"expected a rank, found {given!r}")
    if rank is not None and group_rank is not None:
        raise InvalidArgumentError(f"expected a rank or a rank in the group, found both ({rank} and {group_rank})")
    if rank is None:
        chosen = default if group_rank is None else group_rank
        if chosen is None:
            raise InvalidArgumentError("expected a rank, found none")
        return chosen
    if rank not in group.ranks:
        raise InvalidArgumentError(f"rank {rank} is not in group '{group.name}', which has ranks {list(group.ranks)}")
    return group.ranks.index(rank)


def get_rank(group: ProcessGroup | NonMember | None = None) -> int:
    """Return this process's rank in the group, or -1 if this process is not in the group. None means the default group."""
    return -1 if isinstance(group, NonMember) else resolve_group(group).rank


def get_world_size(group: ProcessGroup | NonMember | None = None) -> int:
    """Return the number of ranks in the group, or -1 if this process is not in the group. None means the default group."""
    return -1 if isinstance(group, NonMember) else resolve_group(group).size
