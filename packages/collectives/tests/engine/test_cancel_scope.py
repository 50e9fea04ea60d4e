"""Time limits, reasons that end a wait, and calls that may never return."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch

from syncline.collectives import InvalidArgumentError, TransportError
from syncline.collectives.engine.cancel_scope import DEFAULT_TIMEOUT_S, CancelScope, DetachedCall, seconds


@pytest.mark.parametrize(
    ("timeout", "expected_s"),
    [
        (None, DEFAULT_TIMEOUT_S),
        (3, 3.0),
        (0.25, 0.25),
        (timedelta(minutes=2), 120.0),
        (float("inf"), 30 * 365 * 86400.0),
        (timedelta.max, 30 * 365 * 86400.0),
    ],
)
def test_seconds(timeout: timedelta | float | None, expected_s: float) -> None:
    assert seconds(timeout) == expected_s


def test_seconds_takes_a_default() -> None:
    assert seconds(None, 7.0) == 7.0


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), timedelta(0), timedelta(seconds=-3), "long", [1], torch.ones(2)])
def test_seconds_refuses(timeout: timedelta | float) -> None:
    with pytest.raises(InvalidArgumentError, match="positive number of seconds"):
        seconds(timeout)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that a test sets."""
    made = SimpleNamespace(now_s=100.0)
    monkeypatch.setattr("syncline.collectives.engine.cancel_scope.monotonic", lambda: made.now_s)
    return made


def test_a_scope_ends_at_its_time_limit(clock: SimpleNamespace) -> None:
    scope = CancelScope(5.0)
    for now_s, remaining_s in ((100.0, 5.0), (104.0, 1.0)):
        clock.now_s = now_s
        scope.check()
        assert (scope.remaining_s(), scope.is_over()) == (remaining_s, False)
    assert not scope.was_noticed
    for now_s in (105.0, 200.0):
        clock.now_s = now_s
        assert (scope.remaining_s(), scope.is_over()) == (0.0, True)
        with pytest.raises(TimeoutError, match="nobody came"):
            scope.check("nobody came")
    assert scope.was_noticed
    assert scope.reason is None


def test_the_first_reason_counts() -> None:
    scope, first = CancelScope(60.0), TransportError("rank 1 left")
    scope.cancel(first)
    scope.cancel(TransportError("rank 2 left"))
    assert (scope.is_over(), scope.remaining_s(), scope.was_noticed) == (True, 0.0, False)
    with pytest.raises(TransportError) as raised:
        scope.check()
    assert raised.value is first
    assert scope.was_noticed


def test_a_reason_comes_before_the_time_limit(clock: SimpleNamespace) -> None:
    """Both ended it: what somebody knows says more than that time went by."""
    scope, left = CancelScope(5.0), TransportError("rank 1 left")
    clock.now_s += 6.0
    scope.cancel(left)
    with pytest.raises(TransportError, match="rank 1 left"):
        scope.check()


def test_the_waiting_thread_asks_now_and_then_whether_it_waits_in_vain(clock: SimpleNamespace) -> None:
    left = TransportError("rank 1 left")
    reasons = [None, left, TransportError("asked too often")]
    scope = CancelScope(5.0, lambda: reasons.pop(0))
    scope.check()
    assert len(reasons) == 3  # a short wait asks nobody
    clock.now_s += 1.0
    scope.check()
    scope.check()
    assert len(reasons) == 2  # not at each look
    clock.now_s += 1.0
    with pytest.raises(TransportError) as raised:
        scope.check()
    assert raised.value is left
    assert (scope.is_over(), scope.reason, scope.remaining_s()) == (True, left, 0.0)
    clock.now_s += 1.0
    with pytest.raises(TransportError) as raised:
        scope.check()
    assert raised.value is left
    assert len(reasons) == 1


# ---- calls that may never return ----


def test_a_detached_call_gives_what_the_function_gives() -> None:
    entered: list[str] = []

    @contextmanager
    def context() -> Iterator[None]:
        entered.append(threading.current_thread().name)
        yield

    def divide() -> float:
        return 1 / 0

    assert DetachedCall(lambda: 7, "syncline-test", context).wait(CancelScope(60.0)) == 7
    assert entered == ["syncline-test"]
    with pytest.raises(ZeroDivisionError):
        DetachedCall(divide, "syncline-test").wait(CancelScope(60.0))


def test_a_detached_call_is_left_behind_when_its_scope_ends() -> None:
    gate = threading.Event()
    call = DetachedCall(lambda: gate.wait(60), "syncline-test")
    with pytest.raises(TimeoutError, match="the library does not answer"):
        call.wait(CancelScope(0.01), what="the library does not answer")
    scope = CancelScope(60.0)
    scope.cancel(TransportError("rank 1 left"))
    with pytest.raises(TransportError, match="rank 1 left"):
        call.wait(scope)
    assert not call.done.is_set()
    gate.set()
    assert call.wait(CancelScope(60.0)) is True


def test_a_scope_within_another_ends_with_it_or_sooner(clock: SimpleNamespace) -> None:
    whole = CancelScope(10.0)
    assert (whole.within(3.0).remaining_s(), whole.within(30.0).remaining_s()) == (3.0, 10.0)
    part = whole.within(3.0)
    part.check()
    whole.cancel(TransportError("rank 1 is lost"))
    clock.now_s += 1.0  # the first checks of a wait ask nothing
    with pytest.raises(TransportError, match="rank 1 is lost"):
        part.check()


def test_a_scope_within_another_asks_the_same_or_its_own_question(clock: SimpleNamespace) -> None:
    whole = CancelScope(10.0, lambda: TransportError("the outer reason"))
    for part, reason in (
        (whole.within(5.0), "the outer reason"),
        (whole.within(5.0, lambda: TransportError("its own reason")), "its own reason"),
    ):
        part.check()
        clock.now_s += 1.0
        with pytest.raises(TransportError, match=reason):
            part.check()
