"""A callback that is attached too late may not issue a collective: its place in the order would differ between ranks."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from syncline.collectives import CollectiveTimeout, MisuseError, ProcessGroup, RoundRobinGroup, Work, all_reduce_coalesced
from syncline.collectives.engine.host_group import GroupWork
from syncline.collectives.testing import run_ranks

pytestmark = pytest.mark.ranks


def issue(group: ProcessGroup) -> Work:
    return group.all_reduce(torch.ones(2), async_op=True)


def hold(group: ProcessGroup) -> threading.Event:
    """Let nothing that is issued from now on begin before the event is set."""
    event = threading.Event()
    group._queue.enqueue(lambda: event.wait(60))
    return event


def test_a_collective_from_a_late_callback_is_refused() -> None:
    def body(group: ProcessGroup) -> None:
        errors: list[MisuseError] = []

        def callback(_: object) -> None:
            try:
                group.broadcast(torch.ones(1))
            except MisuseError as error:
                errors.append(error)

        work = issue(group)
        later = issue(group)
        work.get_future().add_done_callback(callback)
        later.wait()
        group.barrier()
        assert "broadcast on rank" in str(errors[0])
        assert "in a late callback: attach the callback before you issue the group's next collective" in str(errors[0])
        assert group.recorder.count.begun == 3

    run_ranks(3, body)


def of_two_parts(group: ProcessGroup) -> Work:
    work = all_reduce_coalesced([torch.ones(2), torch.ones(2, dtype=torch.int64)], group=group, async_op=True)
    assert work is not None
    return work


MADE_OF_SEVERAL_CALLS = {
    "sparse": lambda group: group.all_reduce(torch.eye(2).to_sparse(), async_op=True),
    "uneven": lambda group: group.reduce_scatter(
        torch.ones(1 + group.rank), [torch.ones(1 + r) for r in range(group.size)], async_op=True
    ),
    "coalesced": of_two_parts,
}


@pytest.mark.parametrize("start", MADE_OF_SEVERAL_CALLS.values(), ids=MADE_OF_SEVERAL_CALLS)
def test_a_callback_of_a_call_that_is_made_of_several_calls_is_late_if_another_call_came_after_them(start) -> None:
    def body(group: ProcessGroup) -> None:
        call = lambda _: group.broadcast(torch.ones(1)).result()  # noqa: E731 - the shortest
        start(group).get_future().then(call).wait()  # in time
        work = start(group)
        later = issue(group)
        with pytest.raises(MisuseError, match="in a late callback"):
            work.get_future().then(call).wait()
        later.wait()
        work.wait()
        work.get_future().then(lambda done: done.value()).then(call).wait()  # after a wait, it is not late
        group.barrier()

    run_ranks(2, body)


def test_a_future_that_was_taken_in_time_is_no_excuse() -> None:
    def body(group: ProcessGroup) -> None:
        future = issue(group).get_future()
        issue(group).wait()
        with pytest.raises(RuntimeError, match="attach the callback before you issue the group's next"):
            future.then(lambda _: group.broadcast(torch.ones(1))).wait()
        group.barrier()

    run_ranks(2, body)


def test_callbacks_in_time_may_issue_collectives_several_of_them() -> None:
    def body(group: ProcessGroup) -> None:
        sums = [torch.ones(1) for _ in range(4)]
        for _ in range(20):
            future = issue(group).get_future()
            futures = [future.then(lambda _, tensor=tensor: group.all_reduce(tensor).result()) for tensor in sums]
            issue(group)
            for future in futures:
                future.wait()
        group.barrier()
        assert [tensor.item() for tensor in sums] == [2.0**20] * 4

    run_ranks(2, body)


@pytest.mark.parametrize("wait", [lambda work: work.wait(), lambda work: work.get_future().wait()])
def test_a_callback_after_a_wait_is_not_late(wait) -> None:
    def body(group: ProcessGroup) -> None:
        work = issue(group)
        issue(group).wait()
        wait(work)
        work.get_future().then(lambda _: group.broadcast(torch.ones(1)).result()).wait()
        group.barrier()

    run_ranks(2, body)


def test_a_work_with_a_future_is_freed_at_once() -> None:
    def body(group: ProcessGroup) -> None:
        tensor = torch.ones(2)
        gone = weakref.ref(tensor)
        work = group.all_reduce(tensor, async_op=True)
        work.get_future().then(lambda _: None).wait()
        work.wait()
        group.barrier()
        del work, tensor
        assert gone() is None

    gc.disable()
    try:
        run_ranks(2, body)
    finally:
        gc.enable()


def test_a_late_callback_that_issues_nothing_runs() -> None:
    def body(group: ProcessGroup) -> None:
        work = issue(group)
        issue(group)
        assert work.get_future().then(lambda done: done.value()[0].tolist()).wait() == [2.0, 2.0]
        group.barrier()

    run_ranks(2, body)


def test_another_group_may_be_used_late() -> None:
    def body(group: ProcessGroup) -> None:
        other = group.split(0)
        assert other is not None
        work = issue(group)
        issue(group).wait()
        work.get_future().then(lambda _: other.broadcast(torch.ones(1)).result()).wait()
        other.close()

    run_ranks(2, body)


def test_callbacks_of_what_a_callback_issued_are_not_late() -> None:
    """The thread that issues from outside runs on meanwhile."""

    def body(group: ProcessGroup) -> None:
        def outer(_: object) -> None:
            child = issue(group).get_future()
            child.then(lambda _: group.broadcast(torch.ones(1)).result()).wait()

        futures = [issue(group).get_future().then(outer) for _ in range(100)]
        for future in futures:
            future.wait()
        group.barrier()

    run_ranks(2, body)


@pytest.mark.parametrize(
    "issue_later",
    [
        lambda group: issue(group).get_future(),
        lambda group: issue(group).get_future().then(lambda done: done.value()),
        lambda group: group.all_reduce(torch.eye(2).to_sparse(), async_op=True),
        lambda group: group.all_reduce(torch.eye(2).to_sparse(), async_op=True).get_future(),
        lambda group: group.reduce_scatter(
            torch.ones(1 + group.rank), [torch.ones(1 + r) for r in range(group.size)], async_op=True
        ),
        lambda group: all_reduce_coalesced([torch.ones(2), torch.ones(2, dtype=torch.int64)], group=group, async_op=True),
    ],
    ids=["future", "then", "sparse work", "sparse future", "uneven", "coalesced"],
)
def test_a_callback_may_wait_for_what_is_queued_behind_it(issue_later) -> None:
    """Only the thread that it runs on can run that."""

    def body(group: ProcessGroup) -> None:
        waited = []
        is_issued = hold(group)
        issue(group).get_future().add_done_callback(lambda _: waited.append(later.wait()))
        later = issue_later(group)
        last = issue(group)
        is_issued.set()
        last.wait(30)
        assert len(waited) == 1
        group.barrier()

    run_ranks(2, body)


def test_a_work_with_a_limit_may_be_waited_for_in_a_callback() -> None:
    def body(group: ProcessGroup) -> None:
        errors = []
        is_issued = hold(group)

        def callback(_: object) -> None:
            try:
                later.wait(20)
            except CollectiveTimeout as error:
                errors.append(error)

        issue(group).get_future().add_done_callback(callback)
        later = group.all_reduce(torch.eye(2).to_sparse(), async_op=True)
        last = issue(group)
        is_issued.set()
        last.wait(60)
        assert not errors

    run_ranks(2, body)


def test_calls_in_callbacks_have_one_order_whether_a_waiter_or_the_queues_thread_ran_the_call() -> None:
    """Rank 0's main thread runs the call while it waits, and keeps the turn busy. Rank 1's queue runs it."""

    def body(group: ProcessGroup) -> tuple[list[str], float, float]:
        order: list[str] = []
        ran = threading.Event()
        first, second = torch.full((4,), 100.0 * (group.rank + 1)), torch.full((4,), 1.0 * (group.rank + 1))
        if group.rank == 0:
            changed = group._queue._changed
            plain = changed.wait_for

            def late(ready):
                """The queue's thread wakes only when the main thread has run all that it can."""
                plain(ready)
                changed.release()
                helped.wait(10)
                changed.acquire()

            changed.wait_for = late
        helped = threading.Event()

        def callback(_) -> None:
            work = group.all_reduce(torch.ones(4), async_op=True)
            work.get_future().then(lambda _: (order.append("inner callback"), group.all_reduce(first)))
            order.append("callback")
            group.all_reduce(second)
            ran.set()

        held = group.all_reduce(torch.ones(4), async_op=True)
        held.get_future().then(callback)
        behind = group.all_reduce(torch.ones(4), async_op=True)
        if group.rank == 1:
            assert ran.wait(10)
        else:
            group._queue.help(behind.is_completed)
            helped.set()
        behind.wait()
        assert ran.wait(10)
        return order, first[0].item(), second[0].item()

    assert run_ranks(2, body) == [(["inner callback", "callback"], 300.0, 3.0)] * 2


