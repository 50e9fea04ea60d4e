"""The record of a group's calls over NCCL, and its comparison between the ranks."""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import CollectiveTimeout, DisagreementError, MisuseError, ReduceOp, TransportError
from syncline.collectives.engine.call import DONE, FAILED
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.engine.tags import FIRST_NCCL_AGREEMENT, ReservedTag
from syncline.collectives.group import ProcessGroup
from syncline.collectives.health import agreement as history_verification
from syncline.collectives.health.report import Reporter
from syncline.collectives.startup.backend import ConnectRequest
from syncline.collectives.testing.ranks import run_ranks
from syncline.collectives.transports.nccl import group as group_module
from syncline.collectives.transports.nccl import library, rendezvous
from syncline.collectives.transports.nccl.backend import NcclBackend
from syncline.collectives.transports.nccl.connections import Connector
from syncline.collectives.transports.nccl.group import NcclGroup
from syncline.collectives.transports.nccl.work import StreamWork
from test_support.fake_device import FakeDevice
from test_support.fake_nccl import FakeNccl
from test_support.fake_nccl_group import NcclGroupOnFakes, run_on_fakes

pytestmark = pytest.mark.ranks
PATIENCE_S = 20.0
OVER = pytest.mark.parametrize("over_host_group", [False, True], ids=["store", "host group"])


def until_failed(group: NcclGroup, work: StreamWork) -> None:
    """Wait for the watchdog to end the group."""
    deadline = CancelScope(PATIENCE_S)
    while group._in_flight.failure is None and not deadline.is_over():
        time.sleep(0.005)
    work.wait(PATIENCE_S)


def until_found(group: NcclGroup) -> str:
    """What ended the group, once the comparison beside the step has found it."""
    deadline = CancelScope(PATIENCE_S)
    while group._in_flight.failure is None and not deadline.is_over():
        time.sleep(0.005)
    with pytest.raises(TransportError, match="had failed before") as raised:
        group.all_reduce(torch.ones(1))
    assert isinstance(raised.value.__cause__, DisagreementError)
    return str(raised.value.__cause__)


def test_each_call_is_recorded() -> None:
    def body(group: NcclGroup) -> None:
        group.all_reduce(torch.ones(3, 2), ReduceOp.MAX)
        group.broadcast(torch.ones(4, dtype=torch.int32), 1)
        with group.coalescing():
            works = [group.all_reduce(torch.ones(1), async_op=True) for _ in range(2)]
        for work in works:
            work.wait()
        if group.rank == 0:
            group.send(torch.ones(1), 1)
        else:
            group.recv(torch.ones(1), 0)
        group.barrier()
        records = group.recorder.records()
        transfers = [record for record in records if record.position is None]
        placed = [record for record in records if record.position is not None]
        assert [record.name for record in placed] == ["all_reduce", "broadcast", "all_reduce", "all_reduce", "barrier"]
        assert [record.position for record in placed] == [0, 1, 2, 3, 4]
        assert placed[0].words == "all_reduce(float32[3, 2], op=MAX)"
        assert placed[1].words == "broadcast(int32[4], root=1)"
        assert [record.name for record in transfers] == ["send" if group.rank == 0 else "recv"]
        assert all(record.where.startswith("test_issued_calls.py:") for record in records)

    run_on_fakes(2, body)


def test_what_is_over_is_done_in_the_record() -> None:
    def body(group: NcclGroup) -> None:
        group.all_reduce(torch.ones(1))
        assert group._in_flight.drain(PATIENCE_S)
        assert [record.state for record in group.recorder.records()] == [DONE]

    run_on_fakes(2, body)


