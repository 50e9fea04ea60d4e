from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from syncline.collectives import (
    CollectiveTimeout,
    DisagreementError,
    GroupClosedError,
    InvalidArgumentError,
    LaunchError,
    ProcessGroup,
    TransportError,
)
from syncline.collectives.engine import host_group
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.startup.backend import ConnectRequest
from syncline.collectives.startup.launch import Launch
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.threads import InProcessTransport, SharedState, backend, create_groups

pytestmark = pytest.mark.ranks


def caught(call) -> BaseException:
    with pytest.raises(Exception) as info:  # noqa: PT011 - the tests look at what it is
        call()
    return info.value


@pytest.mark.parametrize(
    ("calls", "signatures"),
    [
        (
            (lambda g: g.all_reduce(torch.ones(3)), lambda g: g.broadcast(torch.ones(3))),
            ("rank 0: all_reduce(float32[3], op=SUM)", "rank 1: broadcast(float32[3], root=0)"),
        ),
        (
            (lambda g: g.broadcast(torch.ones(2), 0), lambda g: g.broadcast(torch.ones(2), 1)),
            ("rank 0: broadcast(float32[2], root=0)", "rank 1: broadcast(float32[2], root=1)"),
        ),
        (
            (lambda g: g.all_reduce(torch.ones(2, 3)), lambda g: g.all_reduce(torch.ones(3, 2))),
            ("rank 0: all_reduce(float32[2, 3], op=SUM)", "rank 1: all_reduce(float32[3, 2], op=SUM)"),
        ),
        (
            (lambda g: g.all_reduce(torch.ones(2)), lambda g: g.all_reduce(torch.ones(2).double())),
            ("float32[2]", "float64[2]"),
        ),
        ((lambda g: g.barrier(), lambda g: g.all_reduce(torch.ones(2))), ("barrier()", "all_reduce")),
    ],
)
def test_disagreement_names_both_calls(calls, signatures) -> None:
    def body(group: ProcessGroup) -> None:
        error = caught(lambda: calls[group.rank](group))
        assert isinstance(error, DisagreementError)
        for signature in signatures:
            assert signature in str(error)
        assert f"rank {group.rank} of 2 in group 'ranks'" in str(error)

    run_ranks(2, body)


def test_after_a_failure_every_collective_refers_to_it() -> None:
    def body(group: ProcessGroup) -> None:
        first = caught(lambda: group.all_reduce(torch.ones(1 + group.rank)))
        work = group.barrier(async_op=True)
        second = caught(work.wait)
        assert isinstance(first, DisagreementError)
        assert isinstance(second, TransportError)
        assert "was not started because the group had failed before" in str(second)
        assert second.__cause__ is first
        assert work.exception() is second
        group.close()

    run_ranks(2, body)


def test_a_timeout_names_the_missing_ranks() -> None:
    groups = create_groups(3, timeout_s=0.2)
    error = caught(lambda: groups[1].all_reduce(torch.ones(5)))
    assert isinstance(error, CollectiveTimeout)
    assert "rank(s) 0, 2 have not called" in str(error)
    assert "all_reduce(float32[5], op=SUM), number 0 on rank 1 of 3 in group 'default'" in str(error)
    assert "did not finish within 0.2 s" in str(error)
    for group in groups:
        group.abort()


def test_a_timeout_of_wait_leaves_the_collective_running() -> None:
    groups = create_groups(2, timeout_s=30)
    tensors = [torch.ones(2), torch.ones(2)]
    work = groups[0].all_reduce(tensors[0], async_op=True)
    assert isinstance(caught(lambda: work.wait(0.05)), CollectiveTimeout)
    groups[1].all_reduce(tensors[1])
    assert work.wait(10)
    assert tensors[0].tolist() == tensors[1].tolist() == [2, 2]
    for group in groups:
        group.close()


