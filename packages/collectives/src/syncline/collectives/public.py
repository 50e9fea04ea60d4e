"""The public names of `syncline.collectives`, which loads them when the first one is asked for."""

from .api.coalescing import all_gather_coalesced, all_reduce_coalesced, broadcast_coalesced
from .api.default_device import default_device
from .api.default_group import (
    destroy_process_group,
    get_default_group,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
)
from .api.functional import (
    all_gather,
    all_gather_into_tensor,
    all_reduce,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)
from .api.monitored_barrier import monitored_barrier
from .api.non_member import NonMember
from .api.objects import (
    all_gather_object,
    broadcast_object_list,
    exchange_objects,
    gather_object,
    scatter_object_list,
)
from .api.placement import get_local_rank, get_node_rank, placement_of
from .api.point_to_point import P2POp, batch_isend_irecv, irecv, isend, recv, send
from .api.subgroups import new_group, new_subgroups, new_subgroups_by_enumeration
from .engine.composed import RoundRobinGroup
from .errors import (
    BackendUnavailableError,
    CollectiveTimeout,
    DisagreementError,
    GroupClosedError,
    InvalidArgumentError,
    InvalidTypeError,
    LaunchError,
    MisuseError,
    NotInitializedError,
    RankGivenUpError,
    RankLostError,
    SiteFileError,
    StoreAuthenticationError,
    StoreError,
    StoreTimeout,
    StoreUnavailableError,
    SynclineError,
    TransportError,
    UnknownBackendError,
)
from .group import ProcessGroup
from .reduce_op import ReduceOp, premul_sum
from .startup.nodes import Placement
from .startup.registry import backend_names
from .torch_bridge.torch_group import TorchGroup, as_process_group
from .version import __version__
from .work import Work

__all__ = [
    "BackendUnavailableError",
    "CollectiveTimeout",
    "DisagreementError",
    "GroupClosedError",
    "InvalidArgumentError",
    "InvalidTypeError",
    "LaunchError",
    "MisuseError",
    "NonMember",
    "NotInitializedError",
    "P2POp",
    "Placement",
    "ProcessGroup",
    "RankGivenUpError",
    "RankLostError",
    "ReduceOp",
    "RoundRobinGroup",
    "SiteFileError",
    "StoreAuthenticationError",
    "StoreError",
    "StoreTimeout",
    "StoreUnavailableError",
    "SynclineError",
    "TorchGroup",
    "TransportError",
    "UnknownBackendError",
    "Work",
    "__version__",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "as_process_group",
    "backend_names",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_object_list",
    "default_device",
    "destroy_process_group",
    "exchange_objects",
    "gather",
    "gather_object",
    "get_default_group",
    "get_local_rank",
    "get_node_rank",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "irecv",
    "is_initialized",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "placement_of",
    "premul_sum",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
]
