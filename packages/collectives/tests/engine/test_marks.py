"""Marks: what a call says of itself beyond its arguments is compared over the ranks, however a group compares its calls."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import DisagreementError, ProcessGroup, RoundRobinGroup, TorchGroup
from syncline.collectives.engine.call import Call, Signature
from syncline.collectives.engine.composed import PerDeviceGroup
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.threads import InProcessTransport, SharedState
from test_support.fake_nccl_group import run_on_fakes

pytestmark = pytest.mark.ranks

Body = Callable[[ProcessGroup], object]


class Trusting(InProcessTransport):
    """Does not compare the calls, as Gloo does not."""

    compares_every_call = False

    def _meet(self, call: Call, value: Any) -> list[Any]:
        return super()._meet(Call(Signature("anything"), scope=call.scope), value)


def comparing_each(size: int, body: Body) -> None:
    run_ranks(size, body)


def comparing_at_the_end(size: int, body: Body) -> None:
    state = SharedState(size)
    run_ranks(size, lambda outer: body(HostGroup(Trusting(state, outer.rank), outer.rank, size, timeout_s=10)))


def asking_first(size: int, body: Body) -> None:
    state = SharedState(size)
    run_ranks(
        size, lambda outer: body(HostGroup(Trusting(state, outer.rank), outer.rank, size, timeout_s=10, check_calls=True))
    )


def in_turn(size: int, body: Body) -> None:
    def rank_body(group: ProcessGroup) -> None:
        parts = [part for _ in range(3) if (part := group.split(0)) is not None]
        parts[0].barrier()
        turns = RoundRobinGroup(parts)
        turns.all_reduce(torch.ones(1))  # the next call is not the first group's
        body(turns)

    run_ranks(size, rank_body)


def by_device(size: int, body: Body) -> None:
    run_ranks(size, lambda group: body(PerDeviceGroup({"cpu": group})))


def of_torch(size: int, body: Body) -> None:
    store, kept = dist.HashStore(), []

    def rank_body(outer: ProcessGroup) -> None:
        gloo = dist.ProcessGroupGloo(store, outer.rank, size, dist.default_pg_timeout)
        kept.append(gloo)  # Gloo's own thread must not drop the last reference to its group
        body(TorchGroup(gloo))

    run_ranks(size, rank_body)


def over_nccl(size: int, body: Body) -> None:
    run_on_fakes(size, body)


GROUPS = [comparing_each, comparing_at_the_end, asking_first, in_turn, by_device, of_torch, over_nccl]


def call(group: ProcessGroup, mark: str | None, tensor: torch.Tensor) -> None:
    context: AbstractContextManager[None] = nullcontext() if mark is None else group.marked(mark)
    with context:
        work = group.all_reduce(tensor, async_op=True)
    work.wait()
    group.agree_on_calls()


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("size", [2, 3])
def test_the_same_mark_changes_nothing(kind: Callable[[int, Body], None], size: int) -> None:
    def body(group: ProcessGroup) -> None:
        for step in range(3):
            tensor = torch.full((4,), group.rank + 1.0) + torch.arange(4) + step
            call(group, f"forward {step}", tensor)
            expected = sum(torch.full((4,), rank + 1.0) + torch.arange(4) + step for rank in range(size))
            assert torch.equal(tensor, expected)
            group.all_reduce(torch.ones(1))

    kind(size, body)


@pytest.mark.parametrize("kind", GROUPS)
def test_another_mark_is_named_on_every_rank(kind: Callable[[int, Body], None]) -> None:
    def body(group: ProcessGroup) -> None:
        call(group, "forward 1", torch.ones(4))
        with pytest.raises(DisagreementError) as caught:
            call(group, f"forward {2 + group.rank}", torch.ones(4))
        for rank in range(2):
            assert re.search(rf"rank {rank}\b[^;]*forward {2 + rank}\b", str(caught.value)), caught.value
        group.abort()

    kind(2, body)


@pytest.mark.parametrize("kind", [kind for kind in GROUPS if kind is not of_torch])
def test_a_mark_against_none_is_named(kind: Callable[[int, Body], None]) -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(DisagreementError, match="forward 7"):
            call(group, "forward 7" if group.rank else None, torch.ones(4))
        group.abort()

    kind(2, body)


def test_a_mark_is_for_the_thread_that_set_it() -> None:
    """A callback of another thread may issue meanwhile, at another moment on each rank."""

    def body(group: ProcessGroup) -> None:
        with group.marked(f"rank {group.rank}"):
            other = threading.Thread(target=lambda: call(group, None, torch.ones(2)))
            other.start()
            other.join()
        call(group, None, torch.ones(2))
        assert not group._marks

    run_ranks(2, body)


def test_a_mark_is_for_the_first_call_and_none_that_a_callback_issues() -> None:
    """On one rank the callback runs at once, on this thread; on the other one later, on another thread."""

    def body(group: ProcessGroup) -> None:
        ready = threading.Event()
        with group.marked("a mark"):
            first = group.all_reduce(torch.ones(2), async_op=True)
            if group.rank == 0:
                first.get_future().add_done_callback(lambda _: ready.wait(10))
            else:
                first.wait()
            first.get_future().then(lambda _: group.all_reduce(torch.ones(3), async_op=True))
            ready.set()
        first.wait()
        group.barrier()

    run_ranks(2, body)


def test_over_a_group_of_torch_all_marks_since_the_last_comparison_are_shown() -> None:
    """The mark that differs need not be the last one."""

    def body(group: ProcessGroup) -> None:
        call(group, "before", torch.ones(4))
        with group.marked(f"forward {group.rank}"):
            group.all_reduce(torch.ones(4))
        with pytest.raises(DisagreementError) as caught:
            call(group, "the same", torch.ones(4))
        for rank in range(2):
            assert re.search(rf"rank {rank}\b[^;]*forward {rank}, the same", str(caught.value)), caught.value
        assert "before" not in str(caught.value)

    of_torch(2, body)


def test_inside_another_mark_the_first_call_gets_both() -> None:
    def body(group: ProcessGroup) -> None:
        with group.marked("outer"):
            with group.marked("not used"):
                pass
            with group.marked("inner"):
                group.all_reduce(torch.ones(1))
            group.all_reduce(torch.ones(2))
        with group.marked("again"), group.marked(f"of rank {group.rank}"), pytest.raises(DisagreementError) as caught:
            group.all_reduce(torch.ones(3))
        assert re.search(rf"again, of rank {group.rank}\b", str(caught.value)), caught.value
        assert [record.words.partition("op=SUM")[2] for record in group.recorder.records()] == [
            ", outer, inner)",
            ")",
            f", again, of rank {group.rank})",
        ]
        assert not group._marks

    run_ranks(2, body)
