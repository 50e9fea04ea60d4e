"""Process groups and collectives on torch tensors, over MPI, Gloo, NCCL or threads.

To read the code, follow a tensor from `all_reduce(tensor)` to shared memory:

1. `api.functional` finds the group.
2. `group.ProcessGroup` checks the arguments, and makes the call's `Signature` (`engine.call`).
3. `engine.host_group.HostGroup` makes the `Call` (`engine.call`), runs the call in its turn (`engine.queue`), and finds the
   plan of the call's signature: the object that carries out all calls with this signature. (Over NCCL, `transports.nccl.group`
   puts calls on a stream of the GPU instead.)
4. The `Transport` (`engine.transport`) makes a plan at the first call of a signature. `transports.threads` is the shortest
   transport.
5. Over MPI on one node, `transports.mpi.node.node_transport` makes the plan (`transports.mpi.node.plan`). The tensor's size
   decides the algorithm. The algorithm for small tensors is `transports.mpi.node.eager`: each rank writes its tensor into a
   slot, and reduces the slots of all ranks. The algorithm for large tensors in shared memory is `transports.mpi.node.window`:
   each rank reduces a slice directly in the tensors of all ranks.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .public import *  # noqa: F403 - type checkers find the names in `public.__all__`


def __getattr__(name: str) -> Any:
    """Load the public names, and with them torch, when a program first uses one of them.

    `syncline run` is in this package and must not load torch. Otherwise settings that a script makes before it imports torch,
    such as OMP_NUM_THREADS, would have no effect.
    """
    value = getattr(import_module(".public", __name__), name, None)
    if value is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module(".public", __name__).__all__})
