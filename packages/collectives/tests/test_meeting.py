"""Ranks meet in a store."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

import pytest

from syncline.collectives.contract.deadline import Deadline
from syncline.collectives.failures.process_identity import ProcessIdentity
from syncline.collectives.startup.meeting import meet
from syncline.collectives.stores import InMemoryStore


def test_each_rank_learns_which_process_the_others_are() -> None:
    store = InMemoryStore()
    met: dict[int, Mapping[int, ProcessIdentity]] = {}
    threads = [
        threading.Thread(target=lambda rank=rank: met.update({rank: meet(store, rank, 2, Deadline(10.0))})) for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met[0] == met[1]
    assert [met[0][rank].pid for rank in range(2)] == [os.getpid()] * 2


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(TimeoutError, match=r"rank\(s\) 1, 2 did not come"):
        meet(InMemoryStore(), 0, 3, Deadline(0.3))
