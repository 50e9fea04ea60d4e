"""What is remembered of calls, and where they came from."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from syncline.collectives import DisagreementError, ProcessGroup, ReduceOp
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
        assert str(records[0]).startswith("all_reduce(float32[3, 2], op=MAX) #0 at test_flight_recorder.py:")
        assert str(records[1]).startswith("broadcast(int64[1], root=1) #1 at test_flight_recorder.py:")
        assert str(records[2]).startswith("barrier() #2 at test_flight_recorder.py:")

    run_ranks(2, body)


def test_a_kept_plan_is_remembered_from_the_callers_line() -> None:
    recorder = Recorder("default", 0, [0, 1])
    _as_a_group_does(recorder)
    (record,) = recorder.records()
    assert record.where.startswith("test_flight_recorder.py:")
    assert str(record).startswith("all_reduce(float32[2], op=SUM) #0 at ")
    assert (record.state, record.position) == ("running", 0)


def _as_a_group_does(recorder: Recorder) -> list[object]:
    entry = recorder.issue_kind(0, ("all_reduce", torch.float32, ReduceOp.SUM, None, ""), (2,))
    recorder.begin(entry)
    return entry


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
        recorder.end(recorder.issue(number, "all_reduce", tensor))
    del tensor
    gc.collect()
    assert gone() is None
    assert [record.number for record in recorder.records()] == list(range(10, MOST_CALLS + 10))


def test_calls_that_not_all_ranks_issue_have_no_place() -> None:
    recorder = Recorder("default", 0, [0])
    recorder.begin(recorder.issue(None, "subset", None))
    recorder.begin(recorder.issue(0, "barrier", None))
    assert [record.position for record in recorder.records()] == [None, 0]