def test_a_timeout_writes_a_report(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    def body(group: NcclGroup) -> None:
        group.report_to(Reporter("job", group.rank, group.size, str(tmp_path)))
        group.all_reduce(torch.ones(1))
        assert group._in_flight.drain(PATIENCE_S)
        if group.rank == 0:
            work = group.all_reduce(torch.ones(5), async_op=True)
            work.launch.scope.cancel(TimeoutError())
            with pytest.raises(CollectiveTimeout, match=r"read it with `syncline report`"):
                until_failed(group, work)
        both.wait(PATIENCE_S)
        group.abort()

    run_on_fakes(2, body)
    (path,) = tmp_path.glob("syncline-report-job/rank-0.*.json")
    (written,) = json.loads(path.read_text())["groups"]
    assert [call["words"] for call in written["calls"]] == ["all_reduce(float32[1], op=SUM)", "all_reduce(float32[5], op=SUM)"]
    assert written["calls"][1]["state"] not in (DONE, FAILED)


@OVER
def test_a_barrier_tells_of_another_call(over_host_group: bool) -> None:
    """What NCCL does not reduce itself is exchanged alike, and reduced on each rank: nobody would know."""

    def body(group: NcclGroup) -> None:
        group.all_reduce(torch.ones(2, dtype=torch.int32), ReduceOp.BAND if group.rank == 0 else ReduceOp.BOR)
        with pytest.raises(DisagreementError, match=r"rank 1 called all_reduce\(int32\[2\], op=BOR\) #0 at test_"):
            group.barrier()

    run_on_fakes(2, body, over_host_group=over_host_group)


@OVER
def test_a_barrier_tells_of_calls_that_never_end(over_host_group: bool) -> None:
    """NCCL waits for ever in calls of different sizes, and so in the barrier behind them."""

    def body(group: NcclGroup) -> None:
        group.barrier()
        group.all_reduce(torch.ones(4 + group.rank), async_op=True)
        with pytest.raises(DisagreementError, match=r"rank 1 called all_reduce\(float32\[5\], op=SUM\) #1 at test_"):
            group.barrier()
        group.abort()

    run_on_fakes(2, body, over_host_group=over_host_group)


@OVER
def test_a_difference_is_found_beside_a_step(over_host_group: bool) -> None:
    def body(group: NcclGroup) -> None:
        group.all_reduce(torch.ones(2, dtype=torch.int32), ReduceOp.BAND if group.rank == 0 else ReduceOp.BOR)
        assert group.agree_on_calls(async_op=True) is None
        assert "different collectives" in until_found(group)

    run_on_fakes(2, body, over_host_group=over_host_group)


def test_close_tells_of_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_CLOSE_S", PATIENCE_S)

    def body(group: NcclGroup) -> None:
        group.all_reduce(torch.ones(2, dtype=torch.int32), ReduceOp.BAND if group.rank == 0 else ReduceOp.BOR)
        with pytest.raises(DisagreementError, match="different collectives"):
            group.close()

    run_on_fakes(2, body)


@OVER
def test_close_does_not_wait_long_for_a_comparison_that_began_before(
    monkeypatch: pytest.MonkeyPatch, over_host_group: bool
) -> None:
    """The other rank has ended before it came to the comparison."""
    begun, closed = threading.Event(), threading.Event()
    compare = history_verification.Agreement.same_history

    def noted(agreement: history_verification.Agreement, *arguments: Any) -> None:
        begun.set()
        compare(agreement, *arguments)

    monkeypatch.setattr(history_verification.Agreement, "same_history", noted)

    def body(group: NcclGroup) -> None:
        group.all_reduce(torch.ones(2))
        if group.rank == 0:
            group.agree_on_calls(async_op=True)
            assert begun.wait(PATIENCE_S)
            began_s = time.monotonic()
            group.close()
            assert time.monotonic() - began_s < PATIENCE_S / 2
            closed.set()
        assert closed.wait(2 * PATIENCE_S)
        group.abort()

    run_on_fakes(2, body, timeout_s=2 * PATIENCE_S, over_host_group=over_host_group)


def test_calls_are_compared_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_verification, "COMPARE_EVERY_CALLS", 3)

    def body(group: NcclGroup) -> None:
        group.all_reduce(torch.ones(2, dtype=torch.int32), ReduceOp.BAND if group.rank == 0 else ReduceOp.BOR)
        for _ in range(2):
            group.all_reduce(torch.ones(1), async_op=True)
        until_found(group)

    run_on_fakes(2, body)


