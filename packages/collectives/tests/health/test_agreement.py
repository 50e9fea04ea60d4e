"""Ranks that make different calls over a transport that does not compare them are told at the next verification."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch

from syncline.collectives import DisagreementError, ProcessGroup, ReduceOp
from syncline.collectives.engine.group import HostGroup
from syncline.collectives.health import agreement as history_verification
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.threads import InProcessTransport, SharedState

pytestmark = pytest.mark.ranks

Body = Callable[[ProcessGroup], object]


class Trusting(InProcessTransport):
    """Does not compare the calls, as Gloo does not."""

    compares_every_call = False

    def _meet(self, call, value):
        return super()._meet(call._replace(collective=Collective("anything")), value)


def on_ranks(size: int, body: Body, *, timeout_s: float = 10) -> None:
    shared_state = SharedState(size)

    def rank_body(outer: ProcessGroup) -> None:
        body(HostGroup(Trusting(shared_state, outer.rank), outer.rank, size, timeout_s=timeout_s))

    run_ranks(size, rank_body)


def close(group: ProcessGroup) -> None:
    group.close()


def verify(group: ProcessGroup) -> None:
    group.agree_on_calls()


def verify_later(group: ProcessGroup) -> None:
    work = group.agree_on_calls(async_op=True)
    assert work is not None
    work.wait()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("end", [ProcessGroup.barrier, close, verify, verify_later])
def test_another_reduction_on_one_rank_is_found(size: int, end: Body) -> None:
    def body(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(3))
        group.all_reduce(torch.ones(3), ReduceOp.AVG if group.rank == 1 else ReduceOp.SUM)
        with pytest.raises(DisagreementError) as caught:
            end(group)
        said = str(caught.value)
        assert "op=AVG) #1 at test_verification.py:" in said
        assert "op=SUM) #1 at test_verification.py:" in said
        assert f"rank {group.rank} of {size} in group 'default'" in said
        group.abort()

    on_ranks(size, body)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("end", [ProcessGroup.barrier, close, verify, verify_later])
def test_equal_calls_pass(size: int, end: Body) -> None:
    def body(group: ProcessGroup) -> None:
        for number in range(5):
            group.all_reduce(torch.ones(3), async_op=number % 2 == 0)
        part = group.split(0)
        assert part is not None
        part.broadcast(torch.ones(2))
        part.close()
        end(group)
        group.close()

    on_ranks(size, body)


def test_a_rank_that_never_closes_is_no_failure_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "syncline.collectives")

    def body(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(3))
        if group.rank == 0:
            group.close()
            assert "calls were not compared with those of the other ranks: rank 1 did not come" in caplog.text

    on_ranks(2, body, timeout_s=0.3)


def test_the_ranks_compare_after_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_verification, "COMPARE_EVERY_CALLS", 5)

    def body(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(3), ReduceOp.SUM if group.rank else ReduceOp.MAX)
        for _ in range(3):
            group.all_reduce(torch.ones(3))
        with pytest.raises(DisagreementError, match=r"all_reduce\(float32\[3\], op=MAX\) #0"):
            group.all_reduce(torch.ones(3))
        group.abort()

    on_ranks(2, body)


def test_calls_from_callbacks_have_one_order() -> None:
    def body(group: ProcessGroup) -> None:
        for _ in range(50):
            first = group.all_reduce(torch.ones(3), async_op=True)
            first.get_future().then(lambda _: group.broadcast(torch.ones(2)).result())
            group.all_gather([torch.ones(1) for _ in range(2)], torch.ones(1), async_op=True)
        group.barrier()
        group.close()

    on_ranks(2, body)


def test_a_group_that_compares_each_call_has_nothing_to_verify() -> None:
    def body(group: ProcessGroup) -> None:
        assert group.agree_on_calls() is None

    run_ranks(2, body)
