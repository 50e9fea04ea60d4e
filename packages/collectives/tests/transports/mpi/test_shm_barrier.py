"""Ranks (threads here) that meet in shared memory, with delays, many times; and what is said when one does not come."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.testing import run_ranks
from syncline.collectives.transports.mpi import waiting
from syncline.collectives.transports.mpi.node.shared_sync import GaveUpError, ShmBarrier, barrier_bytes
from syncline.collectives.transports.mpi.sync import NOWHERE
from syncline.collectives.transports.shared_memory import os_memory
from syncline.collectives.transports.shared_memory.os_memory import find_fence
from syncline.collectives.transports.shared_memory.segment import Segment, create_file, padded

FENCE = find_fence()
pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(sys.platform != "linux", reason="memfd_create is Linux's"),
    pytest.mark.skipif(FENCE is None, reason="this processor's fence is in libatomic, which is not installed"),
]


SLOT_BYTES = 4096
PART_BYTES = barrier_bytes(SLOT_BYTES)


def on_barriers(size: int, body: Callable[[ShmBarrier], object]) -> list[object]:
    """What `body` returns on each of some ranks that share a barrier."""
    file = create_file("test", size * padded(PART_BYTES))
    # Sleeping lets the other threads run; between processes nothing need be done.
    barriers = [
        ShmBarrier(Segment(file, size, PART_BYTES, rank), SLOT_BYTES, lambda: time.sleep(0), FENCE) for rank in range(size)
    ]
    os.close(file)
    return run_ranks(size, lambda group: body(barriers[group.rank]))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_nobody_sees_anything_but_the_same_arrival(size: int) -> None:
    """1,000 arrivals, with random delays before and between writing, arriving and reading."""

    def body(barrier: ShmBarrier) -> int:
        chance = random.Random(barrier.mine)
        for repetition in range(1000):
            slots = barrier.slots(barrier.next_parity, 4 + repetition % 3, torch.int64)
            slots[barrier.mine].fill_(repetition * size + barrier.mine)
            _delay(chance)
            barrier.arrive(CancelScope(30))
            _delay(chance)
            for rank, slot in enumerate(slots):
                if set(slot.tolist()) != {repetition * size + rank}:
                    return repetition
        return 1000

    assert on_barriers(size, body) == [1000] * size


def test_a_rank_that_waits_for_long_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one comes when this one has slept 20 times."""
    naps: list[float] = []

    class Time:
        monotonic = staticmethod(time.monotonic)

        @staticmethod
        def sleep(seconds: float) -> None:
            naps.append(seconds)
            if len(naps) == 20:
                slept.set()
            time.sleep(seconds)

    slept = threading.Event()
    monkeypatch.setattr(waiting, "time", Time)

    def body(barrier: ShmBarrier) -> None:
        if barrier.mine == 1:
            assert slept.wait(20)
        barrier.arrive(CancelScope(30))

    on_barriers(2, body)
    assert len(naps) >= 20


def test_what_they_are_about_to_do_is_compared() -> None:
    cases = [  # what rank 0 and the others say, their keys, and what all shall hear
        ((7, 7), (3, 3), (True, True)),
        ((7, 8), (3, 3), (False, True)),
        ((7, 7), (3, 4), (True, False)),
        ((7, 7), (NOWHERE, NOWHERE), (True, False)),
        ((-(2**63), -(2**63)), (2**63 - 1, 2**63 - 1), (True, True)),
    ]

    def body(barrier: ShmBarrier) -> list[tuple[bool, bool]]:
        other = barrier.mine > 0
        return [barrier.arrive(CancelScope(30), what[other], key[other]) for what, key, _ in cases]

    assert on_barriers(3, body) == [[heard for _, _, heard in cases]] * 3


def test_a_rank_that_does_not_come_is_a_timeout_and_messages_go_on_meanwhile() -> None:
    file = create_file("test", 2 * padded(PART_BYTES))
    calls: list[None] = []
    barrier = ShmBarrier(Segment(file, 2, PART_BYTES, 0), SLOT_BYTES, lambda: calls.append(None), FENCE)
    os.close(file)
    with pytest.raises(TimeoutError):
        barrier.arrive(CancelScope(0.05))
    assert calls


@pytest.mark.parametrize("has_arrived", [False, True])
def test_a_rank_that_gives_up_is_named_at_once(has_arrived: bool) -> None:
    """Also by those for whom it had arrived: they may have been about to read what it does not keep any more."""

    gave_up = threading.Event()

    def body(barrier: ShmBarrier) -> str:
        if barrier.mine == 1:
            if has_arrived:
                with pytest.raises(TimeoutError):
                    barrier.arrive(CancelScope(0.1))
            barrier.give_up()
            gave_up.set()
            return ""
        if has_arrived:
            assert gave_up.wait(30)  # else the arrivals could meet, on a busy machine
        with pytest.raises(GaveUpError) as caught:
            barrier.arrive(CancelScope(30))
        return f"rank {caught.value.rank}"

    assert on_barriers(2, body) == ["rank 1", ""]