def test_many_ranks_compare_some_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_COMPARED_EACH_TIME", 1)

    def body(group: NcclGroup) -> None:
        group.all_reduce(torch.ones(2, dtype=torch.int32), ReduceOp.BAND if group.rank == 0 else ReduceOp.BOR)
        for _ in range(2):
            group.agree_on_calls(async_op=True)
        group._comparing.drain(PATIENCE_S)
        assert group._in_flight.failure is None
        group.agree_on_calls(async_op=True)
        until_found(group)

    run_on_fakes(3, body)


# ---- each call is compared before it is issued ----


@OVER
def test_with_check_calls_a_call_that_differs_raises_before_data_moves(over_host_group: bool) -> None:
    def body(group: NcclGroup) -> None:
        group.all_reduce(torch.ones(2))
        tensor = torch.full((4 + group.rank,), 7.0)
        with pytest.raises(DisagreementError, match=r"rank 1: all_reduce\(float32\[5\], op=SUM\)"):
            group.all_reduce(tensor)
        assert tensor.eq(7).all()
        assert [(record.position, record.state) for record in group.recorder.records()][-1] == (1, FAILED)
        with pytest.raises(TransportError, match="had failed before"):
            group.barrier()

    run_on_fakes(2, body, check_calls=True, over_host_group=over_host_group)


@OVER
def test_with_check_calls_equal_calls_give_their_results(over_host_group: bool) -> None:
    def body(group: NcclGroup) -> None:
        for made in (group, group.split(0)):
            tensor = torch.full((3,), float(made.rank + 1))
            made.all_reduce(tensor)
            with made.coalescing():
                works = [made.all_reduce(tensor, async_op=True) for _ in range(2)]
            works[0].wait(PATIENCE_S)
            assert tensor.tolist() == [12.0] * 3
            made.agree_on_calls(async_op=True)
            made.barrier()

    run_on_fakes(2, body, check_calls=True, over_host_group=over_host_group)


def test_with_check_calls_a_call_that_is_refused_does_not_stay_running() -> None:
    def body(group: NcclGroup) -> None:
        with group.coalescing(), pytest.raises(MisuseError, match="cannot be coalesced"):
            group.all_reduce(torch.ones(1))
        group.barrier()
        assert [record.state for record in group.recorder.records()] == [FAILED, DONE]
        assert group.recorder.running() is None

    run_on_fakes(2, body, check_calls=True)


def test_with_check_calls_a_rank_that_has_failed_ends_the_wait() -> None:
    def body(group: NcclGroup) -> None:
        group.barrier()
        if group.rank == 1:
            group.abort()
            return
        began_s = time.monotonic()
        with pytest.raises(TransportError, match="another rank does not come: rank 1 of 2"):
            group.all_reduce(torch.ones(1))
        assert time.monotonic() - began_s < PATIENCE_S
        group.abort()

    run_on_fakes(2, body, check_calls=True, timeout_s=10 * PATIENCE_S)


def test_with_check_calls_groups_made_from_a_group_check_too() -> None:
    def body(group: NcclGroup) -> None:
        part = group.split(0)
        with pytest.raises(DisagreementError, match=r"rank 1: broadcast\(float32\[1\], root=0\)"):
            part.all_reduce(torch.ones(1)) if part.rank == 0 else part.broadcast(torch.ones(1))
        part.abort()

    run_on_fakes(2, body, check_calls=True)