@pytest.mark.parametrize("timeout", [None, 60])
def test_after_a_wait_the_future_is_done_so_calls_in_its_callbacks_have_one_order(
    timeout: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On rank 0, the queue's thread completes the first future only when the wait has had time to return without it."""
    complete = GroupWork._complete_here
    returned: dict[GroupWork, threading.Event] = {}

    def late(work: GroupWork, future: Any) -> None:
        if work in returned:
            returned[work].wait(0.3)
        complete(work, future)

    monkeypatch.setattr(GroupWork, "_complete_here", late)

    def body(group: ProcessGroup) -> tuple[float, float]:
        second, inner = (torch.full((4,), factor * (group.rank + 1)) for factor in (10.0, 1000.0))
        is_issued = hold(group)
        work = issue(group)
        future = work.get_future()
        if group.rank == 0:
            returned[work] = threading.Event()
        later = group.all_reduce(second, async_op=True)
        is_issued.set()
        work.wait(timeout)
        is_done = future.done()
        last = future.then(lambda _: group.all_reduce(inner))
        if group.rank == 0:
            returned[work].set()
        assert is_done
        assert future.value()[0].tolist() == [2.0, 2.0]
        later.wait()
        last.wait()
        return second[0].item(), inner[0].item()

    assert run_ranks(2, body) == [(30.0, 3000.0)] * 2


@pytest.mark.parametrize(
    "elsewhere",
    [
        lambda group, other: other.all_reduce(torch.ones(1), async_op=True).get_future().wait(),
        lambda group, other: all_reduce_coalesced([torch.ones(1)], group=other),
        lambda group, other: other.all_reduce(torch.eye(2).to_sparse()),
        lambda group, other: (
            (group.send(torch.ones(1), 1, async_op=True) if group.rank == 0 else group.recv(torch.ones(1), 0, async_op=True))
            .get_future()
            .wait()
        ),
    ],
    ids=["another group", "coalesced in another group", "sparse in another group", "transfer"],
)
def test_a_callback_that_waits_for_something_else_runs_no_later_call(elsewhere) -> None:
    def body(group: ProcessGroup) -> None:
        other = group.split(0)
        assert other is not None
        are_over = []
        is_issued = hold(group)

        def callback(_: object) -> None:
            elsewhere(group, other)
            are_over.append(later.is_completed())

        issue(group).get_future().add_done_callback(callback)
        later = issue(group)
        is_issued.set()
        later.wait(30)
        group.barrier()
        assert are_over == [False]
        other.close()

    run_ranks(2, body)


@pytest.mark.parametrize(
    "wait",
    [lambda barrier: barrier.wait(), lambda barrier: barrier.get_future().then(lambda _: None).wait()],
    ids=["wait", "then"],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_callback_may_wait_for_a_call_of_several_groups_and_runs_only_the_part_of_its_own_group(is_first: bool, wait) -> None:
    def body(group: ProcessGroup) -> None:
        other = group.split(0)
        assert other is not None
        in_turn = RoundRobinGroup([group, other] if is_first else [other, group])
        found = []
        is_issued, others_turn = hold(group), hold(other)

        def callback(_: object) -> None:
            threading.Timer(0.1, others_turn.set).start()  # the part of the other group ends last
            wait(barrier)
            found.append(later.is_completed())

        issue(group).get_future().add_done_callback(callback)
        barrier = in_turn.barrier(async_op=True)
        later = issue(group)
        is_issued.set()
        later.wait(30)
        group.barrier()
        assert found == [False]
        other.close()

    run_ranks(2, body)
