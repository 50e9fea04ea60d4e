"""One rank of `dev.py bench growth`: GROWTH_JOB RANK WORLD_SIZE FOLDER; under mpiexec RANK is "mpi"."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from benchmarks.growth_counting import CountingStore, Counts, counts
from syncline.collectives import CollectiveTimeout, ProcessGroup, get_default_group, init_process_group, new_group
from syncline.collectives.engine.call import Call, Signature
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.ddp import DistributedDataParallel

_SETTLE_S = 0.3
"""The kernel's counters are read so long after all ranks have done what is counted."""
_HANDSHAKE_S = 30.0
_MEET_S = 120.0
"""If a rank has failed, the others end after this time, so that its error is shown. pytest would end all of them without it."""
_LIMIT_S = 1.0
"""Of the group in which a rank does not come."""


class Count:
    """Counts what this rank does in each phase.

    Args:
        store: the store in which the ranks meet, or None.
        meet: returns when all ranks have reached the moment of this name; sends nothing that is counted.
    """

    def __init__(self, store: CountingStore | None, meet: Callable[[str], None]) -> None:
        self.phases: dict[str, Counts] = {}
        self._store = store
        self._meet = meet

    def during(self, phase: str, action: Callable[[], object]) -> None:
        """Count what this action sends, which all ranks perform."""
        before = self._counts(f"before {phase}")
        action()
        self.phases[phase] = self._counts(phase).since(before)

    def _counts(self, moment: str) -> Counts:
        self._meet(moment)
        time.sleep(_SETTLE_S)
        found = counts(self._store)
        self._meet(f"{moment}, counted")
        return found


def main(place: str, size: int, folder: Path) -> None:
    """Every rank counts, and leaves the result in the folder."""
    torch.set_num_threads(1)
    options = json.loads((folder / "options.json").read_text())
    store = None if place == "mpi" else CountingStore(*options["store"])
    count = Count(store, functools.partial(_meet, folder, size))
    if place == "mpi":
        count.during("start of MPI", lambda: _play_hosts(options["per_host"]))
        count.during("start-up", lambda: init_process_group("mpi"))
    else:
        _be_on_host(int(place) // options["per_host"])
        count.during("start-up", lambda: init_process_group("gloo", store=store, rank=int(place), world_size=size))
    group = get_default_group()
    _count_calls(count, group)
    _count_training(count, group)
    kept = [new_group()]
    count.during("new_group", lambda: kept.append(new_group()))
    late = group.split(0, timeout_s=_LIMIT_S)
    assert late is not None
    count.during("a rank is missing", functools.partial(_wait_in_vain, late))
    found = {phase: found._asdict() for phase, found in count.phases.items()}
    (folder / f"rank-{group.rank}.json").write_text(json.dumps(found))
    group.barrier()


def _count_calls(count: Count, group: ProcessGroup) -> None:
    """Count the second call of each kind: the first makes plans, connections and the barrier in shared memory."""
    calls: dict[str, Callable[[], object]] = {
        "allocate": functools.partial(group.allocate, 1 << 20, torch.float32),
        "comparison of calls": functools.partial(_compare, group),
    }
    if group.backend_name == "mpi":
        calls["handshake"] = functools.partial(_shake_hands, group)
    for call in calls.values():
        call()
    for name, call in calls.items():
        count.during(name, call)


def _count_training(count: Count, group: ProcessGroup) -> None:
    model = torch.nn.Linear(8, 8)
    made: list[DistributedDataParallel] = []
    count.during("construction of DDP", lambda: made.append(DistributedDataParallel(model, process_group=group)))

    def step() -> None:
        made[0](torch.ones(1, 8)).sum().backward()

    for _ in range(2):  # the second begins with the buckets that were rebuilt after the first
        step()
    count.during("step", step)


def _meet(folder: Path, size: int, moment: str) -> None:
    """Meet by files: each rank makes one."""
    (folder / f"{moment} {os.getpid()}").touch()
    end_s = time.monotonic() + _MEET_S
    while (came := len(list(folder.glob(f"{moment} *")))) < size:
        assert time.monotonic() < end_s, f"only {came} of {size} ranks came to: {moment}; look for a rank that failed"
        time.sleep(0.02)


def _shake_hands(group: Any) -> None:
    """The messages before a large call; counted alone, because a large call varies in its number of segments."""
    call = Call(Signature("handshake"), scope=CancelScope(_HANDSHAKE_S))
    group._transport.sync(call).compare(call)


def _compare(group: ProcessGroup) -> None:
    work = group.agree_on_calls()
    if work is not None:
        work.wait()


def _wait_in_vain(group: ProcessGroup) -> None:
    if group.rank < group.size - 1:
        with suppress(CollectiveTimeout):
            group.all_reduce(torch.ones(1))


def _play_hosts(per_host: int) -> None:
    """Let this many neighbouring ranks share a host. All run on this one, where MPI uses only TCP."""
    from mpi4py import MPI

    from syncline.collectives.transports.mpi.node import node_transport

    def by_host(communicator: MPI.Intracomm) -> MPI.Comm:
        rank = communicator.Get_rank()
        return communicator.Split(rank // per_host, rank)

    node_transport.NodeTransport = functools.partial(node_transport.NodeTransport, split=by_host)  # type: ignore[assignment, misc]


def _be_on_host(number: int) -> None:
    """Make this process appear to be on the host with this number."""
    from dataclasses import replace

    from syncline.collectives.health.liveness import own_identity
    from syncline.collectives.startup import meeting

    mine = own_identity()
    assert mine is not None
    meeting.own_identity = lambda: replace(mine, node=f"host {number}")  # type: ignore[attr-defined]


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
