"""Process groups and collectives on torch tensors, over MPI, Gloo, NCCL or threads.

Where to begin reading: the way of a tensor from `all_reduce(tensor)` to shared memory, through seven files.

1. `default_group.functional` finds the group.
2. `host.host_group` says what is to be done. If it keeps a plan for such tensors, that comes next, as in 6.
3. `contract.group_collectives` checks the arguments. A `ProcessGroup` is what `contract` promises.
4. `host.serial_group` runs one call after the other, with deadline and record. (`backends.nccl` has a group of its own.)
5. A backend's `host.transport.Transport` moves the data (`backends.in_process` is the shortest); here
   `backends.mpi.node.node_transport` makes a plan: which algorithm, for which sizes.
6. `backends.mpi.node.window_collective` is one: each rank reduces a slice where it lies.
7. `backends.mpi.node.windows` knows where the tensor lies in the shared window of the node.
"""

from .composed.round_robin import RoundRobinGroup
from .composed.torch_group import TorchGroup, as_process_group
from .contract.process_group import ProcessGroup
from .contract.reduce_op import ReduceOp, premul_sum
from .contract.work import Work
from .default_group.adasum import adasum_coalesced
from .default_group.coalescing import all_gather_coalesced, all_reduce_coalesced, broadcast_coalesced
from .default_group.default_device import default_device
from .default_group.default_group import (
    destroy_process_group,
    get_default_group,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
)
from .default_group.functional import (
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
from .default_group.monitored_barrier import monitored_barrier
from .default_group.non_member import NonMember
from .default_group.objects import (
    all_gather_object,
    broadcast_object_list,
    exchange_objects,
    gather_object,
    scatter_object_list,
)
from .default_group.placement import get_local_rank, get_local_size, get_node_rank, placement_of
from .default_group.point_to_point import P2POp, batch_isend_irecv, irecv, isend, recv, send
from .default_group.returned import (
    PendingResult,
    all_gather_rows,
    all_gather_rows_coalesced,
    all_reduce_copy,
    all_reduce_copy_coalesced,
    all_to_all_rows,
    broadcast_copy,
    broadcast_object,
    reduce_scatter_rows,
    reduce_scatter_rows_coalesced,
)
from .default_group.subgroups import new_group, new_subgroups, new_subgroups_by_enumeration
from .default_group.uneven_calls import UnevenCalls
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
from .startup.nodes import Placement
from .startup.registry import backend_names
from .version import __version__

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
    "PendingResult",
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
    "UnevenCalls",
    "UnknownBackendError",
    "Work",
    "__version__",
    "adasum_coalesced",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_rows",
    "all_gather_rows_coalesced",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_copy",
    "all_reduce_copy_coalesced",
    "all_to_all",
    "all_to_all_rows",
    "all_to_all_single",
    "as_process_group",
    "backend_names",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_coalesced",
    "broadcast_copy",
    "broadcast_object",
    "broadcast_object_list",
    "default_device",
    "destroy_process_group",
    "exchange_objects",
    "gather",
    "gather_object",
    "get_default_group",
    "get_local_rank",
    "get_local_size",
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
    "reduce_scatter_rows",
    "reduce_scatter_rows_coalesced",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
]
