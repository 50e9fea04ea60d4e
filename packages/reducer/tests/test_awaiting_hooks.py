"""Which buckets wait for users' hooks: threads and backwards are numbers here."""

from __future__ import annotations

import threading

import pytest

from syncline.reducer import awaiting_hooks
from syncline.reducer.awaiting_hooks import AwaitingHooks
from syncline.reducer.gradient_hooks import PendingGradients


@pytest.fixture
def backward(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of the backward that runs, in a list that the test may change."""
    running = [0]
    monkeypatch.setattr(awaiting_hooks, "current_backward", lambda: running[0])
    return running


def bucket(*indices: int) -> PendingGradients:
    pending = PendingGradients()
    pending.indices.extend(indices)
    return pending


@pytest.mark.usefixtures("backward")
def test_a_later_gradient_of_the_same_backward_ends_the_wait() -> None:
    waiting, one, other = AwaitingHooks(), bucket(0), bucket(1)
    waiting.add(one)
    waiting.add(other)
    assert waiting.pop_done() == [one, other]
    assert waiting.pop_done() == []


def test_a_gradient_of_an_inner_backward_does_not_end_the_wait(backward: list[int]) -> None:
    waiting, outer, inner = AwaitingHooks(), bucket(0), bucket(1)
    waiting.add(outer)
    backward[0] = 1
    assert waiting.pop_done() == []
    waiting.add(inner)
    assert waiting.pop_done() == [inner]
    backward[0] = 0
    assert waiting.pop_done() == [outer]


@pytest.mark.usefixtures("backward")
def test_a_gradient_on_another_thread_does_not_end_the_wait() -> None:
    waiting, pending, seen = AwaitingHooks(), bucket(0), []
    waiting.add(pending)
    thread = threading.Thread(target=lambda: seen.append(waiting.pop_done()))
    thread.start()
    thread.join()
    assert seen == [[]]
    assert waiting.pop_done() == [pending]


@pytest.mark.usefixtures("backward")
def test_a_node_ends_the_wait_for_its_own_gradient_only() -> None:
    waiting, pending = AwaitingHooks(), bucket(3, 4)
    assert not waiting.node_done(pending, 4), "nothing waits"
    waiting.add(pending)
    assert not waiting.node_done(pending, 3), "hooks on 4 may still run"
    assert not waiting.node_done(bucket(4), 4), "another bucket"
    assert waiting.node_done(pending, 4)
    assert not waiting.node_done(pending, 4), "once"
    assert waiting.pop_done() == []


@pytest.mark.usefixtures("backward")
def test_nothing_waits_after_clear() -> None:
    waiting = AwaitingHooks()
    waiting.add(bucket(0))
    waiting.clear()
    assert waiting.pop_done() == []