@OVER
def test_the_backend_hands_check_calls_to_its_group(monkeypatch: pytest.MonkeyPatch, over_host_group: bool) -> None:
    gpus, nccl, store = itertools.count(), FakeNccl(), dist.HashStore()
    module = sys.modules[NcclBackend.__module__]  # the package exports the backend under the module's name
    monkeypatch.setattr(library, "problem", lambda: None)
    monkeypatch.setattr(library, "load", lambda: nccl)
    monkeypatch.setattr(module, "CudaRuntime", lambda: FakeDevice(f"0000:{next(gpus):02x}:00.0"))
    monkeypatch.setattr(module, "NcclGroup", NcclGroupOnFakes)

    def body(outer: ProcessGroup) -> None:
        request = ConnectRequest(None, outer.rank, outer.size, None, PATIENCE_S, check_calls=True)
        request = replace(request, host_group=outer) if over_host_group else replace(request, store=store)
        group = NcclBackend().connect(request)
        tensor = torch.full((4 + group.rank,), 7.0)
        with pytest.raises(DisagreementError, match=r"rank 1: all_reduce\(float32\[5\], op=SUM\)"):
            group.all_reduce(tensor)
        assert tensor.eq(7).all()
        group.abort()

    run_ranks(2, body)


def test_with_check_calls_a_rank_that_does_not_come_is_named_with_the_call() -> None:
    told = threading.Event()

    def body(group: NcclGroup) -> None:
        group.barrier()
        group.set_timeout(1)
        if group.rank == 0:
            with pytest.raises(
                CollectiveTimeout, match=r"all_reduce\(float32\[1\], op=SUM\), number 1 .* did not start"
            ) as raised:
                group.all_reduce(torch.ones(1))
            assert "rank 1 did not come" in str(raised.value)
            assert group.recorder.records()[-1].state == FAILED
            told.set()
        assert told.wait(PATIENCE_S)
        group.abort()

    run_on_fakes(2, body, check_calls=True)


@OVER
def test_groups_compare_side_by_side(over_host_group: bool) -> None:
    """Topics of two groups may have the same tag; each gets its own messages."""

    def body(group: NcclGroup) -> None:
        parts = [group.split(0) for _ in range(3)]
        for _ in range(20):
            for part in (group, *parts):
                part.all_reduce(torch.ones(1))
                part.agree_on_calls(async_op=True)
        for part in (group, *parts):
            part.agree_on_calls()
        for part in parts:
            part.close()

    run_on_fakes(3, body, over_host_group=over_host_group)


def test_the_store_keeps_nothing_of_a_comparison() -> None:
    store = dist.HashStore()

    def body(group: ProcessGroup) -> None:
        meeting = rendezvous.StoreRendezvous(store)
        for number in range(5):
            meeting.agree(f"topic {number}", range(group.size), group.rank, {}, lambda said: {}, CancelScope(PATIENCE_S))

    run_ranks(3, body)
    assert store.num_keys() == 0


def started(store: dist.Store, host: ProcessGroup, *, reproducible: bool) -> NcclGroup:
    """A group that has met the others in a store."""
    connector = Connector(FakeNccl(), FakeDevice(), rendezvous.StoreRendezvous(store), range(host.size), host.rank, "g")
    group = NcclGroupOnFakes(connector, timeout_s=PATIENCE_S)
    group.start({"reproducible": reproducible})
    return group


def test_ranks_agree_on_the_name_of_the_run() -> None:
    store, names = dist.HashStore(), set()

    def body(host: ProcessGroup) -> None:
        reporter = started(store, host, reproducible=False).reporter
        assert reporter is not None
        names.add(reporter.run_name)

    run_ranks(3, body)
    assert len(names) == 1


def test_other_options_on_a_rank_are_told() -> None:
    store = dist.HashStore()

    def body(host: ProcessGroup) -> None:
        with pytest.raises(DisagreementError, match=r"rank 1: reproducible=True"):
            started(store, host, reproducible=host.rank == 1)

    run_ranks(2, body)


def test_topics_of_one_tag_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_tag", lambda topic: ReservedTag(FIRST_NCCL_AGREEMENT))

    def body(group: ProcessGroup) -> None:
        meeting, deadline = rendezvous.GroupRendezvous(group, owned=False), CancelScope(PATIENCE_S)
        if group.rank == 0:
            for topic in ("a", "b", "c"):
                meeting.send(topic, 1, 0, {"of": topic}, deadline)
        else:
            for topic in ("c", "a", "b"):
                assert meeting.recv(topic, 1, 0, deadline) == {"of": topic}

    run_ranks(2, body)
