"""Importing this module registers Syncline's backends with torch.distributed. `monitored_barrier` takes torch groups."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..api.monitored_barrier import monitored_barrier as ours
from ..errors import BackendUnavailableError, MisuseError
from ..torch_internals import end_groups_by, registered_creator, rendezvous_handler
from .group_factory import create
from .rendezvous import rendezvous
from .torch_group import as_process_group
from .torch_process_group import TorchProcessGroup

OLDEST_TORCH = (2, 6)

#: For each name that we register: our backend (None: one backend for each device), and the devices that tensors may be on.
BACKENDS: dict[str, tuple[str | None, list[str]]] = {
    "syncline-mpi": ("mpi", ["cpu", "cuda"]),
    "syncline-nccl": ("nccl", ["cuda"]),
    "syncline": (None, ["cpu", "cuda"]),
}
SCHEME = "mpi"


def register() -> None:
    """Register the backends "syncline-mpi", "syncline-nccl" and "syncline", and the scheme "mpi://".

    A second call changes nothing.

    Raises:
        BackendUnavailableError: torch has no torch.distributed, or is too old.
        MisuseError: another package has registered one of these names.
    """
    check_torch(torch.__version__, is_available=dist.is_available())
    for name, (backend, devices) in BACKENDS.items():
        _register_backend(name, backend, devices_there(devices))
    _decline_flight_recorder()
    _close_when_torch_destroys()
    _register_scheme()


def check_torch(version: str, *, is_available: bool) -> None:
    """Check that torch is new enough, and was built with torch.distributed.

    Raises:
        BackendUnavailableError: torch is too old, or was built without torch.distributed.
    """
    if not is_available:
        raise BackendUnavailableError("this build of torch has no torch.distributed; install one of torch's standard wheels")
    found = re.match(r"(\d+)\.(\d+)", version)
    if found and (int(found[1]), int(found[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise BackendUnavailableError(
            f"syncline.collectives.torch_backend needs torch {oldest} or later, found torch {version}"
        )


def devices_there(devices: list[str]) -> list[str]:
    """Return `devices` without "cuda" if this machine has no CUDA device. A list of "cuda" alone is returned unchanged."""
    # Some libraries make a tensor on each device for which a backend is registered. Without a CUDA device this fails.
    # Counting does not start CUDA if the driver's library is present, so forked children can still use CUDA.
    has_cuda = torch.cuda.device_count() > 0
    return [device for device in devices if device != "cuda" or has_cuda] or devices


def _register_backend(name: str, backend: str | None, devices: list[str]) -> None:
    known = registered_creator(name)
    # This function was called before, or another package uses the name.
    if known is not None:
        _check_ours(known, f"backend '{name}'")
        return
    creator = partial(create, name, backend, devices)
    # The first backend registered for a device becomes the device's default. Ours do not: cpu and cuda have defaults already.
    dist.Backend.register_backend(name, creator, extended_api=True, devices=devices)


def _decline_flight_recorder() -> None:
    """Tell torch 2.15 and later not to attach its flight recorder, which fails if a group has no C++ backend."""
    # This set is private to torch. An older torch lacks this set, and attaches no recorder.
    recorded_elsewhere: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorded_elsewhere.update(BACKENDS)


def _close_when_torch_destroys() -> None:
    """Make `destroy_process_group` of torch 2.6 shut down Syncline's groups. Without this, it ends only torch's NCCL groups."""

    def shut_down(group: dist.ProcessGroup) -> bool:
        if isinstance(group, TorchProcessGroup):
            group.shutdown()
            return True
        return False

    end_groups_by(shut_down)  # a newer torch calls `shutdown` of each group itself


def _register_scheme() -> None:
    registered = rendezvous_handler(SCHEME)
    if registered is not None:
        _check_ours(registered, f"rendezvous scheme '{SCHEME}://'")
        return
    dist.register_rendezvous_handler(SCHEME, rendezvous)  # type: ignore[no-untyped-call]  # torch has no types here


def _check_ours(handler: Callable[..., Any], what: str) -> None:
    function = handler.func if isinstance(handler, partial) else handler
    if not getattr(function, "__module__", "").startswith(__package__ or ""):
        raise MisuseError(f"{what} of torch.distributed was registered by {function.__module__}; import only one of the two")


register()


def monitored_barrier(
    group: dist.ProcessGroup | None = None, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until all ranks have called this function. On a time-out, rank 0 raises an error that names the missing ranks.

    Args:
        group: a group of torch.distributed; None means torch's default group.
        timeout: seconds or a timedelta; None takes the group's time limit.
        wait_all_ranks: whether the error names all missing ranks, or only the first.

    Raises:
        CollectiveTimeout: some rank did not call this function in time. On ranks other than 0, the message says that rank 0 did
            not answer.
    """
    ours(as_process_group(group), timeout, wait_all_ranks)
