"""The group keeps the plans of its transport, one for each signature."""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from syncline.collectives import (
    CollectiveTimeout,
    DisagreementError,
    GroupClosedError,
    InvalidArgumentError,
    ReduceOp,
    TransportError,
    all_reduce,
    premul_sum,
)
from syncline.collectives.api import functional
from syncline.collectives.engine.call import Call, Signature
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.engine.observers import ObservedCall, observe_calls
from syncline.collectives.engine.transport import LibraryPlan, Plan
from syncline.collectives.health.leaving import Leavers
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.threads import InProcessTransport, SharedState

pytestmark = pytest.mark.ranks


class RecordingPlan(LibraryPlan):
    """Does what the transport does; writes down when it was made and when it runs, and may fail."""

    algorithm = "recording"

    def __init__(self, transport: PlanningTransport, signature: Signature) -> None:
        super().__init__(transport, signature)
        self._log = transport.log
        self._planning = transport
        self._log.append("made")

    def run(self, part: torch.Tensor, whole: torch.Tensor | None, call: Call) -> None:
        self._log.append("run")
        self._planning.on_run(call.scope)
        super().run(part, whole, call)


class PlanningTransport(InProcessTransport):
    """Writes down what is planned, and what runs."""

    def __init__(self, shared_state: SharedState, rank: int) -> None:
        super().__init__(shared_state, rank)
        self.log: list[str] = []
        self.on_run: Callable[[CancelScope], object] = lambda scope: None

    def plan(self, signature: Signature) -> Plan:
        return RecordingPlan(self, signature)


def make(
    size: int = 1, rank: int = 0, shared_state: SharedState | None = None, **options
) -> tuple[HostGroup, PlanningTransport]:
    transport = PlanningTransport(shared_state or SharedState(size), rank)
    return HostGroup(transport, rank, size, **{"timeout_s": 20, **options}), transport


def test_a_plan_is_made_for_the_first_call_of_a_signature() -> None:
    group, transport = make()
    for shape, dtype, op in (
        ((6,), torch.float32, ReduceOp.SUM),
        ((6,), torch.float32, ReduceOp.SUM),
        ((2, 3), torch.float32, ReduceOp.SUM),
        ((6,), torch.float32, ReduceOp.MAX),
        ((6,), torch.float64, ReduceOp.SUM),
        ((7,), torch.float32, ReduceOp.SUM),
        ((), torch.float32, ReduceOp.SUM),
    ):
        group.all_reduce(torch.ones(shape, dtype=dtype), op)
    assert transport.log == ["made", "run", "run", *["made", "run"] * 5]


@pytest.mark.parametrize("async_op", [False, True])
def test_the_result_and_the_work_are_the_same(async_op: bool) -> None:
    shared_state = SharedState(2)

    def body(outer) -> list[str]:
        group, transport = make(2, outer.rank, shared_state)
        for number in range(3):
            tensor = torch.arange(6.0).view(2, 3) * (outer.rank + number)
            work = group.all_reduce(tensor, async_op=async_op)
            assert work.wait()
            assert work.is_completed()
            assert work.exception() is None
            assert work.result()[0] is tensor
            assert work.get_future().wait()[0] is tensor
            assert torch.equal(tensor, torch.arange(6.0).view(2, 3) * (2 * number + 1))
        return transport.log

    assert run_ranks(2, body) == [["made", "run", "run", "run"]] * 2


def test_observers_are_told_of_calls_that_have_a_plan() -> None:
    group, transport = make()
    group.all_reduce(torch.ones(6))
    seen: list[ObservedCall] = []
    stop = observe_calls(lambda call, _: seen.append(call) if call.group is group else None)
    group.all_reduce(torch.ones(6))
    stop()
    group.all_reduce(torch.ones(6))
    assert transport.log == ["made", "run", "run", "run"]
    assert [call.name for call in seen] == ["all_reduce"]


def strided() -> torch.Tensor:
    return torch.ones(3, 2).t()


def negated() -> torch.Tensor:
    return torch.full((6,), complex(0, -1)).conj().imag


def of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.ones(6)


