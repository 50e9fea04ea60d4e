"""Make groups of torch.distributed that run on Syncline's groups."""

from __future__ import annotations

import logging
import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..api.default_group import follow_default_group, get_default_group
from ..errors import BackendUnavailableError, InvalidArgumentError, LaunchError, MisuseError, UnknownBackendError
from ..group import ProcessGroup
from ..health.report import latest_reporter
from ..startup.backend import ConnectRequest, apply_to_process
from ..startup.launch import take_launch
from ..startup.registry import choose_backend, load_backend
from ..startup.settings import load_settings
from ..startup.silent_ranks import watch_for_note
from ..startup.uncaught_errors import print_failures_of_the_run
from . import compiled
from .rendezvous import store_over
from .torch_process_group import TorchProcessGroup

logger = logging.getLogger("syncline.collectives")

# For each of torch's backend names, the group of all ranks. Groups of some ranks are made from this group.
_everybody: dict[str, ProcessGroup] = {}
# The group for torch while `share_default_group` runs.
_shared: ProcessGroup | None = None
# True while torch must still get our newest default group. The value stays true if a rank is lost before that.
_is_unfinished = False
# Two hooks for uncaught errors: the hook before torch's (ours or Python's), and torch's own hook, which calls the first hook.
_excepthooks = (sys.excepthook, sys.excepthook)


def share_default_group() -> None:
    """Make Syncline's default group the default group of torch.distributed, for libraries that use torch.distributed.

    All ranks must call this function, after Syncline's `init_process_group`. From then on, torch makes new groups from this
    group. torch's `destroy_process_group()` does not close this group, but aborts it if the caller is handling an exception.

    If `Elastic` or `hvd.elastic` makes a new default group, torch.distributed gets the new group, too. Then all other groups of
    torch.distributed are destroyed, and the program must make them again. A newcomer (a process that joins the job later) also
    calls this function.

    Raises:
        NotInitializedError: Syncline has no default group.
        MisuseError: torch.distributed has a default group already.
    """
    ours = get_default_group()
    if dist.is_initialized():
        raise MisuseError(
            "share_default_group: torch.distributed is initialised already; call it before, or leave it out: our "
            "DistributedDataParallel takes torch's group if there is no default group of ours"
        )
    _give_to_torch(ours, store_over(ours))
    follow_default_group(_renew)


def _renew(ours: ProcessGroup) -> None:
    """If torch.distributed uses Syncline's old default group, put the new default group in its place. All ranks call this."""
    global _is_unfinished
    world = dist.group.WORLD
    if not _is_unfinished and not (isinstance(world, TorchProcessGroup) and world.is_shared):
        return  # the script has destroyed torch's group meanwhile, and perhaps made another one
    _is_unfinished = True
    store = store_over(ours)
    # torch cannot change the size of a group.
    if dist.is_initialized():
        dist.destroy_process_group()
    # torch's hook prints "[rank1]:" before each line of an error. A second hook would print both the old and the new rank.
    before, of_torch = _excepthooks
    if sys.excepthook is of_torch:
        sys.excepthook = before
    _give_to_torch(ours, store)
    _is_unfinished = False


def _give_to_torch(ours: ProcessGroup, store: dist.Store) -> None:
    global _shared, _excepthooks
    before = sys.excepthook
    _shared = ours
    try:
        dist.init_process_group(
            "syncline", store=store, rank=ours.rank, world_size=ours.size, timeout=timedelta(seconds=ours.timeout_s)
        )
    finally:
        # Only the call of `create` inside `init_process_group` may take our group.
        _shared = None
    _excepthooks = (before, sys.excepthook)


