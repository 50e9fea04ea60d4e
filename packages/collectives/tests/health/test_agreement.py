"""Ranks that make different calls over a transport that does not compare them are told when they compare their histories."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from syncline.collectives import DisagreementError, MisuseError, ProcessGroup, ReduceOp
from syncline.collectives.engine.call import Call, Signature
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.health import agreement
from syncline.collectives.health.agreement import Agreement, Comparison, MessageCarrier
from syncline.collectives.health.recorder import MOST_CALLS, Recorder
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.threads import InProcessTransport, SharedState

pytestmark = pytest.mark.ranks

Body = Callable[[ProcessGroup], object]


class Trusting(InProcessTransport):
    """Does not compare the calls, as Gloo does not."""

    compares_every_call = False

    def _meet(self, call: Call, value: Any) -> list[Any]:
        return super()._meet(Call(Signature("anything"), scope=call.scope), value)


def on_ranks(size: int, body: Body) -> None:
    shared_state = SharedState(size)

    def rank_body(outer: ProcessGroup) -> None:
        body(HostGroup(Trusting(shared_state, outer.rank), outer.rank, size, timeout_s=10))

    run_ranks(size, rank_body)


def close(group: ProcessGroup) -> None:
    group.close()


def agree(group: ProcessGroup) -> None:
    group.agree_on_calls()


def agree_later(group: ProcessGroup) -> None:
    work = group.agree_on_calls(async_op=True)
    assert work is not None
    work.wait()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("end", [ProcessGroup.barrier, close, agree, agree_later])
def test_another_reduction_on_one_rank_is_found(size: int, end: Body) -> None:
    def body(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(3))
        group.all_reduce(torch.ones(3), ReduceOp.AVG if group.rank == 1 else ReduceOp.SUM)
        with pytest.raises(DisagreementError) as caught:
            end(group)
        said = str(caught.value)
        assert "op=AVG) #1 at test_agreement.py:" in said
        assert "op=SUM) #1 at test_agreement.py:" in said
        assert f"rank {group.rank} of {size} in group 'default'" in said
        group.abort()

    on_ranks(size, body)


def test_calls_that_sends_have_pushed_out_are_not_missing() -> None:
    def body(group: ProcessGroup) -> None:
        assert isinstance(group, HostGroup)
        group.all_reduce(torch.ones(3), ReduceOp.AVG if group.rank == 1 else ReduceOp.SUM)
        # Groups over NCCL also record sends and receives.
        for _ in range(MOST_CALLS if group.rank < 2 else 0):
            group.recorder.add(Call(Signature("send"), None))
        with pytest.raises(DisagreementError, match=r"they diverged before the calls that are remembered \(1 calls each\)"):
            group.close()
        group.abort()

    on_ranks(3, body)


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("end", [ProcessGroup.barrier, close, agree, agree_later])
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
        group.set_timeout(0.3)
        if group.rank == 0:
            group.close()
            assert "not all ranks of the group have closed it: rank 1 did not come" in caplog.text

    on_ranks(2, body)


def test_the_ranks_compare_after_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "COMPARE_EVERY_CALLS", 5)

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


def test_a_group_that_compares_each_call_has_nothing_to_compare() -> None:
    def body(group: ProcessGroup) -> None:
        assert group.agree_on_calls() is None

    run_ranks(2, body)


# ---- the digest of a history ----


def history_of(calls: Sequence[int]) -> tuple[int, int]:
    kept = Agreement(MessageCarrier(InProcessTransport(SharedState(1), 0), 0, 1), 0, Recorder("default", 0, [0]))
    for call in calls:
        kept.add(call)
    return kept.history


@pytest.mark.parametrize(
    ("size", "check_calls", "transport_compares", "expected"),
    [
        (1, False, False, Comparison.NONE),
        (1, True, True, Comparison.NONE),
        (2, False, False, Comparison.LATER),
        (2, False, True, Comparison.BY_TRANSPORT),
        (2, True, False, Comparison.BEFORE),
        (2, True, True, Comparison.BEFORE),
    ],
)
def test_who_compares(size: int, check_calls: bool, transport_compares: bool, expected: Comparison) -> None:
    assert Comparison.of(size, check_calls=check_calls, transport_compares=transport_compares) is expected


def test_equal_histories_have_equal_digests() -> None:
    assert history_of([3, 1, 2]) == history_of([3, 1, 2])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2], [2, 1]),
        ([1], [1, 1]),
        ([], [0]),
        ([0], [0, 0]),
        ([1, 2, 3], [1, 3]),
        ([1, 2, 3, 3], [1, 2, 2, 3]),
        ([5], [6]),
    ],
)
def test_other_histories_have_other_digests(one: Sequence[int], other: Sequence[int]) -> None:
    assert history_of(one)[0] != history_of(other)[0]


def test_all_short_histories_differ() -> None:
    histories = [calls for length in range(6) for calls in itertools.product(range(4), repeat=length)]
    digests = [history_of(calls)[0] for calls in histories]
    assert len(set(digests)) == len(histories)
    assert all(0 <= digest < 2**62 for digest in digests)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_one_text_is_compared_with_all_ranks(size: int) -> None:
    shared_state = SharedState(size)

    def body(outer: ProcessGroup) -> None:
        carrier = MessageCarrier(InProcessTransport(shared_state, outer.rank), outer.rank, size)
        compared = Agreement(carrier, outer.rank, Recorder("default", outer.rank, range(size)))
        assert compared.same("here", CancelScope(10)) is None
        said = compared.same("there" if outer.rank == size - 1 else "here", CancelScope(10))
        assert said is not None
        assert {text: sorted(ranks) for text, ranks in said.ranks.items()} == {
            "here": list(range(size - 1)),
            "there": [size - 1],
        }

    run_ranks(size, body)


def test_a_callback_that_is_attached_after_a_comparison_is_late() -> None:
    def body(group: ProcessGroup) -> None:
        work = group.all_reduce(torch.ones(3), async_op=True)
        comparison = group.agree_on_calls(async_op=True)
        assert comparison is not None
        if group.rank == 1:
            comparison.wait()  # on this rank the callback runs after the comparison, on the other rank maybe before it
        with pytest.raises(MisuseError, match="in a late callback"):
            work.get_future().then(lambda _: group.broadcast(torch.ones(1))).wait()
        comparison.wait()
        group.barrier()
        group.close()

    on_ranks(2, body)