@pytest.mark.parametrize(
    "tensor",
    [strided, negated, of_inference, lambda: torch.ones(6, requires_grad=True), lambda: torch.nn.Parameter(torch.ones(6))],
    ids=["strided", "negated", "of inference", "tracked", "parameter"],
)
@pytest.mark.parametrize("async_op", [False, True])
def test_tensors_that_are_not_simple_are_served_by_the_same_plan(tensor: Callable[[], torch.Tensor], async_op: bool) -> None:
    group, transport = make()
    group.all_reduce(torch.ones(tensor().shape))
    for _ in range(2):
        made = tensor()
        group.all_reduce(made, async_op=async_op).wait()
        assert made.tolist() == torch.ones(6).view(made.shape).tolist()
    assert transport.log == ["made", "run", "run", "run"]


def test_complex_conjugates_are_served_by_the_same_plan() -> None:
    group, transport = make()
    for tensor in (torch.full((3,), 1 + 2j), torch.full((3,), 1 + 2j).conj()):
        group.all_reduce(tensor)
    assert transport.log == ["made", "run", "run"]


def test_bad_arguments_are_refused_as_ever() -> None:
    group, transport = make()
    group.all_reduce(torch.ones(6))
    with pytest.raises(InvalidArgumentError, match="expected a reduction of syncline"):
        group.all_reduce(torch.ones(6), "sum")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="found list"):
        group.all_reduce([1.0] * 6)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"BAND is not defined for torch\.float32"):
        group.all_reduce(torch.ones(6), ReduceOp.BAND)
    group.all_reduce(torch.ones(6), premul_sum(2.0))
    assert transport.log == ["made", "run", "made", "run"]


def test_calls_are_compared_before_if_the_group_does_so() -> None:
    shared_state = SharedState(2)

    def body(outer) -> None:
        group, _ = make(2, outer.rank, shared_state, check_calls=True)
        for _ in range(2):
            group.all_reduce(torch.ones(2, 3))
        with pytest.raises(
            DisagreementError, match=r"(?s)rank 0: all_reduce\(float32\[2, 3\].*rank 1: all_reduce\(float32\[3, 2\]"
        ):
            group.all_reduce(torch.ones(2, 3) if outer.rank == 0 else torch.ones(3, 2))

    run_ranks(2, body)


def test_failures_are_told_in_the_groups_words() -> None:
    group, transport = make()
    group.all_reduce(torch.ones(2, 3))

    def fail(scope: CancelScope) -> None:
        raise TransportError("the wire was cut")

    transport.on_run = fail
    with pytest.raises(TransportError, match=r"all_reduce\(float32\[2, 3\], op=SUM\), number 1 on rank 0 .*the wire was cut"):
        group.all_reduce(torch.ones(2, 3))
    with pytest.raises(
        TransportError, match=r"(?s)number 2 on .*was not started because the group had failed before:\n.*was cut"
    ):
        group.all_reduce(torch.ones(2, 3))
    assert transport.log == ["made", "run", "run"]


def test_the_time_limit_holds() -> None:
    group, transport = make(timeout_s=0.05)
    group.all_reduce(torch.ones(3))

    def hang(scope: CancelScope) -> None:
        while True:
            scope.check("nobody came")

    transport.on_run = hang
    with pytest.raises(
        CollectiveTimeout, match=r"(?s)number 1 on .* did not finish within 0\.05 s; look for a rank that died.*\n  nobody came"
    ):
        group.all_reduce(torch.ones(3))


def test_abort_ends_it() -> None:
    group, transport = make()
    group.all_reduce(torch.ones(3))
    is_waiting = threading.Event()

    def wait(scope: CancelScope) -> None:
        is_waiting.set()
        while True:
            scope.check("nobody came")

    def abort() -> None:
        assert is_waiting.wait(10)
        group.abort()

    transport.on_run = wait
    aborting = threading.Thread(target=abort)
    aborting.start()
    with pytest.raises(TransportError, match="the group was aborted"):
        group.all_reduce(torch.ones(3))
    aborting.join()
    with pytest.raises(GroupClosedError):
        group.all_reduce(torch.ones(3))
    assert transport.log == ["made", "run", "run"]


def test_a_closed_group_refuses() -> None:
    group, transport = make()
    group.all_reduce(torch.ones(3))
    group.close()
    with pytest.raises(GroupClosedError, match="the group is closed"):
        group.all_reduce(torch.ones(3))
    assert transport.log == ["made", "run"]


