"""What this site wants: which backend is used, and why."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .launch import Launch

BACKEND_VARIABLE = "SYNCLINE_BACKEND"


@dataclass(frozen=True)
class BackendChoice:
    """A backend's name and, in words, why it was chosen."""

    name: str
    reason: str


def choose_backend(
    argument: str | None,
    environ: Mapping[str, str],
    launch: Launch | None,
    missing: Callable[[str], str | None],
    *,
    rendezvous_given: bool = False,
) -> BackendChoice:
    """Choose by argument, else by environment variable, else automatically. A pure function.

    Automatically: MPI when an MPI launcher started this process and nothing that MPI needs is missing; else Gloo when there
    is a launcher or a rendezvous; else a group of one.

    Args:
        argument: the `backend` argument of `init_process_group`.
        environ: the environment variables.
        launch: what the launcher says, or None.
        missing: maps a backend's name to what it lacks here, or to None.
        rendezvous_given: whether the caller gave an `init_method` or a world size.
    """
    if argument is not None:
        return BackendChoice(argument, "given as argument")
    if environ.get(BACKEND_VARIABLE):
        return BackendChoice(environ[BACKEND_VARIABLE], f"set by {BACKEND_VARIABLE}")
    if launch is not None and launch.is_mpi:
        lack = missing("mpi")
        if lack is None:
            return BackendChoice("mpi", f"launched by {launch.launcher}")
        return BackendChoice("gloo", f"launched by {launch.launcher}, but MPI cannot be used: {lack}")
    if launch is not None:
        return BackendChoice("gloo", f"launched by {launch.launcher}")
    if rendezvous_given:
        return BackendChoice("gloo", "a rendezvous was given and no MPI launcher started this process")
    return BackendChoice("in_process", "nothing launched this process, so it is alone")