def create(torch_name: str, backend: str | None, devices: list[str], options: Any, pg_options: Any) -> TorchProcessGroup:
    """Make the group that torch asks for. torch calls this function on every rank of the new group.

    Args:
        torch_name: the name under which the backend is registered with torch.
        backend: Syncline's name of the backend; None chooses one for each device.
        devices: the devices that were registered with torch for the backend.
        options: torch's `DistributedBackendOptions`.
        pg_options: the argument `pg_options` of torch's `init_process_group` or `new_group`.

    Raises:
        InvalidArgumentError: `pg_options` were given, or the backend does not serve the device.
        LaunchError: the new group has only some ranks, and there is no group of all ranks with this backend.
        BackendUnavailableError: a library or package that the backend needs is missing on this machine.
    """
    if pg_options is not None:
        raise InvalidArgumentError(f"backend '{torch_name}' has no options, found {pg_options!r}; leave pg_options out")
    members = list(options.global_ranks_in_group)
    timeout_s = options.timeout.total_seconds()
    if _shared is not None:
        ours = _shared
    elif not members or _has_all(members, torch_name):
        # torch's first group has an empty list of members, which means all ranks.
        ours = _connect(torch_name, backend, options, timeout_s)
    else:
        ours = _root(torch_name, members).subset(members, options.group_id, timeout_s=timeout_s)
    # Check before the lines below put the group into `_everybody`: a group that is refused must not be there.
    _check_device(torch_name, devices, options, ours)
    compiled.serve(ours.device_types)
    is_root = torch_name not in _everybody and ours.size == _world_size(ours)
    if is_root:
        _everybody[torch_name] = ours
    on_close = (lambda: _forget(torch_name)) if is_root else None
    return TorchProcessGroup(ours, options.store, torch_name, on_close=on_close, is_shared=ours is _shared)


def _forget(torch_name: str) -> None:
    _everybody.pop(torch_name, None)


def _has_all(members: list[int], torch_name: str) -> bool:
    """Return whether a new group has all ranks, and is the first group of its backend."""
    return torch_name not in _everybody and members == list(range(dist.get_world_size()))


def _world_size(ours: ProcessGroup) -> int:
    return dist.get_world_size() if dist.is_initialized() else ours.size


def _root(torch_name: str, members: list[int]) -> ProcessGroup:
    if torch_name not in _everybody:
        raise LaunchError(
            f"new_group({members}, backend='{torch_name}'): first make a group of all ranks with this backend, by "
            f"init_process_group('{torch_name}') or by new_group(backend='{torch_name}') on every rank"
        )
    return _everybody[torch_name]


def _connect(torch_name: str, backend: str | None, options: Any, timeout_s: float) -> ProcessGroup:
    launch = take_launch(os.environ, is_given=True)
    name = _choice(options.group_size) if backend is None else backend
    settings = load_settings(os.environ)
    apply_to_process(settings)
    try:
        chosen = load_backend(name)
        request = ConnectRequest.from_settings(
            settings,
            os.environ,
            timeout_s,
            launch=launch,
            rank=options.group_rank,
            world_size=options.group_size,
            init_method=None,
            store=options.store if chosen.meets_in_store else None,
        )
        made = chosen.connect(request)
    except UnknownBackendError as error:
        raise BackendUnavailableError(
            f"backend '{torch_name}' of torch.distributed stands on our backend '{name}': {error}"
        ) from error
    print_failures_of_the_run(has_siblings=launch is not None)
    watch_for_note(latest_reporter())
    return made


def _choice(size: int) -> str:
    launch = take_launch(os.environ, is_given=True)
    choice = choose_backend(
        None,
        os.environ,
        launch,
        lambda name: load_backend(name).missing(),
        rendezvous_given=size > 1,
        settings=load_settings(os.environ),
    )
    # The chosen backend serves GPUs separately, or there are no GPUs.
    if ":" in choice.name or not torch.cuda.is_available():
        return choice.name
    lack = _lack_of_nccl()
    if lack is None:
        return f"cpu:{choice.name},cuda:nccl"
    logger.warning("backend 'syncline' serves no CUDA tensors: %s", lack)
    return choice.name


def _lack_of_nccl() -> str | None:
    try:
        return load_backend("nccl").missing()
    except (UnknownBackendError, BackendUnavailableError) as error:
        return str(error)


def _check_device(torch_name: str, devices: list[str], options: Any, ours: ProcessGroup) -> None:
    """Raise an error if torch was told to use the backend for a device that it cannot serve, as in "cuda:syncline-mpi"."""
    asked = _device_asked_for(options.store)
    # If the caller names no device, torch asks for the first of `devices`.
    if asked not in (None, devices[0], *ours.device_types):
        ours.close()
        raise InvalidArgumentError(
            f"'{asked}:{torch_name}' was asked for, but this backend ({ours.describe()}) moves tensors on "
            f"{', '.join(sorted(ours.device_types))}"
        )


def _device_asked_for(store: dist.Store) -> str | None:
    """Return the type of device for which torch makes the group, from the prefix of the store's keys; None if unknown."""
    parent = getattr(store, "underlying_store", None)
    if parent is None:
        return None
    store.set("syncline/device", "")
    return next((kind for kind in ("cpu", "cuda") if parent.check([f"{kind}//syncline/device"])), None)
