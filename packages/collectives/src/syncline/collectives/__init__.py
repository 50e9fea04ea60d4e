"""Process groups and collectives on torch tensors, over MPI, Gloo, NCCL or threads.

The classes of groups::

    ProcessGroup (group)                                         what users hold: checks arguments
      ├ EngineGroup (engine.engine_group)                        plans, the record of calls, the first failure
      │   ├ HostGroup (engine.host_group)                        runs calls one after the other on the host
      │   │   └ ShrinkableGroup (membership.shrinkable_group)    over MPI, Gloo, threads: can go on after the loss of a rank
      │   └ NcclGroup (transports.nccl.group)                    puts calls on a stream of the GPU
      ├ DelegatingGroup (engine.composed)                        passes calls to its groups: `PerDeviceGroup`, `RoundRobinGroup`
      └ TorchGroup (torch_bridge.torch_group)                    passes calls to a group of torch.distributed

To read the code, follow a tensor from `all_reduce(tensor)` to shared memory:

1. `api.functional` finds the group.
2. `group.ProcessGroup` checks the arguments, and makes the call's `Signature` (`engine.call`).
3. `engine.host_group.HostGroup` makes the `Call` (`engine.call`), and runs the call in its turn (`engine.queue`). Over MPI,
   `transports.mpi.connection` has made this group. The group's `Transport` (`engine.transport`) makes a plan for each
   signature.
4. The plan runs. Over MPI on one node, it is a `NodePlan` (`transports.mpi.node.plan`). For small tensors it uses
   `transports.mpi.node.eager`: each rank copies its tensor into a slot of shared memory, and reduces the slots of all ranks.
   For large tensors in shared memory it uses `transports.mpi.node.window`: each rank reduces one part of the tensor, directly
   in the tensors of all ranks.

The transport with the least code is `transports.threads`. For NCCL, begin with the two drawings in `transports.nccl.group`.

You can also follow an error. Suppose that a rank is killed during a collective:

1. Another rank waits, for example in `transports.mpi.node.shared_sync`, and calls `CancelScope.check` (`engine.cancel_scope`)
   now and then. If a library blocks the rank, the monitor (`health.monitor`) asks `health.liveness`.
2. `HostGroup._why_call_cannot_end` asks `health.leaving` for ranks that have left, then `health.liveness` for lost ranks, then
   the group's store for an alarm of another rank. Here, the result is an error of `health.liveness` that names the lost rank.
   Often the library notices the lost rank first: Gloo, for example, reports a broken connection. Then the error of the library
   comes first, and `FailureWords.of` (`engine.failure`) asks `health.liveness` which lost rank is behind this error.
3. `HostGroup._fail` adds the call and the group to the error's text (`engine.failure`), lets `health.report` write a report,
   and tells the other ranks.
4. If the script does not catch the error, one of three printers prints it:

   - under `syncline run`, where Syncline sets no exception hook: `Ending.fail` (`cli.run.ending`), which also ends the job;
   - else over MPI, the hook `transports.mpi.job_abort._on_uncaught`: it calls `last_words` of `startup.uncaught_errors`, and
     ends the job;
   - else the hook that `startup.uncaught_errors` has set.

Ranks find each other through stores. A drawing in `stores.tcp` shows how a client reaches the server.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .public import *  # noqa: F403 - type checkers find the names in `public.__all__`


def __getattr__(name: str) -> Any:
    """Load the public names, and torch, when a program first uses a public name.

    `syncline run` imports this package before the user's script. Until then torch must not be loaded, because the script may
    set variables that torch reads at import, such as OMP_NUM_THREADS.
    """
    value = getattr(import_module(".public", __name__), name, None)
    if value is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module(".public", __name__).__all__})