def test_abort_wakes_the_waiters() -> None:
    groups = create_groups(2, timeout_s=60)
    errors: list[BaseException] = []
    queued = groups[0].all_reduce(torch.ones(1), async_op=True), groups[0].barrier(async_op=True)
    waiters = [threading.Thread(target=lambda work=work: errors.append(caught(work.wait))) for work in queued]
    for waiter in waiters:
        waiter.start()
    start_s = time.monotonic()
    groups[1].abort()
    for waiter in waiters:
        waiter.join(10)
        assert not waiter.is_alive()
    assert time.monotonic() - start_s < 10
    assert [type(error) for error in errors] == [TransportError, TransportError]
    assert any("aborted: rank(s) 1 have not called" in str(error) for error in errors)
    assert isinstance(caught(groups[1].barrier), GroupClosedError)
    groups[0].abort()


def test_abort_of_the_own_group_fails_what_is_queued() -> None:
    groups = create_groups(2, timeout_s=60)
    works = [groups[0].barrier(async_op=True) for _ in range(3)]
    groups[0].abort()
    for work in works:
        assert isinstance(caught(work.wait), TransportError)
    assert isinstance(caught(groups[0].barrier), GroupClosedError)
    groups[1].abort()


def test_close_gives_up_after_the_time_limit() -> None:
    groups = create_groups(2, timeout_s=0.2)
    work = groups[0].barrier(async_op=True)
    assert isinstance(caught(groups[0].close), CollectiveTimeout)
    assert isinstance(caught(work.wait), TransportError)
    groups[1].abort()


def test_one_rank_waits_for_nobody_and_needs_no_thread() -> None:
    """Unless another collective comes before, which the order of issue forbids to overtake."""
    (group,) = create_groups(1)
    ran_on: list[threading.Thread] = []
    work = group.all_reduce(torch.ones(2), async_op=True)
    assert work.is_completed()
    assert group._queue._thread is None
    gate = threading.Event()
    group._queue.enqueue(lambda: gate.wait(10) and None)
    works = [group.all_reduce(torch.ones(2), async_op=True) for _ in range(2)]
    works[0].get_future().add_done_callback(lambda _: ran_on.append(threading.current_thread()))
    assert not any(work.is_completed() for work in works)
    gate.set()
    for work in works:
        work.wait()
    group.close()
    assert len(ran_on) == 1  # on the thread that waits, or that of the group: whichever comes first


def test_at_least_one_rank() -> None:
    with pytest.raises(InvalidArgumentError, match="at least one rank, found 0"):
        create_groups(0)


def test_description() -> None:
    (group,) = create_groups(1, name="alone")
    assert repr(group) == "<InProcessGroup 'alone' (in_process: 1 rank(s) as threads), rank 0 of 1>"
    assert (group.backend_name, group.device_types) == ("in_process", frozenset({"cpu"}))
    group.close()


def test_backend_connects_one() -> None:
    assert backend.missing() is None
    group = backend.connect(ConnectRequest(None, None, None, None, 5.0))
    assert (group.rank, group.size, group.timeout_s) == (0, 1, 5.0)
    group.close()


@pytest.mark.parametrize(("launch", "world_size"), [(Launch("Open MPI", True, 0, 2), None), (None, 2)])
def test_backend_refuses_processes(launch: Launch | None, world_size: int | None) -> None:
    with pytest.raises(LaunchError, match=r"this job has 2 processes; use backend 'mpi' or 'gloo', or .*run_ranks"):
        backend.connect(ConnectRequest(launch, None, world_size, None, 5.0))


def test_an_async_call_after_the_end_of_the_groups_thread_is_refused() -> None:
    """Handlers that were registered before Syncline was imported run after those that end its threads."""

    def body(group: ProcessGroup) -> None:
        group.all_reduce(torch.ones(1), async_op=True).wait()
        group._queue.stop()
        group._queue.join(30)
        with pytest.raises(GroupClosedError, match="the process ends"):
            group.all_reduce(torch.ones(1), async_op=True)

    run_ranks(2, body)


