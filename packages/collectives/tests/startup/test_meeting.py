"""Ranks meet in a store."""

from __future__ import annotations

import collections
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from syncline.collectives import DisagreementError, LaunchError, RankLostError, StoreError, StoreTimeout, SynclineError
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.health.liveness import ProcessIdentity
from syncline.collectives.startup import meeting
from syncline.collectives.startup.addresses import LOOPBACK, OwnAddress
from syncline.collectives.startup.meeting import Met, address_by_group, address_by_store, meet
from syncline.collectives.stores import InMemoryStore
from syncline.collectives.testing import run_ranks

T = TypeVar("T")


def as_threads(size: int, body: Callable[[int], T]) -> list[T]:
    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(body, range(size)))


def failures(size: int, body: Callable[[int], object]) -> list[str]:
    """What each rank says that is wrong."""

    def failure(rank: int) -> str:
        with pytest.raises(SynclineError) as caught:
            body(rank)
        return str(caught.value)

    return as_threads(size, failure)


def test_each_rank_learns_which_process_the_others_are() -> None:
    store = InMemoryStore()
    met = as_threads(2, lambda rank: meet(store, rank, 2, CancelScope(10.0)))
    assert met[0] == met[1]
    assert [met[0].processes[rank].pid for rank in range(2)] == [os.getpid()] * 2
    assert met[0].share_loopback


