"""`Backend`: connects the ranks of a job by one library, such as MPI, and makes a process group of them."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..group import ProcessGroup
from ..health.report import set_report_folder
from ..health.stalls import DEFAULT_STALL_WARNING_S
from .addresses import chosen_interfaces
from .launch import Launch
from .settings import DEFAULT_SPIN_S, AlgorithmThresholds, Settings
from .uncaught_errors import show_all_frames

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..stores import Store


@dataclass(frozen=True)
class ConnectRequest:
    """The values that `Backend.connect` needs to connect the ranks of the job. `init_process_group` makes such a request.

    Attributes:
        launch: the values that the launcher gave this process, or None if no launcher started this process.
        rank, world_size: the arguments that the caller gave to `init_process_group`, or None.
        init_method: the URL where the ranks meet ("env://", "file://...", "tcp://..."; see `rendezvous`), or None.
        timeout_s: the time limit of each collective, in seconds.
        group_name: the name of the group in error messages.
        store: a store of Syncline or torch in which the ranks meet. The store has no keys of an earlier run. If None, the ranks
            meet in another way, such as `init_method`.
        reproducible: whether reductions must give the same bits in every run. A backend that cannot do this must refuse to
            connect.
        host_group: a group of the same ranks for tensors in host memory, or None. As long as the new group
            lives, a backend for GPUs may call `send` and `recv` of `host_group`.
        check_calls: whether the ranks must compare each collective before the collective starts. A backend that cannot do this
            must refuse to connect.
        thresholds: the tensor sizes from which a backend uses another algorithm.
        stall_warning_s: after this many seconds in one call, rank 0 logs which rank waits for which rank. 0 means never.
        communicator: an mpi4py communicator, whose ranks become the ranks of the group. None means all ranks of the MPI job.
        interfaces: the network interfaces on which ranks of several hosts meet, and on which Gloo communicates. If empty, the
            backend chooses interfaces itself.
        spin_s: how many seconds a waiting rank polls before it begins to sleep between two polls.
        joins: whether this process is a newcomer, a process that starts later than the ranks of the job. These ranks let the
            newcomer in by `ProcessGroup.admit`.
        devices: the types of device whose tensors the group will get, such as {"cpu"}. None means all types that the backend
            serves.
    """

    launch: Launch | None
    rank: int | None
    world_size: int | None
    init_method: str | None
    timeout_s: float
    group_name: str = "default"
    reproducible: bool = False
    store: Store | dist.Store | None = None
    host_group: ProcessGroup | None = None
    check_calls: bool = False
    thresholds: AlgorithmThresholds = field(default_factory=AlgorithmThresholds)
    stall_warning_s: float = DEFAULT_STALL_WARNING_S
    spin_s: float = DEFAULT_SPIN_S
    devices: frozenset[str] | None = None
    joins: bool = False
    communicator: Any = None
    interfaces: tuple[str, ...] = field(default_factory=lambda: chosen_interfaces(os.environ))

    @classmethod
    def from_settings(cls, settings: Settings, environ: Mapping[str, str], timeout_s: float, **given: Any) -> ConnectRequest:
        """Make a request from the site's settings, the environment variables, and the fields in `given`.

        Environment variables override the site's settings. Fields in `given` override both.
        """
        said = {
            "reproducible": settings.reproducible,
            "thresholds": settings.thresholds.overridden(environ),
            "stall_warning_s": settings.stall_warning_s,
            "interfaces": chosen_interfaces(environ, settings.interface),
            "spin_s": settings.spin_s_overridden(environ),
        }
        return cls(timeout_s=timeout_s, **{**said, **given})

    def wants(self, device_type: str) -> bool:
        """Whether the group will get tensors on devices of this type, such as "cuda". Always True if `devices` is None."""
        return self.devices is None or device_type in self.devices


def apply_to_process(settings: Settings) -> None:
    """Apply two settings that hold for the whole process: the folder for reports, and which stack frames tracebacks show."""
    show_all_frames(settings.full_tracebacks)
    set_report_folder(settings.report_dir)


class Backend(ABC):
    """Connects the ranks of a job through one communication library. Write a subclass to add a backend to Syncline.

    A package offers an instance of the subclass by an entry point in the group "syncline.backends". The entry point's name is
    the backend's name. Importing or constructing a backend must be cheap and must not import mpi4py or CuPy.
    """

    @property
    def meets_in_store(self) -> bool:
        """Whether the ranks can find each other in a store. If false, `connect` must refuse a request that has a store."""
        return False

    @property
    def serves_newcomers(self) -> bool:
        """Whether a process can join a running job over this backend. If false, `connect` gets no request with `joins`."""
        return False

    @abstractmethod
    def missing(self) -> str | None:
        """Return None if this backend can work in this process. Otherwise return a text: why it cannot, and what to do."""

    @abstractmethod
    def connect(self, request: ConnectRequest) -> ProcessGroup:
        """Connect the ranks of the job, and return their group. All ranks call this method.

        Raises:
            BackendUnavailableError: something is missing (see `missing`).
            LaunchError: the request contradicts the launcher or the library.
        """