def test_a_subset_of_a_name_that_was_used_before_is_a_new_one() -> None:
    def body(group: ProcessGroup) -> None:
        first = group.subset([0, 1], "pair")
        if group.rank == 0:
            first.send(torch.ones(1), 1).wait()  # nobody receives it
        group.barrier()
        first.abort()
        second = group.subset([0, 1], "pair")
        if group.rank == 0:
            second.send(torch.full((1,), 7.0), 1).wait()
        else:
            received = torch.zeros(1)
            second.recv(received, 0)
            assert received.item() == 7.0
        second.all_reduce(torch.ones(1))
        second.close()

    run_ranks(2, body)


@pytest.mark.parametrize("numel", [None, 3])
def test_an_abort_does_not_miss_the_call_that_is_about_to_start(numel: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over MPI nothing else would end it before its time."""
    ran: list[str] = []

    class Deaf(InProcessTransport):
        def barrier(self, *_: object) -> None:
            ran.append("barrier")

        def all_reduce(self, *_: object) -> None:
            ran.append("all_reduce")

        def abort(self) -> None:
            pass

    class AbortedMeanwhile(CancelScope):
        """Another thread aborts the group between the look at its state and the start of the call."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            group.abort()

    group = HostGroup(Deaf(SharedState(1), 0), 0, 1, timeout_s=10)
    monkeypatch.setattr(host_group, "CancelScope", AbortedMeanwhile)
    with pytest.raises(TransportError, match="aborted"):
        group.barrier() if numel is None else group.all_reduce(torch.ones(numel))
    assert not ran
    assert group.running is None


@pytest.mark.parametrize("async_op", [False, True])
def test_a_group_that_nobody_holds_is_freed_at_once(async_op: bool) -> None:
    """With its plans, windows and connections, and whether or not Python collects garbage."""

    def body(group: ProcessGroup) -> None:
        dropped = group.subset([0, 1], "dropped")
        for _ in range(2):
            dropped.all_reduce(torch.ones(1), async_op=async_op).wait()
        freed = threading.Event()
        weakref.finalize(dropped, freed.set)
        del dropped
        assert freed.wait(10)  # the group's thread may hold it until it has gone back to sleep

    gc.disable()
    try:
        run_ranks(2, body)
    finally:
        gc.enable()


def test_the_thread_of_a_group_that_nobody_holds_ends() -> None:
    def body(group: ProcessGroup) -> None:
        dropped = group.subset([0, 1], "dropped")
        dropped.all_reduce(torch.ones(1), async_op=True).wait()
        thread = dropped._queue._thread
        assert thread is not None
        assert thread.is_alive()
        del dropped
        thread.join(30)
        assert not thread.is_alive()

    run_ranks(2, body)


@pytest.mark.parametrize("tag", [32_000, 32_764, 32_767])
def test_a_program_does_not_get_the_librarys_own_tags(tag: int) -> None:
    def body(group: ProcessGroup) -> None:
        with pytest.raises(InvalidArgumentError, match=f"tags 32000 to 32767 are for Syncline itself, found {tag}"):
            group.send(torch.ones(1), 1 - group.rank, tag)
        with pytest.raises(InvalidArgumentError, match="for Syncline itself"):
            group.recv(torch.ones(1), None, tag)

    run_ranks(2, body)


def test_callbacks_keep_their_place_and_their_thread_whoever_runs_the_collective() -> None:
    """The waiting thread often runs the collective itself, with a lock that the callback wants; see `Queue.help`."""
    rounds = 60

    def body(group: ProcessGroup) -> list[float]:
        found: list[float] = []
        held = threading.Lock()
        generator = random.Random(group.rank)  # the ranks differ in when they wait
        for number in range(rounds):
            tensor, child = torch.full((3,), float(number + group.rank)), torch.full((2,), float(group.rank))

            def issue_child(_: object, number: int = number, child: torch.Tensor = child) -> None:
                with held:
                    group.all_reduce(child)
                    found.append(number + child[0].item())

            work = group.all_reduce(tensor, async_op=True)
            work.get_future().add_done_callback(issue_child)
            if generator.random() < 0.7:
                with held:
                    work.wait()
            follower = torch.full((1,), float(number))
            group.all_reduce(follower, async_op=generator.random() < 0.5).wait()
            assert tensor[2].item() == group.size * number + sum(range(group.size))
            assert follower.item() == group.size * number
        return found

    for found in run_ranks(4, body):
        assert found == [number + 6.0 for number in range(rounds)]


def test_messages_go_to_receives_in_the_order_in_which_these_began() -> None:
    """Whatever the order of the waits."""

    def body(group: ProcessGroup) -> list[float]:
        received = [torch.zeros(1) for _ in range(3)]
        if group.rank == 0:
            group.barrier()
            for value in (1.0, 2.0, 3.0):
                group.send(torch.tensor([value]), 1)
            return [1.0, 2.0, 3.0]
        works = [group.recv(tensor, source, async_op=True) for tensor, source in zip(received, (0, None, 0), strict=True)]
        group.barrier()
        for work in reversed(works):
            work.wait()
        return [tensor.item() for tensor in received]

    assert run_ranks(2, body) == [[1.0, 2.0, 3.0]] * 2


def test_counts_may_be_narrow_integers_of_numpy() -> None:
    """Their sums and products would not fit into a number of 8 bits."""

    def body(group: ProcessGroup) -> None:
        rows = torch.arange(200.0).view(200, 1).repeat(1, 3) + 1000 * group.rank
        output, splits = torch.zeros(200, 3), [np.int8(100), np.int8(100)]
        group.all_to_all_single(output, rows, splits, splits)  # type: ignore[arg-type]
        assert output[:, 2].tolist() == [1000 * rank + 100 * group.rank + row for rank in range(2) for row in range(100)]
        assert group.allocate(np.int8(100), torch.float64).numel() == 100  # type: ignore[arg-type]

    run_ranks(2, body)


def test_splits_and_members_may_be_arrays_of_numpy() -> None:
    def body(group: ProcessGroup) -> list[float]:
        unchecked: Any = group
        with pytest.raises(InvalidArgumentError, match="input splits to be a list of integers"):
            unchecked.all_to_all_single(torch.zeros(2), torch.ones(2), None, np.array([1.0, 1.0]))
        with pytest.raises(InvalidArgumentError, match="output splits to be a list of integers"):
            unchecked.all_to_all_single(torch.zeros(3), torch.ones(3), np.array(3), [1, 2])
        output, received = torch.zeros(3), [2, 1] if group.rank == 0 else [1, 2]
        member = unchecked.subset(np.array([0, 1]), "both")
        member.all_to_all_single(output, torch.arange(3.0) + 10 * group.rank, np.array(received), np.array(received))
        return output.tolist()

    assert run_ranks(2, body) == [[0, 1, 10], [2, 11, 12]]


def test_the_parent_keeps_nothing_of_a_group_that_its_ranks_have_dropped() -> None:
    def body(group: ProcessGroup) -> None:
        part = group.split(0)
        assert isinstance(part, HostGroup)
        assert isinstance(part._transport, InProcessTransport)
        state = weakref.ref(part._transport._shared_state)
        part.close()
        del part
        group.barrier()  # both ranks have dropped it
        gc.collect()
        assert state() is None
        group.barrier()

    run_ranks(2, body)


def test_an_abort_reaches_a_part_of_a_part_that_nobody_holds() -> None:
    whole, members = SharedState(2), (0, 1)
    part = whole.child("part", members, 0)
    assert whole.child("part", members, 1) is part
    inner = part.child("inner", members, 0)
    assert part.child("inner", members, 1) is inner
    del part
    gc.collect()
    whole.abort()
    with pytest.raises(TransportError):
        inner.exchange(0, 0, None, CancelScope(60))
