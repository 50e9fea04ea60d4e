from __future__ import annotations

from datetime import timedelta

import pytest

from syncline.collectives import InvalidArgumentError, TransportError
from syncline.collectives.engine.cancel_scope import DEFAULT_TIMEOUT_S, CancelScope, seconds


@pytest.mark.parametrize(
    ("timeout", "expected_s"),
    [(None, DEFAULT_TIMEOUT_S), (3, 3.0), (0.25, 0.25), (timedelta(minutes=2), 120.0), (float("inf"), float("inf"))],
)
def test_seconds(timeout: timedelta | float | None, expected_s: float) -> None:
    assert seconds(timeout) == expected_s


def test_seconds_takes_a_default() -> None:
    assert seconds(None, 7.0) == 7.0


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), timedelta(0), timedelta(seconds=-3)])
def test_seconds_refuses(timeout: timedelta | float) -> None:
    with pytest.raises(InvalidArgumentError, match="positive number of seconds"):
        seconds(timeout)


def test_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("syncline.collectives.engine.cancel_scope.monotonic", lambda: now_s)
    deadline = CancelScope(5.0)
    assert (deadline.remaining_s(), deadline.expired()) == (5.0, False)
    now_s = 104.0
    assert (deadline.remaining_s(), deadline.expired()) == (1.0, False)
    now_s = 105.0
    assert (deadline.remaining_s(), deadline.expired()) == (0.0, True)
    now_s = 200.0
    assert (deadline.remaining_s(), deadline.expired()) == (0.0, True)


def test_a_wait_in_vain_ends_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    left = TransportError("rank 1 left")
    reasons = [None, left, TransportError("asked too often")]
    monkeypatch.setattr("syncline.collectives.engine.cancel_scope.monotonic", lambda: now_s)
    deadline = CancelScope(5.0, lambda: reasons.pop(0))
    assert not deadline.expired()
    assert len(reasons) == 3  # a short wait asks nobody
    now_s += 1.0
    assert not deadline.expired()
    now_s += 1.0
    assert deadline.expired()
    assert (deadline.was_cancelled, deadline.reason, deadline.remaining_s()) == (True, left, 0.0)
