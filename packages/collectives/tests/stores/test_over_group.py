"""The store over a process group: the ranks are threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import pytest
import torch

from syncline.collectives import InvalidArgumentError, ProcessGroup, StoreError, StoreTimeout, TransportError, Work
from syncline.collectives.stores import over_group
from syncline.collectives.stores.over_group import GroupStore
from syncline.collectives.testing import run_ranks
from test_support.forked import answer_of, in_fork

pytestmark = pytest.mark.ranks


def everything(group: ProcessGroup) -> None:
    store = GroupStore(group.split(0), timeout=20)
    rank, size = group.rank, group.size
    store.set(f"from {rank}", f"value {rank}" * (rank + 1))
    for peer in range(size):  # waits for those that are not there yet
        assert store.get(f"from {peer}") == (f"value {peer}" * (peer + 1)).encode()
    store.add("count", rank + 1)
    group.barrier()
    assert store.add("count", 0) == size * (size + 1) // 2
    store.wait([f"from {peer}" for peer in range(size)])
    assert store.check(["from 0"])
    assert not store.check(["from 0", "from nobody"])
    group.barrier()
    winners = store.compare_set("leader", b"", f"{rank}".encode())
    group.barrier()
    assert store.get("leader") in (winners, store.compare_set("leader", b"x", b"y"))
    group.barrier()
    assert store.num_keys() == size + 2
    group.barrier()
    if rank == size - 1:
        assert store.delete_key("leader")
        assert not store.delete_key("leader")
    group.barrier()
    assert not store.check(["leader"])
    with pytest.raises(InvalidArgumentError, match="expected a decimal number"):
        store.add("from 0", 1)
    with pytest.raises(InvalidArgumentError, match="does not fit into 64 bits"):
        store.add("count", 10**25)
    with pytest.raises(StoreTimeout, match=r"store on rank 0 of group .* nobody set 'never' within 0.05 s"):
        store.get("never", 0.05)
    with pytest.raises(StoreTimeout, match="nobody set 'never'"):
        store.wait(["from 0", "never"], 0.05)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.check(["from 0"])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_store_for_all_ranks(size: int) -> None:
    run_ranks(size, everything)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("syncline-store")]


def waits_while_another_thread_asks(group: ProcessGroup) -> None:
    store = GroupStore(group.split(0), timeout=20)
    if group.rank == 1:
        found: list[bytes] = []
        waiter = threading.Thread(target=lambda: found.append(store.get("late")))
        waiter.start()
        assert not store.check(["late"])
        group.barrier()
        waiter.join(20)
        assert found == [b"came"]
    else:
        group.barrier()
        store.set("late", "came")
    group.all_reduce(torch.ones(1))
    store.close()


def test_who_waits_holds_up_no_other_thread() -> None:
    run_ranks(2, waits_while_another_thread_asks)


def leaves_a_group_that_failed(group: ProcessGroup) -> None:
    of_store = group.split(0)
    store = GroupStore(of_store, timeout=20)
    group.barrier()
    of_store.abort()
    group.barrier()
    store.close()
    store.close()


@pytest.mark.parametrize("size", [2, 3])
def test_a_store_over_a_group_that_failed_can_be_closed(size: int) -> None:
    run_ranks(size, leaves_a_group_that_failed)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("syncline-store")]


def test_a_server_that_fails_says_so_and_ends_the_others_calls(caplog: pytest.LogCaptureFixture) -> None:
    class Failed(Work):
        """A receive that has failed."""

        def wait(self, timeout: object = None) -> bool:
            raise TransportError("the cable is cut")

        def is_completed(self) -> bool:
            return True

        exception = result = get_future = None  # type: ignore[assignment]  # nobody asks

    def body(group: ProcessGroup) -> None:
        inner = group.split(0)
        assert inner is not None
        if group.rank == 0:
            inner.recv = lambda *_, **__: Failed()  # type: ignore[method-assign,assignment]
        store = GroupStore(inner, timeout=20)
        if group.rank != 0:
            with pytest.raises(TransportError):
                store.get("key")
        group.barrier()
        inner.abort()

    run_ranks(2, body)
    assert "answers no more: the cable is cut" in caplog.text


@pytest.mark.parametrize("error", [StoreTimeout("late"), KeyboardInterrupt()], ids=["time limit", "Ctrl-C"])
def test_an_answer_that_comes_after_its_call_has_ended_is_not_taken_for_another(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(group: ProcessGroup) -> None:
        store = GroupStore(group.split(0), timeout=20)
        if group.rank == 1:
            store.set("a", b"1")
            store.set("b", b"2")
            clone = store.clone()
            receive = store._group.recv

            def interrupted(*arguments, **options):
                store._group.recv = receive
                raise error

            store._group.recv = interrupted
            with pytest.raises(type(error)):
                store.get("a")
            # All handles of the rank share the group, so the late answer could reach any of them.
            for handle in (store, clone, store.clone()):
                with pytest.raises(StoreError, match="an earlier call on this rank ended before its answer came"):
                    handle.get("b")
        else:
            store.wait(["b"])
        group.barrier()
        store.close()

    run_ranks(2, body)


def test_rank_0_does_not_wait_long_for_the_rest_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C has ended a call of rank 1 after it had sent the length of its request."""
    monkeypatch.setattr(over_group, "_GOODBYES_S", 0.2)

    def body(group: ProcessGroup) -> None:
        store = GroupStore(group.split(0), timeout=20)
        if group.rank == 1:
            send = store._group.send

            def interrupted(tensor: torch.Tensor, dst: int, tag: int) -> object:
                if tensor.dtype == torch.uint8:
                    raise KeyboardInterrupt
                return send(tensor, dst, tag)

            store._group.send = interrupted
            with pytest.raises(KeyboardInterrupt):
                store.set("key", "1")
            store._group.send = send
        group.barrier()
        if group.rank == 0:
            began_s = time.monotonic()
            store.close()
            assert time.monotonic() - began_s < 20  # the time limit of the group is longer
        group.barrier()
        store.close()

    run_ranks(2, body)


def forks(group: ProcessGroup) -> None:
    store = GroupStore(group.split(0), timeout=20)
    group.barrier()
    calls: list[Callable[[], object]] = [
        lambda: store.set("key", b"value"),
        lambda: store.get("key", 0.1),
        store.clone().num_keys,
    ]
    if group.rank == group.size - 1:
        for said in in_fork(lambda: [answer_of(call) for call in calls]):
            assert "GroupClosedError: a call of a GroupStore on rank" in said
    assert not store.check(["key"])
    group.barrier()
    store.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("size", [1, 2])
def test_a_fork_of_a_rank_cannot_use_the_store(size: int) -> None:
    """Rank 0 has the table, so a call in its fork would change a copy in silence."""
    run_ranks(size, forks)


def closes_a_clone(group: ProcessGroup) -> None:
    store = GroupStore(group.split(0), timeout=20)
    store.clone().close()
    with pytest.raises(StoreError, match="closed"):
        store.check(["key"])
    store.close()


@pytest.mark.parametrize("size", [1, 2])
def test_to_close_a_clone_is_to_close_the_store(size: int) -> None:
    run_ranks(size, closes_a_clone)
