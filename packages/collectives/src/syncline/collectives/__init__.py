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

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .public import *  # noqa: F403 - type checkers know the names by its `__all__`


def __getattr__(name: str) -> Any:
    """Load the public names, and with them torch, when the first one is asked for.

    `syncline run` lives in this package and must not load torch: what a script says before it imports torch (OMP_NUM_THREADS,
    say) has to count.
    """
    value = getattr(import_module(".public", __name__), name, None)
    if value is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module(".public", __name__).__all__})
