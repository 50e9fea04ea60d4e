"""Process groups and collectives on torch tensors, over MPI, Gloo, NCCL or threads.

The classes of groups::

    ProcessGroup (group)                                         what users hold: checks arguments
      └ EngineGroup (engine.engine_group)                        plans, the record of calls, the first failure
          ├ HostGroup (engine.host_group)                        runs calls one after the other on the host
          │   └ ShrinkableGroup (membership.shrinkable_group)    over MPI, Gloo, threads: can go on after the loss of a rank
          └ NcclGroup (transports.nccl.group)                    puts calls on a stream of the GPU

To read the code, follow a tensor from `all_reduce(tensor)` to shared memory:

1. `api.functional` finds the group.
2. `group.ProcessGroup` checks the arguments, and makes the call's `Signature` (`engine.call`).
3. `engine.host_group.HostGroup` makes the `Call` (`engine.call`), runs the call in its turn (`engine.queue`), and finds the
   plan of the call's signature: the object that carries out all calls with this signature.
4. The plan runs. Over MPI on one node, the plan is a `NodePlan` (`transports.mpi.node.plan`), whose algorithm depends on the
   size of the tensor. The algorithm for small tensors, in any memory, is `transports.mpi.node.eager`: each rank copies its
   tensor into a slot of shared memory, and reduces the slots of all ranks. The algorithm for large tensors in shared memory is
   `transports.mpi.node.window`: each rank reduces one part of the tensor, directly in the tensors of all ranks.

The group's `Transport` (`engine.transport`) makes the plan in the first call with a signature. Later calls with this signature
use the same plan. The transport with the least code is `transports.threads`. The transport for one node over MPI is
`transports.mpi.node.node_transport`. For NCCL, read the two drawings in `transports.nccl.group`, then the modules `plan`,
`communicator` and `work` in the same folder.

You can also follow an error. Suppose that a rank is killed during a collective:

1. Another rank waits, for example in `transports.mpi.node.shared_sync`. While the rank waits, it calls `CancelScope.check`
   (`engine.cancel_scope`) now and then. If a library blocks the rank, the monitor thread calls `check` (`health.monitor`).
2. `check` calls `HostGroup._why_call_cannot_end`, which asks `health.liveness`. The result is an error that names the lost
   rank.
3. `HostGroup._fail` (`engine.host_group`) completes the error. First it calls `FailureWords.of` (`engine.failure`), which adds
   the call and the group to the error's text. Then it calls `EngineGroup._reported` (`engine.engine_group`), which writes a
   report (`health.report`) and adds the report's folder to the text. Finally, `_fail` remembers the error, and tells the other
   ranks.
4. If the script does not catch the error, `startup.uncaught_errors` prints it. Over MPI, `transports.mpi.job_abort` then ends
   the job.

Ranks find each other through stores. A drawing in `stores.tcp` shows how a client reaches the server.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .public import *  # noqa: F403 - type checkers find the names in `public.__all__`


def __getattr__(name: str) -> Any:
    """Load the public names when a program uses one of these names for the first time. This also loads torch.

    The command `syncline run` imports this package before it runs the user's script. This import must not load torch, because
    the script may set variables that torch reads when torch is imported, such as OMP_NUM_THREADS.
    """
    value = getattr(import_module(".public", __name__), name, None)
    if value is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module(".public", __name__).__all__})