class CountingStore(InMemoryStore):
    """Counts the requests of each rank, which is the name of its thread; not the waits, which ask as long as they last."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: collections.Counter[str] = collections.Counter()

    def set(self, key: str, value: bytes | str) -> None:
        self.requests[threading.current_thread().name] += 1
        super().set(key, value)

    def get(self, key: str, timeout: Any = None) -> bytes:
        self.requests[threading.current_thread().name] += 1
        return super().get(key, timeout)

    def add(self, key: str, amount: int) -> int:
        self.requests[threading.current_thread().name] += 1
        return super().add(key, amount)

    def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
        self.requests[threading.current_thread().name] += 1
        return super().compare_set(key, expected, desired)


def test_requests_grow_with_the_ranks_of_a_node_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of two ranks."""

    def identity() -> ProcessIdentity:
        rank = int(threading.current_thread().name)
        return ProcessIdentity(f"node {rank // 2}", "host", 100 + rank, 1)

    monkeypatch.setattr(meeting, "own_identity", identity)
    for size in (4, 16):
        store = CountingStore()
        met: dict[int, Met] = {}

        def body(rank: int, store: CountingStore = store, size: int = size, met: dict[int, Met] = met) -> None:
            met[rank] = meet(store, rank, size, CancelScope(10.0))

        threads = [threading.Thread(target=body, args=(rank,), name=str(rank)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank, one in met.items():
            mates = {rank // 2 * 2, rank // 2 * 2 + 1}
            assert {other: process.pid for other, process in one.processes.items()} == {mate: 100 + mate for mate in mates}
            assert not one.share_loopback
        assert sorted(store.requests.values()) == [9] * (size - 1) + [10]


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"rank\(s\) 1, 2 did not come"):
        meet(InMemoryStore(), 0, 3, CancelScope(0.3))


def test_a_rank_that_comes_when_another_has_given_up_does_not_wait_for_it() -> None:
    store = InMemoryStore()
    with pytest.raises(TimeoutError, match=r"rank\(s\) 1, 2 did not come"):
        meet(store, 0, 3, CancelScope(0.3))
    for rank in (1, 2):
        with pytest.raises(TimeoutError, match=r"rank 0 gave up after 0\.3 s, when rank\(s\) 1, 2 had not come"):
            meet(store, rank, 3, CancelScope(60.0))


class InterruptedStore(InMemoryStore):
    """Raises an error in the first wait for the other ranks, as a signal handler does."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.errors = [error]

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        if self.errors:
            raise self.errors.pop()
        super().wait(keys, timeout)


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ZeroDivisionError])
def test_a_rank_that_comes_when_another_was_interrupted_does_not_wait_for_it(error: type[BaseException]) -> None:
    store = InterruptedStore(error)
    with pytest.raises(error):
        meet(store, 0, 3, CancelScope(60.0))
    for rank in (1, 2):
        with pytest.raises(TimeoutError, match=r"rank 0 was interrupted before all had come; call again on all ranks"):
            meet(store, rank, 3, CancelScope(5.0))


def test_an_interrupt_after_all_have_come_leaves_the_others_alone() -> None:
    class Late(InterruptedStore):
        def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
            if self.errors:
                self.compare_set("all came", "", "in order")  # by the last rank
            super().wait(keys, timeout)

    store = Late(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        meet(store, 0, 2, CancelScope(60.0))
    meet(store, 1, 2, CancelScope(60.0))


def test_the_last_rank_may_come_at_the_time_limit() -> None:
    class Late(InMemoryStore):
        def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
            raise StoreTimeout("not yet")

        def compare_set(self, key: str, expected: bytes | str, desired: bytes | str) -> bytes:
            if str(desired).startswith("time-out: "):
                super().compare_set(key, "", "in order")  # by the last rank
            return super().compare_set(key, expected, desired)

    meet(Late(), 0, 2, CancelScope(0.1))


def test_a_wait_that_was_cancelled_raises_the_reason() -> None:
    scope = CancelScope(60)
    scope.cancel(StoreError("rank 1 is lost"))
    with pytest.raises(StoreError, match="rank 1 is lost"):
        meet(InMemoryStore(), 0, 2, scope)
    assert scope.was_noticed  # so the monitor gives the thread time to report the error


def test_a_rank_that_meets_others_hears_why_it_waits_in_vain() -> None:
    scope = CancelScope(5, lambda: StoreError("rank 1 has failed"))
    with pytest.raises(StoreError, match="rank 1 has failed"):
        meet(InMemoryStore(), 0, 2, scope)


def test_a_rank_that_was_told_another_size_is_named_to_all() -> None:
    store, sizes = InMemoryStore(), (3, 3, 2)
    store.compare_set("told", "", json.dumps([0, 3, meeting.__version__]))  # rank 0 came first
    said = failures(3, lambda rank: meet(store, rank, sizes[rank], CancelScope(60.0)))
    assert set(said) == {said[0]}
    assert said[0].startswith("rank 0 was told that there are 3 ranks, and rank 2 that there are 2: pass the same world_size")


@pytest.mark.parametrize("ranks", [(0, 0), (1, 1), (0, 0, 1), (1, 0, 0)])
def test_a_rank_that_two_processes_have_is_named_to_all(ranks: tuple[int, ...]) -> None:
    """It must not end in a wait for the rank that nobody has."""
    store = InMemoryStore()
    twice = max(ranks, key=ranks.count)
    said = failures(len(ranks), lambda number: meet(store, ranks[number], max(2, len(ranks)), CancelScope(20.0)))
    assert len(said) == len(ranks)
    assert all(text.startswith(f"two processes came to this store as rank {twice}: give each process") for text in said)


class StoreOfRank0(InMemoryStore):
    """It ends with rank 0, and the others are slow: they read nothing until rank 0 waits for them, or has ended."""

    def __init__(self) -> None:
        super().__init__()
        self._rank = threading.local()
        self._may_read, self._has_ended = threading.Event(), threading.Event()

    def run(self, rank: int, body: Callable[[], object]) -> object:
        self._rank.number = rank
        try:
            return body()
        finally:
            if rank == 0:
                self._has_ended.set()
                self._may_read.set()

    def get(self, key: str, timeout: Any = None) -> bytes:
        if self._rank.number != 0 and key in ("all came", "addresses"):
            assert self._may_read.wait(60.0)
        if self._has_ended.is_set():
            raise StoreError("the server hung up")
        return super().get(key, timeout)

    def wait(self, keys: Sequence[str], timeout: Any = None) -> None:
        if self._rank.number == 0 and any(key.startswith("read/") for key in keys):
            self._may_read.set()
        super().wait(keys, timeout)


def test_rank_0_serves_the_store_until_all_have_read_what_is_wrong() -> None:
    store, sizes = StoreOfRank0(), (3, 3, 2)
    store.compare_set("told", "", json.dumps([0, 3, meeting.__version__]))  # rank 0 came first
    said = failures(3, lambda rank: store.run(rank, lambda: meet(store, rank, sizes[rank], CancelScope(60.0))))
    assert all("rank 2 that there are 2" in one for one in said), said


def test_versions_that_differ_are_named_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryStore()
    store.compare_set("told", "", '[0, 2, "0.0.9"]')
    store.add("came", 1)
    with pytest.raises(
        DisagreementError, match=rf"different versions .*: rank 0 0\.0\.9, rank 1 {meeting.__version__}\. Install"
    ):
        meet(store, 1, 2, CancelScope(60.0))


def test_a_meeting_that_is_over_belongs_to_another_job() -> None:
    store = InMemoryStore()
    as_threads(2, lambda rank: meet(store, rank, 2, CancelScope(10.0)))
    with pytest.raises(DisagreementError, match="have met in this store before rank 1 came: the store belongs to another job"):
        meet(store, 1, 2, CancelScope(60.0))


def test_ranks_of_one_host_with_networks_of_their_own_do_not_share_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "loopback_domain", lambda: f"net {threading.current_thread().name[-1]}")
    store = InMemoryStore()
    met = as_threads(2, lambda rank: meet(store, rank, 2, CancelScope(10.0)))
    assert [len(one.processes) for one in met] == [2, 2]
    assert not any(one.share_loopback for one in met)


# ---- addresses ----

HERE = [OwnAddress("dead0", "192.0.2.9"), OwnAddress("lo", "127.0.0.2"), OwnAddress("lo", "127.0.0.3")]


@pytest.fixture
def several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    """This host as if each rank were on one of its own; rank 0 has the addresses 127.0.0.2 and 127.0.0.3."""
    monkeypatch.setattr(meeting, "addresses_for_others", lambda interfaces: HERE[1:])
    monkeypatch.setattr(meeting, "loopback_domain", lambda: str(threading.get_ident()))


def test_all_take_the_first_address_of_rank_0_that_all_reach(several_hosts: None) -> None:
    store = InMemoryStore()
    expected = ["127.0.0.2", "127.0.0.1", "127.0.0.1"]  # from where the system reaches that of rank 0
    assert as_threads(3, lambda rank: address_by_store(store, rank, 3, (), CancelScope(20.0))) == expected
    assert run_ranks(3, lambda group: address_by_group(group, (), 20.0)) == expected


@pytest.mark.parametrize("rank", [0, 1])
def test_a_scope_that_is_cancelled_ends_the_search_for_an_address(several_hosts: None, rank: int) -> None:
    reason = StoreError("cancelled")
    with pytest.raises(StoreError) as raised:
        address_by_store(InMemoryStore(), rank, 2, (), CancelScope(10.0, lambda: reason))
    assert raised.value is reason


def test_rank_0_tells_all_that_a_rank_is_lost(several_hosts: None) -> None:
    store = StoreOfRank0()
    lost = RankLostError("rank(s) 2 (pid 7 on a) ended", [2])
    scopes = [CancelScope(20.0, lambda: lost), CancelScope(20.0)]

    def search(rank: int) -> tuple[int, ...]:
        with pytest.raises(RankLostError, match=r"^rank\(s\) 2 \(pid 7 on a\) ended$") as caught:
            store.run(rank, lambda: address_by_store(store, rank, 3, (), scopes[rank]))
        return caught.value.ranks

    assert as_threads(2, search) == [(2,)] * 2


def test_rank_0_hears_of_a_lost_rank_on_another_host(several_hosts: None) -> None:
    store = InMemoryStore()
    lost = RankLostError("rank(s) 2 (pid 7 on b) ended", [2])
    scopes = [CancelScope(20.0), CancelScope(20.0, lambda: lost)]  # rank 0 does not see the loss

    def search(rank: int) -> tuple[int, ...]:
        with pytest.raises(RankLostError) as caught:
            address_by_store(store, rank, 3, (), scopes[rank])
        return caught.value.ranks

    assert as_threads(2, search) == [(2,)] * 2


@pytest.mark.parametrize(("rank", "key"), [(0, "tried/1"), (1, "doors")])
def test_a_rank_that_does_not_search_for_an_address_is_waited_for_until_the_limit(
    several_hosts: None, rank: int, key: str
) -> None:
    with pytest.raises(TimeoutError, match=rf"all have come, but not all said at which address .* \(no '{key}'\)"):
        address_by_store(InMemoryStore(), rank, 2, (), CancelScope(0.4))


def test_on_one_host_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "try_doors", lambda *_: pytest.fail("tried"))
    assert run_ranks(2, lambda group: address_by_group(group, (), 20.0)) == [LOOPBACK] * 2


def failures_over_group(interfaces: Sequence[str]) -> list[str]:
    """What each of two ranks says that is wrong, if they seek their addresses over a group."""

    def failure(group: Any) -> str:
        with pytest.raises(LaunchError) as caught:
            address_by_group(group, interfaces, 20.0)
        return str(caught.value)

    return run_ranks(2, failure)


def test_a_host_without_an_address_is_told_to_all(several_hosts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(interfaces: object) -> list[OwnAddress]:
        raise LaunchError("interface 'x' has no address")

    monkeypatch.setattr(meeting, "addresses_for_others", none)
    store = InMemoryStore()
    said = failures(2, lambda rank: address_by_store(store, rank, 2, ("x",), CancelScope(20.0)))
    assert said == ["interface 'x' has no address"] * 2

    assert failures_over_group(("x",)) == ["interface 'x' has no address"] * 2


def test_all_ranks_say_that_rank_0_can_listen_nowhere(several_hosts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "addresses_for_others", lambda _: [OwnAddress("eth9", "192.0.2.1")])
    store = InMemoryStore()
    said = failures(2, lambda rank: address_by_store(store, rank, 2, (), CancelScope(20.0)))

    said += failures_over_group(())
    assert [text.startswith("rank 0 can listen at none of its addresses") for text in said] == [True] * 4


def test_one_host_without_an_address_is_told_to_all_while_rank_0_serves_the_store(
    several_hosts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(interfaces: object) -> list[OwnAddress]:
        if interfaces:
            raise LaunchError("interface 'x' has no address on host 1")
        return HERE[1:]

    monkeypatch.setattr(meeting, "addresses_for_others", listed)
    store, chosen = StoreOfRank0(), ((), ("x",), ())
    said = failures(3, lambda rank: store.run(rank, lambda: address_by_store(store, rank, 3, chosen[rank], CancelScope(20.0))))
    assert said == ["interface 'x' has no address on host 1"] * 3
