"""What recording and comparing calls costs: `dev.py bench call_records`.

First the time of one record and of one digest alone, in microseconds. Then small `all_reduce`s and steps of three buckets with
and without, on MPI in shared memory, on MPI with each rank on a node of its own, so that calls are compared later, and on
Gloo; interleaved, medians and quartiles.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from syncline.collectives import ProcessGroup, ReduceOp
from syncline.collectives.engine.call import DONE, Call, Signature
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.engine.group import HostGroup
from syncline.collectives.health.agreement import Agreement, MessageCarrier
from syncline.collectives.health.recorder import Recorder
from syncline.collectives.transports.threads import InProcessTransport, SharedState

_BUCKETS = (256 * 1024, 6_250_000, 6_250_000)


class NoRecorder(Recorder):
    """Remembers nothing: for comparison."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.add = lambda _: None

    def begin(self, call: Call) -> None:
        pass


def alone(*, rounds: int = 25, repetitions: int = 4_000) -> None:
    """The processor time of the record and of the digest of one call: interleaved with an empty call, medians and quartiles.

    Processor time of this thread, so that what else runs on the machine matters less.
    """
    recorder, tensor = Recorder("default", 0, [0, 1]), torch.ones(1)
    agreement = Agreement(MessageCarrier(InProcessTransport(SharedState(1), 0), 0, 1), 0, recorder)
    signature = Signature.of("all_reduce", tensor, ReduceOp.SUM)

    def recorded() -> None:
        call = Call(signature, 1, (), (tensor,))
        recorder.add(call)
        recorder.begin(call)
        call.is_over(DONE)

    def digested() -> None:
        agreement.add(signature.digest())

    actions: dict[str, Callable[[], object]] = {"nothing": lambda: None, "record": recorded, "digest": digested}
    figures: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds):
        for name, action in actions.items():
            began = time.thread_time()
            for _ in range(repetitions):
                action()
            figures[name].append((time.thread_time() - began) / repetitions * 1e6)
    for name in ("record", "digest"):
        print(
            f"{name} of a call: {_middle([one - none for one, none in zip(figures[name], figures['nothing'], strict=True)], 2)}"
        )


def step(group: ProcessGroup, buckets: Sequence[torch.Tensor], *, compares: bool) -> None:
    """The collectives of a backward with three buckets."""
    works = [group.all_reduce(bucket, ReduceOp.AVG, async_op=True) for bucket in buckets]
    comparison = group.agree_on_calls(async_op=True) if compares else None
    for work in works:
        work.wait()
    if comparison is not None:
        comparison.wait()


def side_by_side(name: str, make: Callable[[str], HostGroup], rounds: int) -> None:
    """Small calls and steps with recording and comparison, without the latter, and without both."""
    groups = {"both": make("both"), "recorded": make("recorded"), "neither": make("neither")}
    for which in ("recorded", "neither"):
        groups[which]._compares_later = False
    groups["neither"].recorder = NoRecorder("neither", 0, [0])
    single = {"4 B all_reduce": torch.ones(1), "64 KiB all_reduce": torch.ones(16 * 1024)}
    buckets = [torch.ones(numel) for numel in _BUCKETS]
    figures: dict[tuple[str, str], list[float]] = {}
    order = random.Random(0)  # the same on all ranks
    for _ in range(rounds):
        for which, group in order.sample(sorted(groups.items()), len(groups)):
            for what, tensor in single.items():
                group.all_reduce(tensor)
                began = time.perf_counter()
                for _ in range(50):
                    group.all_reduce(tensor)
                figures.setdefault((what, which), []).append((time.perf_counter() - began) / 50 * 1e6)
            began = time.perf_counter()
            step(group, buckets, compares=which == "both")
            figures.setdefault(("step, 3 buckets, 51 MB", which), []).append((time.perf_counter() - began) * 1e6)
    if next(iter(groups.values())).rank == 0:
        for what in (*single, "step, 3 buckets, 51 MB"):
            said = [f"{which} {_middle(figures[what, which])}" for which in groups]
            print(f"{name}: {what}: {', '.join(said)}", flush=True)
    for group in groups.values():
        group.close()


def _middle(figures_us: Sequence[float], digits: int = 1) -> str:
    """Median and quartiles."""
    low, middle, high = (f"{figure:.{digits}f}" for figure in statistics.quantiles(figures_us, n=4))
    return f"{middle} [{low} {high}] us"


def over_backends(rounds: int) -> None:
    """Alone on rank 0, then over MPI with and without shared memory, and Gloo."""
    import torch.distributed as dist
    from mpi4py import MPI

    from syncline.collectives.transports import gloo
    from syncline.collectives.transports.mpi.node.node_transport import NodeTransport

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    if rank == 0:
        alone()
    world.Barrier()
    store = dist.FileStore(world.bcast(tempfile.mkdtemp() + "/store"), size)

    def over_gloo(name: str) -> HostGroup:
        return HostGroup(gloo.connect(store, rank, size, name, CancelScope(60.0)), rank, size, name=name, timeout_s=60)

    def over_mpi(name: str) -> HostGroup:
        transport = NodeTransport(world.Dup(), split=lambda communicator: communicator.Split(communicator.Get_rank(), 0))
        return HostGroup(transport, rank, size, name=name, timeout_s=60)

    def on_node(name: str) -> HostGroup:
        return HostGroup(NodeTransport(world.Dup()), rank, size, name=name, timeout_s=60)

    side_by_side("mpi, shared memory", on_node, rounds)
    side_by_side("mpi, messages", over_mpi, rounds)
    side_by_side("gloo", over_gloo, rounds)


def main() -> int:
    """As the module says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    over_backends(options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
