"""What ends a wait over Gloo, and what calls say after it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from syncline.collectives import CollectiveTimeout, ProcessGroup, RankLostError, TransportError
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.engine.host_group import HostGroup
from syncline.collectives.health.liveness import Liveness, own_identity
from syncline.collectives.startup import meeting
from syncline.collectives.startup.addresses import OwnAddress
from syncline.collectives.startup.meeting import Met
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports import gloo
from syncline.collectives.transports.gloo import connect

pytestmark = pytest.mark.ranks


def test_calls_after_a_transfer_that_timed_out_say_that_the_connection_is_closed() -> None:
    store = dist.HashStore()

    def body(outer: ProcessGroup) -> None:
        transport = connect(store, outer.rank, 2, "whole", CancelScope(20))
        group = HostGroup(transport, outer.rank, 2, name="whole", timeout_s=20)
        if outer.rank == 0:
            work = group.recv(torch.zeros(4), 1, async_op=True)
            with pytest.raises(CollectiveTimeout, match=r"recv.* was not over within 0\.1 s"):
                work.wait(0.1)
            calls: dict[str, Callable[[], object]] = {"recv": work.wait, "all_reduce": lambda: group.all_reduce(torch.ones(1))}
            for name, call in calls.items():
                with pytest.raises(TransportError, match=f"^{name}.* because an earlier send, receive or coll") as raised:
                    call()
                assert not isinstance(raised.value, CollectiveTimeout)
        outer.barrier()
        group.abort()

    run_ranks(2, body)


def test_a_rank_that_comes_too_late_does_not_say_that_its_own_time_is_over() -> None:
    store = dist.HashStore()
    with pytest.raises(CollectiveTimeout, match=r"in group 'whole' within 0\.1 s \(timeout\): rank\(s\) 1 did not come"):
        connect(store, 0, 2, "whole", CancelScope(0.1))
    with pytest.raises(
        CollectiveTimeout, match=r"in group 'whole': rank 0 gave up after 0\.1 s, when rank\(s\) 1 had not come"
    ):
        connect(store, 1, 2, "whole", CancelScope(60))


def connect_with_a_late_rank(scope: CancelScope) -> None:
    """Connect as rank 0 with a rank 1 that has come to the meeting, and does not connect."""
    connect(dist.HashStore(), 0, 2, "part", scope, ({"hostname": "127.0.0.1"},), Liveness({}, 0))


def test_an_abort_of_the_call_ends_the_wait_for_a_late_rank() -> None:
    reason = TransportError("the group was aborted")
    scope = CancelScope(5)
    scope.cancel(reason)
    with pytest.raises(TransportError) as raised:
        connect_with_a_late_rank(scope)
    assert raised.value is reason  # `abort` compares
    assert scope.was_noticed


def test_a_loss_in_the_whole_group_ends_the_wait_for_a_late_rank() -> None:
    scope = CancelScope(5, lambda: RankLostError("rank(s) 3 ended", [3]))
    with pytest.raises(RankLostError, match=r"could not connect rank 0 of 2 in group 'part': rank\(s\) 3 ended"):
        connect_with_a_late_rank(scope)
    assert scope.was_noticed


def test_a_rank_that_is_lost_after_the_meeting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are on several hosts, so they look for addresses. Rank 1 has come to the meeting, and has ended then."""
    own = own_identity()
    assert own is not None
    ended = replace(own, started=own.started - 1)  # an earlier process with the same number
    monkeypatch.setattr(gloo, "meet", lambda *_: Met({0: own, 1: ended}, share_loopback=False))
    monkeypatch.setattr(meeting, "addresses_for_others", lambda _: [OwnAddress("lo", "127.0.0.1")])
    with pytest.raises(RankLostError, match=r"could not connect rank 0 of 3 in group 'whole': rank\(s\) 1 \(pid .* ended"):
        connect(dist.HashStore(), 0, 3, "whole", CancelScope(10))


def test_a_collective_may_take_longer_than_the_connection() -> None:
    """As after `set_timeout`, or with a longer `timeout` of `new_group`."""
    store = dist.HashStore()

    def body(outer: ProcessGroup) -> float:
        transport = connect(store, outer.rank, 2, "whole", CancelScope(3))
        group = HostGroup(transport, outer.rank, 2, name="whole", timeout_s=60)
        tensor = torch.ones(1)
        if outer.rank == 1:
            time.sleep(3.5)
        group.all_reduce(tensor)
        group.close()
        return tensor.item()

    assert run_ranks(2, body) == [2.0, 2.0]


def test_each_rank_reaches_its_own_limit_although_it_is_shorter_than_that_of_the_connection() -> None:
    store, both_are_over = dist.HashStore(), threading.Barrier(3)

    def body(outer: ProcessGroup) -> None:
        transport = connect(store, outer.rank, 3, "whole", CancelScope(60))
        group = HostGroup(transport, outer.rank, 3, name="whole", timeout_s=1)
        if outer.rank < 2:
            time.sleep(0.5 - outer.rank / 2)  # rank 1 calls first; rank 2 never calls
            with pytest.raises(CollectiveTimeout):
                group.all_reduce(torch.ones(1))
        both_are_over.wait(60)
        group.abort()

    run_ranks(3, body)


def test_at_exit_only_a_collective_that_was_given_up_keeps_the_connections_open() -> None:
    """Closing would wait for the collective until Gloo's own time limit, which is that of the connection."""
    store, both_are_over, has_hung_up = dist.HashStore(), threading.Barrier(2), threading.Event()

    def body(outer: ProcessGroup) -> None:
        transport = connect(store, outer.rank, 2, "whole", CancelScope(60))
        group = HostGroup(transport, outer.rank, 2, name="whole", timeout_s=60)
        group.all_reduce(torch.ones(1))
        group.set_timeout(1)
        if outer.rank == 0:
            with pytest.raises(CollectiveTimeout):
                group.all_reduce(torch.ones(1))  # rank 1 never calls
        both_are_over.wait(60)
        if outer.rank == 1:
            has_hung_up.wait(60)  # without this rank's connection, the collective of rank 0 would be over
        transport.hang_up()
        assert (transport._connected is None) == (outer.rank == 1)
        has_hung_up.set()
        group.abort()

    run_ranks(2, body)
