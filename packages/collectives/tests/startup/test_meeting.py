"""Ranks meet in a store."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Mapping
from typing import Any

import pytest

from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.health.process_identity import ProcessIdentity
from syncline.collectives.startup import meeting
from syncline.collectives.startup.meeting import meet
from syncline.collectives.stores import InMemoryStore


def test_each_rank_learns_which_process_the_others_are() -> None:
    store = InMemoryStore()
    met: dict[int, Mapping[int, ProcessIdentity]] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: met.update({rank: meet(store, rank, 2, CancelScope(10.0))}))
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met[0] == met[1]
    assert [met[0][rank].pid for rank in range(2)] == [os.getpid()] * 2


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


def test_requests_grow_with_the_ranks_of_a_node_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes of two ranks."""

    def identity() -> ProcessIdentity:
        rank = int(threading.current_thread().name)
        return ProcessIdentity(f"node {rank // 2}", "host", 100 + rank, 1)

    monkeypatch.setattr(meeting, "own_identity", identity)
    for size in (4, 16):
        store = CountingStore()
        met: dict[int, Mapping[int, ProcessIdentity]] = {}

        def body(rank: int, store: CountingStore = store, size: int = size, met: Any = met) -> None:
            met[rank] = meet(store, rank, size, CancelScope(10.0))

        threads = [threading.Thread(target=body, args=(rank,), name=str(rank)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for rank, processes in met.items():
            mates = {rank // 2 * 2, rank // 2 * 2 + 1}
            assert {other: process.pid for other, process in processes.items()} == {mate: 100 + mate for mate in mates}
        assert sorted(store.requests.values()) == [7] * (size - 1) + [8]


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"rank\(s\) 1, 2 did not come"):
        meet(InMemoryStore(), 0, 3, CancelScope(0.3))
