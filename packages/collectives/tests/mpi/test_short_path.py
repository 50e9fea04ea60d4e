"""How many functions a small collective by a kept plan calls: features add up there, each too small for a timing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch

pytest.importorskip("mpi4py")

from syncline.collectives import ReduceOp, all_reduce, broadcast
from syncline.collectives.backends.in_process import InProcessTransport, SharedState
from syncline.collectives.backends.mpi.node.algorithm import Operation, size_of
from syncline.collectives.backends.mpi.node.eager_exchange import EagerExchange
from syncline.collectives.backends.mpi.node.plan import PlanRequest
from syncline.collectives.backends.mpi.node.shm_barrier import ShmBarrier, barrier_bytes
from syncline.collectives.contract.deadline import Deadline
from syncline.collectives.default_group import default_group
from syncline.collectives.host.departures import Departures
from syncline.collectives.host.host_group import HostGroup
from syncline.collectives.host.shared_memory.segment import Segment, create_file, padded
from syncline.collectives.host.transport import CallKind, Plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's")

SLOT_BYTES = 1024
CALL_BYTES = 16


class BarrierSync:
    """What the plan asks of a `GroupSync`."""

    def __init__(self, barrier: ShmBarrier) -> None:
        self._barrier = barrier

    def barrier(self, *_: Any) -> ShmBarrier:
        return self._barrier


class EagerTransport(InProcessTransport):
    """Plans as the ranks of a node do, with a barrier in shared memory."""

    verifies_every_call = True  # type: ignore[assignment]

    def __init__(self, barrier: ShmBarrier) -> None:
        super().__init__(SharedState(2), 0)
        self._sync: Any = BarrierSync(barrier)

    def plan(self, kind: CallKind) -> Plan:
        operation = Operation[kind.name.upper()]
        return EagerExchange(PlanRequest(kind, operation, size_of(operation, CALL_BYTES, 2), None, self._sync), None)


class Peer:
    """The other rank: it is always there first, so that nobody waits."""

    def __init__(self, barrier: ShmBarrier) -> None:
        self._barrier = barrier

    def arrive(self, tensor: torch.Tensor, digest: int) -> None:
        self._barrier.slots((self._barrier.arrivals + 1) & 1, tensor.numel(), tensor.dtype)[1].copy_(tensor)
        with suppress(TimeoutError):  # it has arrived, and nobody else has
            self._barrier.arrive_and_wait(Deadline(1e-9), digest)


@pytest.fixture
def barriers() -> Iterator[list[ShmBarrier]]:
    part_bytes = barrier_bytes(SLOT_BYTES)
    file = create_file("test", 2 * padded(part_bytes))
    try:
        segments = [Segment(file, 2, part_bytes, mine) for mine in (0, 1)]
        yield [ShmBarrier(segment, SLOT_BYTES, lambda: None) for segment in segments]
    finally:
        os.close(file)


def functions_called_by(call: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> tuple[list[str], list[str]]:
    """Those of Python, and builtins, in their order."""
    ours: list[str] = []
    builtins: list[str] = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            ours.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)
        elif event == "c_call":
            builtins.append(argument.__name__)

    sys.setprofile(note)
    try:
        call(tensor)
    finally:
        sys.setprofile(None)
    builtins.remove("setprofile")
    return ours, builtins


# With how many of Python's functions and how many builtins each call needs. Whoever adds one takes another one out, or says in
# docs/figures.md what it is for and what it costs.
CALLS = [
    (CallKind("all_reduce", ReduceOp.SUM, None, torch.float32, 4), all_reduce, 6.0, 13, 17),
    (CallKind("broadcast", None, 1, torch.float32, 4), partial(broadcast, src=1), 3.0, 16, 20),
]


@pytest.mark.parametrize(
    ("kind", "call", "expected", "most", "most_builtins"), CALLS, ids=lambda value: getattr(value, "name", "")
)
def test_a_small_call_by_a_kept_plan_calls_few_functions(
    barriers: list[ShmBarrier],
    monkeypatch: pytest.MonkeyPatch,
    kind: CallKind,
    call: Callable[[torch.Tensor], object],
    expected: float,
    most: int,
    most_builtins: int,
) -> None:
    peer = Peer(barriers[1])
    calls = Departures(list).group("default", [0, 1])
    group = HostGroup(EagerTransport(barriers[0]), 0, 2, timeout_s=20, calls=calls)
    monkeypatch.setattr(default_group, "_default", group)
    tensor = torch.zeros(4)
    for number in range(3):  # the first makes the plan
        peer.arrive(torch.full((4,), number + 1.0), kind.digest())
        ours, builtins = functions_called_by(call, tensor)
    assert tensor.tolist() == [expected] * 4
    assert group.algorithm_of(kind.name, tensor) == "eager"
    assert all(record.where.startswith("test_short_path.py:") for record in group.recorder.records())
    assert len(ours) <= most, " ".join(ours)
    assert len(builtins) <= most_builtins, " ".join(builtins)
    group.abort()
