"""LivingSet: it keeps nothing alive, and threads do not disturb each other."""

from __future__ import annotations

import gc
import threading

from syncline.collectives.engine import queue
from syncline.collectives.engine.living_set import LivingSet
from syncline.collectives.engine.queue import Queue

PATIENCE_S = 30.0


class Thing:
    pass


def test_it_keeps_nothing_alive() -> None:
    things: LivingSet[Thing] = LivingSet()
    one, two = Thing(), Thing()
    for thing in (one, two, one):
        things.add(thing)
    assert list(things) == [one, two]
    del one, thing
    gc.collect()
    assert list(things) == [two]
    assert len(things) == 1
    things.discard(two)
    things.discard(two)
    assert list(things) == []
    things.add(two)
    things.clear()
    assert list(things) == []


def test_an_object_that_comes_or_goes_meanwhile_is_no_error() -> None:
    things: LivingSet[Thing] = LivingSet()
    first, last = Thing(), Thing()
    things.add(first)
    things.add(last)
    seen = iter(things)
    assert next(seen) is first
    things.add(Thing())
    things.discard(last)
    assert list(seen) == [last]


def test_groups_may_start_while_another_thread_asks_what_runs() -> None:
    """A future asks all queues before it blocks, on any thread. A `WeakSet` raises "Set changed size during iteration"."""
    is_over = threading.Event()
    errors = []

    def ask() -> None:
        try:
            while not is_over.is_set():
                assert not queue.a_queue_runs_here()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            errors.append(error)

    asking = [threading.Thread(target=ask) for _ in range(2)]
    for thread in asking:
        thread.start()
    for number in range(60):
        started = Queue(f"test-{number}")
        ran = threading.Event()
        started.enqueue(ran.set)
        assert ran.wait(PATIENCE_S)
        started.stop()
    is_over.set()
    for thread in asking:
        thread.join(PATIENCE_S)
    assert errors == []
