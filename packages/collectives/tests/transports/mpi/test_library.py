"""How a rank waits for MPI."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("mpi4py", reason="mpi4py is not installed")

from syncline.collectives.engine.cancel_scope import CancelScope
from syncline.collectives.transports.mpi import library


class Late:
    """A request that is complete at the 60th test."""

    tests = 0

    def Test(self, status: object) -> bool:  # noqa: N802 - mpi4py's name
        self.tests += 1
        return self.tests == 60


@pytest.mark.parametrize(("nap", "expected", "at_once"), [(True, "slept", 15), (False, "yielded", 50)])
def test_a_wait_sleeps_where_it_may_and_else_yields(
    monkeypatch: pytest.MonkeyPatch, nap: bool, expected: str, at_once: int
) -> None:
    did: list[str] = []
    monkeypatch.setattr(library.time, "sleep", lambda _: did.append("slept"))
    monkeypatch.setattr(library, "yield_cpu", lambda: did.append("yielded"))
    request: Any = Late()
    library.wait(request, CancelScope(60.0), nap=nap)
    assert did == [expected] * (59 - at_once)


def test_a_wait_that_sleeps_has_its_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.time, "sleep", lambda _: None)
    request: Any = Late()
    request.tests = 60
    with pytest.raises(TimeoutError):
        library.wait(request, CancelScope(0.01), nap=True)