def test_a_call_that_finishes_while_the_group_is_closed_keeps_no_plan() -> None:
    group, transport = make()
    gate = threading.Event()
    group.all_reduce(torch.ones(5))
    group._queue.enqueue(lambda: gate.wait(10) and None)
    group.all_reduce(torch.ones(5), async_op=True)
    last = group.all_reduce(torch.ones(3), async_op=True)
    assert not last.is_completed()
    threading.Timer(0.05, gate.set).start()
    group.close()
    assert last.is_completed()
    with pytest.raises(GroupClosedError, match="the group is closed"):
        group.all_reduce(torch.ones(3))
    assert transport.log == ["made", "run", "run", "made", "run"]
    assert not group._plans


def test_it_has_its_place_in_the_total_order() -> None:
    """Behind what is queued, and in a callback at once."""
    group, transport = make()
    group.all_reduce(torch.ones(3))
    gate, order = threading.Event(), []
    transport.on_run = lambda scope: order.append("held")
    group._queue.enqueue(lambda: gate.wait(10) and None)
    held = group.all_reduce(torch.ones(3), async_op=True)
    inner = torch.ones(3)

    def issue_another(_: object) -> None:
        transport.on_run = lambda scope: order.append("in the callback")
        group.all_reduce(inner)
        transport.on_run = lambda scope: order.append("behind")

    held.get_future().then(issue_another)
    threading.Timer(0.05, gate.set).start()
    group.all_reduce(torch.ones(3))
    assert order == ["held", "in the callback", "behind"]


def test_many_kinds_are_not_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("syncline.collectives.engine.engine_group.MOST_PLANS", 4)
    group, transport = make()
    for numel in range(1, 10):
        group.all_reduce(torch.ones(numel))
        assert len(group._plans) <= 4
    group.all_reduce(torch.ones(9))
    assert transport.log == ["made", "run"] * 9 + ["run"]


def test_the_algorithm_of_the_latest_call_is_told() -> None:
    group, _ = make()
    assert group.algorithm_of("all_reduce", torch.ones(3)) is None
    group.all_reduce(torch.ones(3), ReduceOp.MAX)
    group.broadcast(torch.ones(3))
    assert group.algorithm_of("all_reduce", torch.zeros(3)) == "recording"
    assert group.algorithm_of("all_reduce", torch.zeros(1, 3)) is None
    assert group.algorithm_of("all_reduce", torch.zeros(4)) is None
    assert group.algorithm_of("broadcast", torch.zeros(3)) == "recording"


def test_the_algorithm_is_told_while_calls_begin() -> None:
    group, _ = make()

    class Name(str):
        def __eq__(self, other: object) -> bool:
            group.all_reduce(torch.ones(len(group._plans) + 1))
            return super().__eq__(other)

        __hash__ = str.__hash__

    for numel in (1, 2):
        group.all_reduce(torch.ones(numel))
    assert group.algorithm_of(Name("all_reduce"), torch.zeros(1)) == "recording"


def test_the_record_says_where_a_call_by_a_kept_plan_was_made() -> None:
    group, transport = make()
    tensor = torch.ones(3)

    def by_method() -> None:
        group.all_reduce(tensor)

    def by_functional_form() -> None:
        all_reduce(tensor, group=group)

    calls = [by_method, by_functional_form] * 2
    for call in calls:
        call()
    assert transport.log == ["made", "run", "run", "run", "run"]
    assert [record.where for record in group.recorder.records()] == [
        f"test_plans.py:{call.__code__.co_firstlineno + 1}" for call in calls
    ]


GATHER, SCATTER = "all_gather_into_tensor", "reduce_scatter_tensor"


def call_with_block(group: HostGroup, name: str, part: torch.Tensor, block: torch.Tensor, *, is_method: bool = True) -> None:
    """By the method or the functional form: both take first what is written."""
    tensors = (block, part) if name == GATHER else (part, block)
    if is_method:
        assert getattr(group, name)(*tensors).result() == [tensors[0]]
    else:
        assert getattr(functional, name)(*tensors, group=group) is None


