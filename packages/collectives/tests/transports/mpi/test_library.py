"""How a rank waits for others: which looks follow one another at once, when it yields, when it sleeps, and for how long."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

from syncline.collectives.engine import cancel_scope
from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.startup.settings import DEFAULT_SPIN_S
from syncline.collectives.transports.mpi import library, waiting
from syncline.collectives.transports.mpi.waiting import ARRIVAL_NAP_S, MESSAGE_NAP_S, NO_NAP_S, Patience, spin_for

YIELD_S = 10e-6


class Clock:
    """Time that passes when the rank rests: 10 us for each time that it yields, and what it sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.yields = 0
        self.naps_s: list[float] = []
        self.napped_after_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.napped_after_s.append(self.now_s - 1000.0)
        self.naps_s.append(seconds)
        self.now_s += seconds

    def yield_cpu(self) -> None:
        self.yields += 1
        self.now_s += YIELD_S


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    monkeypatch.setattr(waiting, "time", made)
    monkeypatch.setattr(waiting, "yield_cpu", made.yield_cpu)
    monkeypatch.setattr(cancel_scope, "monotonic", made.monotonic)
    spin_for(DEFAULT_SPIN_S)
    yield made
    spin_for(DEFAULT_SPIN_S)


def wait_for(seconds: float, clock: Clock, longest_nap_s: float, **options: Any) -> None:
    scope, patience = CancelScope(seconds), Patience(longest_nap_s, **options)
    for _ in range(1_000_000):
        try:
            if patience.rest_then_is_check_due():
                scope.check("nobody came")
        except TimeoutError as error:
            assert str(error) == "nobody came"  # noqa: PT017 - it is the one that ends the loop
            return
    pytest.fail("the wait has no end")


@pytest.mark.parametrize("longest_nap_s", [ARRIVAL_NAP_S, MESSAGE_NAP_S])
def test_a_rank_yields_for_a_while_then_sleeps_for_a_hundredth_of_its_wait(clock: Clock, longest_nap_s: float) -> None:
    wait_for(3.0, clock, longest_nap_s)
    assert DEFAULT_SPIN_S <= clock.napped_after_s[0] < DEFAULT_SPIN_S + 32 * YIELD_S
    for waited_s, nap_s in zip(clock.napped_after_s, clock.naps_s, strict=True):
        assert nap_s == pytest.approx(min(max(waited_s / 100, 50e-6), longest_nap_s), rel=0.02)
    assert max(clock.naps_s) == longest_nap_s
    assert clock.yields * YIELD_S < 0.01 * 3.0
    assert len(clock.naps_s) < 1.5 * 3.0 / longest_nap_s + 200  # looks that cost some 20 us each
    assert 3.0 <= clock.now_s - 1000 < 3.0 + longest_nap_s


def test_what_the_library_must_be_asked_for_again_and_again_is_not_slept_through(clock: Clock) -> None:
    wait_for(0.5, clock, NO_NAP_S)
    assert clock.naps_s == []
    assert 0.5 <= clock.now_s - 1000 < 0.5 + 33 * YIELD_S


@pytest.mark.parametrize("naps_at_once", [False, True])
def test_a_site_may_want_its_ranks_to_spin(clock: Clock, naps_at_once: bool) -> None:
    spin_for(math.inf)
    wait_for(0.5, clock, ARRIVAL_NAP_S, naps_at_once=naps_at_once)
    assert clock.naps_s == []


def test_or_to_sleep_at_once(clock: Clock) -> None:
    spin_for(0.0)
    wait_for(0.5, clock, ARRIVAL_NAP_S)
    assert clock.yields == 0


class Late:
    """A request that is complete at the 60th test."""

    tests = 0

    def Test(self, status: object) -> bool:  # noqa: N802 - mpi4py's name
        self.tests += 1
        return self.tests == 60


@pytest.mark.parametrize("naps_at_once", [True, False])
def test_a_wait_tests_a_few_times_at_once(clock: Clock, naps_at_once: bool) -> None:
    request: Any = Late()
    library.wait(request, CancelScope(60.0), naps_at_once=naps_at_once)
    assert (clock.yields, len(clock.naps_s)) == ((0, 44) if naps_at_once else (9, 0))


def test_a_wait_has_its_time_limit(clock: Clock) -> None:
    request: Any = Late()
    request.tests = 60
    with pytest.raises(TimeoutError):
        library.wait(request, CancelScope(0.01))
    assert 0.01 <= clock.now_s - 1000 < 0.02
