"""What recording and verifying calls costs: `python -m benchmarks.call_records`, alone or under mpiexec.

Alone: the time of one record and of one digest, in microseconds. Under mpiexec: small `all_reduce`s and DDP-like steps with and
without, on MPI (each rank on a node of its own, so that calls are verified later) and on Gloo, interleaved, medians.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from syncline.collectives import ProcessGroup, ReduceOp
from syncline.collectives.contract.collective import Collective
from syncline.collectives.failures.call_digest import CallDigest
from syncline.collectives.failures.flight_recorder import FlightRecorder
from syncline.collectives.host.host_group import HostGroup

_BUCKETS = (256 * 1024, 6_250_000, 6_250_000)


class NoRecorder(FlightRecorder):
    """Remembers nothing: for comparison."""

    def issue(self, *_: Any, **__: Any) -> list[Any]:
        return []

    def begin(self, entry: list[Any]) -> None:
        pass

    def end(self, entry: list[Any]) -> None:
        pass


def one_call_us(action: Callable[[], object], *, repetitions: int = 20_000, rounds: int = 7) -> float:
    """The median over rounds, in microseconds."""
    figures = []
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(repetitions):
            action()
        figures.append((time.perf_counter() - began) / repetitions * 1e6)
    return statistics.median(figures)


def alone() -> None:
    """The record and the digest of one call."""
    recorder, digest, tensor = FlightRecorder("default", 0, [0, 1]), CallDigest(), torch.ones(16)

    def user(depth: int) -> None:
        if depth:
            user(depth - 1)
            return
        entry = recorder.issue(1, "all_reduce", tensor, ReduceOp.SUM)
        recorder.begin(entry)
        recorder.end(entry)

    def digested() -> None:
        digest.add(Collective("all_reduce", tensor, ReduceOp.SUM).digest())

    empty = one_call_us(lambda: None)
    print(f"record of a call: {one_call_us(lambda: user(0)) - empty:.2f} us")
    print(f"digest of a call: {one_call_us(digested) - empty:.2f} us")


def step(group: ProcessGroup, buckets: Sequence[torch.Tensor], *, verifies: bool) -> None:
    """The collectives of a backward with three buckets."""
    works = [group.all_reduce(bucket, ReduceOp.AVG, async_op=True) for bucket in buckets]
    verification = group.verify_calls(async_op=True) if verifies else None
    for work in works:
        work.wait()
    if verification is not None:
        verification.wait()


def side_by_side(name: str, make: Callable[[str], HostGroup], rounds: int) -> None:
    """Small calls and steps with recording and verification, without the latter, and without both."""
    groups = {"both": make("both"), "recorded": make("recorded"), "neither": make("neither")}
    for which in ("recorded", "neither"):
        groups[which]._verification = None
    groups["neither"].recorder = NoRecorder("neither", 0, [0])
    tiny, buckets = torch.ones(16), [torch.ones(numel) for numel in _BUCKETS]
    figures: dict[tuple[str, str], list[float]] = {}
    order = random.Random(0)  # the same on all ranks
    for _ in range(rounds):
        for which, group in order.sample(sorted(groups.items()), len(groups)):
            group.all_reduce(tiny)
            began = time.perf_counter()
            for _ in range(50):
                group.all_reduce(tiny)
            figures.setdefault(("64 B all_reduce", which), []).append((time.perf_counter() - began) / 50 * 1e6)
            began = time.perf_counter()
            step(group, buckets, verifies=which == "both")
            figures.setdefault(("step, 3 buckets, 51 MB", which), []).append((time.perf_counter() - began) * 1e6)
    if next(iter(groups.values())).rank == 0:
        for what in ("64 B all_reduce", "step, 3 buckets, 51 MB"):
            said = [f"{which} {_middle(figures[what, which])}" for which in groups]
            print(f"{name}: {what}: {', '.join(said)}", flush=True)
    for group in groups.values():
        group.close()


def _middle(figures_us: Sequence[float]) -> str:
    """Median and quartiles."""
    low, middle, high = statistics.quantiles(figures_us, n=4)
    return f"{middle:.1f} [{low:.1f} {high:.1f}] us"


def under_mpiexec(rounds: int) -> None:
    """Over MPI with and without shared memory, and Gloo."""
    import torch.distributed as dist
    from mpi4py import MPI

    from syncline.collectives.backends import gloo
    from syncline.collectives.backends.mpi.node.node_transport import NodeTransport

    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    store = dist.FileStore(world.bcast(tempfile.mkdtemp() + "/store"), size)

    def over_gloo(name: str) -> HostGroup:
        return HostGroup(gloo.connect(store, rank, size, name, 60.0, "127.0.0.1"), rank, size, name=name, timeout_s=60)

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
    from syncline.collectives.startup.launch import detect_launch

    if detect_launch(os.environ) is None:
        alone()
    else:
        under_mpiexec(options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
