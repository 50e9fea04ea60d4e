"""Choose the backend that connects the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..errors import LaunchError
from .launch import Launch
from .settings import Settings

BACKEND_VARIABLE = "SYNCLINE_BACKEND"


@dataclass(frozen=True)
class BackendChoice:
    """A backend's name, and the reason why it was chosen, in words."""

    name: str
    reason: str


def choose_backend(
    argument: str | None,
    environ: Mapping[str, str],
    launch: Launch | None,
    missing: Callable[[str], str | None],
    *,
    scheme: str | None = None,
    rendezvous_given: bool = False,
    settings: Settings | None = None,
) -> BackendChoice:
    """Choose by argument, else by environment variable, else by the site file, else automatically. A pure function.

    The automatic choice is MPI if an MPI launcher started this process and nothing that MPI needs is missing. Else it is Gloo
    if there is a launcher or a rendezvous. Else it is a group of one. If NCCL lacks nothing, NCCL serves the GPUs.

    Args:
        argument: the `backend` argument of `init_process_group`.
        environ: the environment variables.
        launch: what the launcher says, or None.
        missing: maps a backend's name to what it lacks here, or to None.
        scheme: the scheme of the `init_method`; "mpi" means the same as the argument "mpi".
        rendezvous_given: whether the caller gave an `init_method` or a world size.
        settings: the site's settings.

    Raises:
        LaunchError: the `init_method` is mpi:// and the argument names another backend.
    """
    # The URL is as explicit as an argument, so it comes before the environment, too.
    if scheme == "mpi":
        return _by_mpi_url(argument)
    if argument is not None:
        return BackendChoice(argument, "given as argument")
    if environ.get(BACKEND_VARIABLE):
        return BackendChoice(environ[BACKEND_VARIABLE], f"set by {BACKEND_VARIABLE}")
    if settings is not None and settings.backend is not None:
        return BackendChoice(settings.backend, f"set by the site file {settings.path}")
    return _with_gpus(_choose_automatically(launch, missing, rendezvous_given), missing)


def _by_mpi_url(argument: str | None) -> BackendChoice:
    if argument not in (None, "mpi"):
        raise LaunchError(
            f"init_method 'mpi://' means backend 'mpi', but backend {argument!r} was given; leave one of the two out"
        )
    return BackendChoice("mpi", "init_method is mpi://")


def _with_gpus(host: BackendChoice, missing: Callable[[str], str | None]) -> BackendChoice:
    if missing("nccl") is not None:
        return host
    return BackendChoice(f"cpu:{host.name},cuda:nccl", f"{host.reason}, and there are GPUs")


def _choose_automatically(launch: Launch | None, missing: Callable[[str], str | None], rendezvous_given: bool) -> BackendChoice:
    if launch is not None and launch.is_mpi:
        lack = missing("mpi")
        if lack is None:
            return BackendChoice("mpi", f"launched by {launch.launcher}")
        # The reason becomes a part of one line, so its first line must do.
        why = lack.splitlines()[0]
        return BackendChoice("gloo", f"launched by {launch.launcher}, but MPI cannot be used: {why}")
    # A launcher that does not start MPI programs, such as torchrun.
    if launch is not None:
        return BackendChoice("gloo", f"launched by {launch.launcher}")
    if rendezvous_given:
        return BackendChoice("gloo", "a rendezvous was given and no MPI launcher started this process")
    return BackendChoice("in_process", "nothing launched this process, so it is alone")
