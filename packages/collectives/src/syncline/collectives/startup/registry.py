"""Find backends by name, choose one backend, or combine several backends: one for each type of device.

A Python package, Syncline included, offers a backend by an entry point in "syncline.backends".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points

from ..engine.composed import PerDeviceGroup
from ..errors import BackendUnavailableError, InvalidArgumentError, LaunchError, UnknownBackendError
from ..group import ProcessGroup
from .backend import Backend, ConnectRequest
from .launch import Launch
from .settings import Settings

ENTRY_POINT_GROUP = "syncline.backends"
BACKEND_VARIABLE = "SYNCLINE_BACKEND"


def backend_names() -> list[str]:
    """Return the names of all installed backends, sorted."""
    return sorted({point.name for point in entry_points(group=ENTRY_POINT_GROUP)})


def load_backend(name: str) -> Backend:
    """Import the backend of this name. The backend's library (MPI, for example) is not loaded yet.

    A name with a colon, such as "cpu:mpi,cuda:nccl", gives one backend for each type of device.

    Raises:
        InvalidArgumentError: the name has a colon, but is not of this form.
        UnknownBackendError: no installed package offers the backend; the message lists the installed backends.
        BackendUnavailableError: two packages offer the backend, or it cannot be imported, or it is not a `Backend`.
    """
    if ":" in name:
        return PerDeviceBackend({device: load_backend(backend) for device, backend in devices_and_backends(name).items()})
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
    """Return a text that says why the backend `name` cannot work in this process, or None if the backend can work.

    Raises:
        InvalidArgumentError: as in `load_backend`.
        BackendUnavailableError: as in `load_backend`.
    """
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


@dataclass(frozen=True)
class BackendChoice:
    """The name of a backend, and a text that says why this backend was chosen."""

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
    """Choose a backend. The value of `argument` comes first, then the variable SYNCLINE_BACKEND, then the site file.

    The `init_method` mpi:// has the same effect as the argument "mpi". If nothing names a backend, the choice is automatic:

    - MPI, if an MPI launcher started this process and nothing that MPI needs is missing;
    - otherwise Gloo, if there is a launcher or a rendezvous;
    - otherwise the backend "in_process", which makes a group of one rank.

    An automatic choice serves tensors on the CPU. If NCCL can work in this process, the choice adds NCCL for tensors on GPUs.

    `missing` returns the reason why a backend cannot work, or None. `scheme` is the scheme of the `init_method`.
    `rendezvous_given` says whether the caller passed an `init_method`, a store or a world size.

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
        # `reason` must be one line, and `lack` may have several.
        why = lack.splitlines()[0]
        return BackendChoice("gloo", f"launched by {launch.launcher}, but MPI cannot be used: {why}")
    # This launcher, such as torchrun, does not start MPI programs.
    if launch is not None:
        return BackendChoice("gloo", f"launched by {launch.launcher}")
    if rendezvous_given:
        return BackendChoice("gloo", "a rendezvous was given and no MPI launcher started this process")
    return BackendChoice("in_process", "nothing launched this process, so it is alone")


class PerDeviceBackend(Backend):
    """Connects the ranks by several backends, one for each type of device ("cpu", "cuda")."""

    def __init__(self, backends: Mapping[str, Backend]) -> None:
        self._backends = dict(backends)

    def missing(self) -> str | None:
        """Return the error text of the first backend that cannot work in this process. If all can work, return None."""
        lacks = (backend.missing() for backend in self._backends.values())
        return next((lack for lack in lacks if lack is not None), None)

    @property
    def meets_in_store(self) -> bool:
        """Whether at least one of the backends can let its ranks meet in a store."""
        return any(backend.meets_in_store for backend in self._backends.values())

    def connect(self, request: ConnectRequest) -> PerDeviceGroup:
        """Connect one backend after the other. The CPU's backend comes first, and the other backends get the CPU's group.

        If any backend has `meets_in_store`, only the backends with `meets_in_store` get the request's store.
        """
        groups: dict[str, ProcessGroup] = {}
        for device in sorted(self._backends, key=lambda device: device != "cpu"):
            backend = self._backends[device]
            # If no backend meets in a store, pass the store to all backends. They raise an error instead of ignoring the store.
            store = request.store if backend.meets_in_store or not self.meets_in_store else None
            groups[device] = backend.connect(
                replace(request, store=store, host_group=groups.get("cpu"), devices=frozenset({device}))
            )
        return PerDeviceGroup({device: groups[device] for device in self._backends})


def devices_and_backends(specification: str) -> dict[str, str]:
    """Parse a text: "cpu:mpi,cuda:nccl" gives {"cpu": "mpi", "cuda": "nccl"}.

    Raises:
        InvalidArgumentError: the text has another form, or names a device twice.
    """
    pairs = [entry.split(":") for entry in specification.replace(" ", "").split(",")]
    if any(len(pair) != 2 or not all(pair) for pair in pairs) or len({pair[0] for pair in pairs}) < len(pairs):
        raise InvalidArgumentError(
            f"expected devices and backends such as 'cpu:mpi,cuda:nccl', each device once, found {specification!r}"
        )
    return dict(pairs)