def test_a_rank_that_gives_up_after_an_arrival_was_complete_spoils_the_next_only() -> None:
    """The others may not have looked yet, and shall end as it did."""
    file = create_file("test", 2 * padded(PART_BYTES))
    first, second = (ShmBarrier(Segment(file, 2, PART_BYTES, rank), SLOT_BYTES, lambda: None, FENCE) for rank in range(2))
    os.close(file)
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            complete = pool.submit(first.arrive, CancelScope(30))
            second.arrive(CancelScope(30))
            complete.result()
    numbers = second._numbers
    own, _ = second._lines[second.arrivals & 1]
    second.give_up()
    assert numbers[own] == second.arrivals
    with pytest.raises(GaveUpError):
        first.arrive(CancelScope(30))


def test_views_serve_inside_and_outside_of_inference_mode() -> None:
    file = create_file("test", padded(PART_BYTES))
    barrier = ShmBarrier(Segment(file, 1, PART_BYTES, 0), SLOT_BYTES, lambda: None, FENCE)
    os.close(file)
    with torch.inference_mode():
        barrier.slots(barrier.next_parity, 3, torch.float32)[0].fill_(1.0)
    barrier.slots(barrier.next_parity, 3, torch.float32)[0].fill_(2.0)


def test_a_slot_ends_before_the_next_begins() -> None:
    file = create_file("test", 2 * padded(PART_BYTES))
    barrier = ShmBarrier(Segment(file, 2, PART_BYTES, 0), SLOT_BYTES, lambda: None, FENCE)
    os.close(file)
    slots = []
    for arrival in range(2):
        slots += barrier.slots(arrival, SLOT_BYTES, torch.uint8)
    for number, slot in enumerate(slots):
        slot.fill_(number + 1)
    assert [set(slot.tolist()) for slot in slots] == [{1}, {2}, {3}, {4}]


def _delay(chance: random.Random) -> None:
    if chance.random() < 0.02:
        time.sleep(chance.random() * 1e-3)


def test_an_arrival_fences_before_its_number_and_after_the_other_numbers() -> None:
    """On a processor that reorders reads and writes, the fences are what keeps the data behind the numbers."""
    file = create_file("test", 2 * padded(PART_BYTES))
    seen: list[tuple[int, int]] = []
    mine = Segment(file, 2, PART_BYTES, 0)
    numbers = mine.contents().cast("q")
    lines = [(mine.offset_of(rank) + 128) // 8 for rank in range(2)]  # arrival 1 is in the second line
    first = ShmBarrier(mine, SLOT_BYTES, lambda: second(), lambda: seen.append((numbers[lines[0]], numbers[lines[1]])))
    other = ShmBarrier(Segment(file, 2, PART_BYTES, 1), SLOT_BYTES, lambda: None, FENCE)
    os.close(file)

    def second() -> None:
        if other.arrivals == 0:
            other.arrive(CancelScope(30))

    first.arrive(CancelScope(30))
    assert seen == [(0, 0), (1, 1)]


@pytest.mark.skipif(find_fence("aarch64") is None, reason="libatomic is not installed")
def test_processors_other_than_x86_fence_by_libatomic() -> None:
    fence = find_fence("aarch64")
    assert fence is not None
    assert fence is not find_fence("x86_64")
    fence()


def test_without_libatomic_only_x86_has_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(os_memory.ctypes, "PyDLL", missing)
    assert find_fence("aarch64") is None
    assert find_fence("x86_64") is not None


def two_barriers(progress: Callable[[], object] = lambda: None) -> list[ShmBarrier]:
    """The barriers of two ranks in this process. `progress` is called while rank 0 waits."""
    file = create_file("test", 2 * padded(PART_BYTES))
    waits = [progress, lambda: None]
    made = [ShmBarrier(Segment(file, 2, PART_BYTES, rank), SLOT_BYTES, waits[rank], FENCE) for rank in range(2)]
    os.close(file)
    return made


def test_a_slow_rank_completes_an_arrival_although_another_rank_has_given_up_at_the_next() -> None:
    is_slow, goes_on = threading.Event(), threading.Event()

    def sleep() -> None:
        is_slow.set()
        assert goes_on.wait(30)

    slow, fast = two_barriers(sleep)
    with ThreadPoolExecutor(1) as pool:
        arrival = pool.submit(slow.arrive, CancelScope(30), 7)
        assert is_slow.wait(30)
        assert fast.arrive(CancelScope(30), 7) == (True, False)
        with pytest.raises(TimeoutError):
            fast.arrive(CancelScope(0.05))
        fast.give_up()
        goes_on.set()
        assert arrival.result() == (True, False)
    with pytest.raises(GaveUpError):
        slow.arrive(CancelScope(30))


def test_an_arrival_after_giving_up_does_not_replace_the_mark() -> None:
    """`abort` gives up on another thread. This rank's own thread may be about to arrive."""
    aborted, other = two_barriers()
    aborted.give_up()
    scope = CancelScope(30)
    scope.cancel(RuntimeError("the group was aborted"))
    with pytest.raises(RuntimeError, match="the group was aborted"):
        aborted.arrive(scope)
    for _ in range(2):
        with pytest.raises(GaveUpError):
            other.arrive(CancelScope(30))
