"""Process groups and collectives on torch tensors, over MPI, Gloo or threads."""

from .coalescing import broadcast_coalesced
from .errors import (
    BackendUnavailableError,
    CollectiveTimeout,
    DisagreementError,
    GroupClosedError,
    InvalidArgumentError,
    LaunchError,
    MisuseError,
    NotInitializedError,
    SynclineError,
    TransportError,
    UnknownBackendError,
)
from .functional import all_gather, all_reduce, barrier, broadcast
from .objects import all_gather_object
from .process_group import ProcessGroup
from .reduce_op import ReduceOp
from .registry import backend_names
from .work import Work
from .world import (
    destroy_process_group,
    get_default_group,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
)

__all__ = [
    "BackendUnavailableError",
    "CollectiveTimeout",
    "DisagreementError",
    "GroupClosedError",
    "InvalidArgumentError",
    "LaunchError",
    "MisuseError",
    "NotInitializedError",
    "ProcessGroup",
    "ReduceOp",
    "SynclineError",
    "TransportError",
    "UnknownBackendError",
    "Work",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "backend_names",
    "barrier",
    "broadcast",
    "broadcast_coalesced",
    "destroy_process_group",
    "get_default_group",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "is_initialized",
]
