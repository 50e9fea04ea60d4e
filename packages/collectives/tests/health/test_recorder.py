"""What is remembered of calls, and where they came from."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from syncline.collectives import DisagreementError, ProcessGroup, ReduceOp
from syncline.collectives.engine.call import DONE, Call, Signature
from syncline.collectives.health.recorder import MOST_CALLS, Recorder
from syncline.collectives.testing import run_ranks

pytestmark = pytest.mark.ranks


def test_calls_are_remembered_in_order() -> None:
    def body(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(3, 2), ReduceOp.MAX)
        group.broadcast(torch.ones(1, dtype=torch.int64), 1, async_op=True).wait()
        group.barrier()
        records = group.recorder.records()
        assert [(record.number, record.position, record.state) for record in records] == [(n, n, "done") for n in range(3)]
        assert str(records[0]).startswith("all_reduce(float32[3, 2], op=MAX) #0 at test_recorder.py:")
        assert str(records[1]).startswith("broadcast(int64[1], root=1) #1 at test_recorder.py:")
        assert str(records[2]).startswith("barrier() #2 at test_recorder.py:")

    run_ranks(2, body)


def test_a_failed_call_and_those_after_it() -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(DisagreementError):
            group.all_reduce(torch.ones(2 + group.rank))
        assert [record.state for record in group.recorder.records()] == ["failed"]
        group.abort()

    run_ranks(2, body)


def test_it_keeps_the_last_and_no_tensor() -> None:
    recorder = Recorder("default", 0, [0])
    tensor = torch.ones(2)
    gone = weakref.ref(tensor)
    for number in range(MOST_CALLS + 10):
        call = Call(Signature.of("all_reduce", tensor, ReduceOp.SUM), number, (), (tensor,))
        recorder.add(call)
        recorder.begin(call)
        call.is_over(DONE)
    del tensor
    gc.collect()
    assert gone() is None
    assert [record.number for record in recorder.records()] == list(range(10, MOST_CALLS + 10))


def test_calls_that_not_all_ranks_issue_have_no_place() -> None:
    recorder = Recorder("default", 0, [0])
    for call in (Call(Signature("subset")), Call(Signature("barrier"), 0)):
        recorder.add(call)
        recorder.begin(call)
    assert [record.position for record in recorder.records()] == [None, 0]
    assert recorder.count.begun == 1


def test_the_call_that_runs_is_the_latest_one() -> None:
    recorder = Recorder("default", 0, [0])
    assert recorder.running() is None
    assert recorder.latest() == 0.0
    calls = [Call(Signature("barrier"), number) for number in range(3)]
    for call in calls:
        recorder.add(call)
    assert recorder.running() is None  # they wait for their turn
    recorder.begin(calls[0])
    assert recorder.running() is calls[0]
    calls[0].is_over(DONE)
    recorder.begin(calls[1])
    assert recorder.running() is calls[1]
    assert recorder.latest() == calls[2].issued_at
    assert [record.state for record in recorder.records()] == ["done", "running", "queued"]