def in_rows(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((3,), rank + 1.0), torch.ones(2, 3)


def part_of_its_block(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    block = torch.ones(6)
    return block[rank * 3 : rank * 3 + 3].fill_(rank + 1.0), block


def with_gaps(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((3,), rank + 1.0), torch.ones(6, 2)[:, 0]


def tracked(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((3,), rank + 1.0), torch.ones(6).requires_grad_()


@pytest.mark.parametrize("is_method", [True, False])
@pytest.mark.parametrize("made", [in_rows, part_of_its_block, with_gaps, tracked])
@pytest.mark.parametrize("name", [GATHER, SCATTER])
def test_parts_and_blocks_by_kept_plans(name: str, made: Callable[[int], Any], is_method: bool) -> None:
    shared_state = SharedState(2)

    def body(outer) -> None:
        group, transport = make(2, outer.rank, shared_state)
        for _ in range(3):
            part, block = made(outer.rank)
            if name == GATHER and block.requires_grad:
                block = block.detach()
            call_with_block(group, name, part, block, is_method=is_method)
            if name == GATHER:
                assert block.flatten().tolist() == [1.0] * 3 + [2.0] * 3
            elif made is part_of_its_block:
                assert part.tolist() == [outer.rank + 2.0] * 3
            else:
                assert part.tolist() == [2.0] * 3
        assert transport.log == ["made", "run", "run", "run"]
        assert [record.name for record in group.recorder.records()] == [name] * 3

    run_ranks(2, body)


def test_calls_by_kept_plans_are_told_to_those_who_wait_for_a_rank_that_leaves() -> None:
    leavers = Leavers(list)
    group, transport = make(leavers=leavers.group("default", [0]))
    for _ in range(2):
        group.all_reduce(torch.ones(3))
    assert transport.log == ["made", "run", "run"]
    assert list(leavers.own().values()) == [2]
    assert [record.position for record in group.recorder.records()] == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("is_method", [True, False])
@pytest.mark.parametrize("name", [GATHER, SCATTER])
def test_bad_blocks_are_refused_as_ever(name: str, is_method: bool, dtype: torch.dtype) -> None:
    group, transport = make()
    memory = torch.ones(4, dtype=dtype)
    call_with_block(group, name, memory[:3], torch.ones(3, dtype=dtype))
    for block, reason in (
        (torch.ones(4, dtype=dtype), "to hold 1 times"),
        (torch.ones(3, dtype=torch.float64), "to hold 1 times"),
        (memory[1:], "shares memory with"),
        ([1.0] * 3, "found list"),
        (None, "found NoneType"),
    ):
        with pytest.raises(InvalidArgumentError, match=reason):
            call_with_block(group, name, memory[:3], block, is_method=is_method)  # type: ignore[arg-type]
    call_with_block(group, name, memory[:3], memory[:3], is_method=is_method)
    assert transport.log == ["made", "run", "run"]


@pytest.mark.parametrize("name", [GATHER, SCATTER])
def test_a_part_is_not_its_own_block(name: str) -> None:
    shared_state = SharedState(2)

    def body(outer) -> None:
        group, transport = make(2, outer.rank, shared_state)
        part = torch.ones(3)
        call_with_block(group, name, part, torch.ones(6))
        for is_method in (True, False):
            with pytest.raises(InvalidArgumentError, match="to hold 2 times"):
                call_with_block(group, name, part, part, is_method=is_method)
        assert transport.log == ["made", "run"]

    run_ranks(2, body)


def test_a_thread_may_run_a_functional_form_and_nothing_else() -> None:
    group, transport = make()
    tensor = torch.ones(3)
    all_reduce(tensor, group=group)
    _thread.start_new_thread(all_reduce, (tensor,), {"group": group})
    end = time.monotonic() + 20
    while [record.state for record in group.recorder.records()] != ["done", "done"] and time.monotonic() < end:
        time.sleep(0.001)
    assert transport.log == ["made", "run", "run"]
    assert [record.where for record in group.recorder.records()][1] == "?"


@pytest.mark.parametrize("name", [GATHER, SCATTER])
def test_conjugated_blocks_are_served_by_the_same_plan(name: str) -> None:
    group, transport = make()
    for is_conjugated in (False, True):
        part, block = torch.full((3,), 1 + 2j), torch.full((3,), 1 - 2j)
        if is_conjugated:
            block = block.conj()
        call_with_block(group, name, part, block)
        written = block if name == GATHER else part
        assert written.tolist() == [1 + 2j if name == GATHER or is_conjugated else 1 - 2j] * 3
    assert transport.log == ["made", "run", "run"]
