"""Find backends by name. Built-in and third-party backends use the same group of entry points."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points

from ..errors import BackendUnavailableError, UnknownBackendError
from .backend import Backend
from .per_device_backend import PerDeviceBackend, parse

ENTRY_POINT_GROUP = "syncline.backends"


def backend_names() -> list[str]:
    """The names of all installed backends, sorted."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def load_backend(name: str) -> Backend:
    """Import the backend of this name. This does not yet import the backend's library.

    A name with a colon, such as "cpu:mpi,cuda:nccl", gives one backend for each type of device.

    Raises:
        UnknownBackendError: no installed package offers the backend; the message lists the backends that exist.
        BackendUnavailableError: two packages offer it, or its module cannot be imported, or it is not a `Backend`.
    """
    if ":" in name:
        return PerDeviceBackend({device: load_backend(backend) for device, backend in parse(name).items()})
    point = _only_entry_point(name)
    try:
        backend = point.load()
    except (ImportError, AttributeError) as error:
        raise BackendUnavailableError(
            f"backend {name!r} cannot be loaded from {point.value!r}: {error}; this is an error of the package that offers it, "
            "or of its installation"
        ) from error
    if not isinstance(backend, Backend):
        raise BackendUnavailableError(
            f"the entry point '{name}' of '{ENTRY_POINT_GROUP}' should name an instance of "
            f"syncline.collectives.backends.Backend, found {type(backend).__name__}: an error of the package that offers it"
        )
    return backend


def what_is_missing(name: str) -> str | None:
    """Why a backend cannot work here, in one sentence; None if it can. Also works for a backend that is not installed."""
    try:
        return load_backend(name).missing()
    except UnknownBackendError as error:
        return str(error)


def _only_entry_point(name: str) -> EntryPoint:
    # If the package's metadata exists twice, an entry is listed twice. Entries of the same value count once.
    found = {point.value: point for point in entry_points(group=ENTRY_POINT_GROUP, name=name)}
    if not found:
        known = ", ".join(backend_names()) or "none: is syncline-collectives installed, or only on the path?"
        raise UnknownBackendError(f"unknown backend {name!r}; installed backends: {known}")
    if len(found) > 1:
        raise BackendUnavailableError(
            f"several packages offer a backend {name!r}: {', '.join(sorted(found))}; uninstall all but one"
        )
    return next(iter(found.values()))
