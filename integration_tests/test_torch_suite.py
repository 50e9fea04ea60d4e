"""Torch's own distributed tests, from the installed wheel, with our backend and our DDP in place of torch's.

Our backend with our DDP runs all of them. Each other variant runs a sample, and with `dev.py test --full` all tests about it.
SYNCLINE_TEST_RANKS is the number of ranks (2), SYNCLINE_TEST_MPIEXEC the mpiexec. With SYNCLINE_TEST_PLAYED_GPUS=1, which
`dev.py torch-suite` sets, tests that need a GPU for each rank run as well, on CPUs; see `cpu_in_place_of_gpu`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("expecttest")  # torch's tests import it

sys.path.insert(0, str(Path(__file__).with_name("torch_suite")))

from driver import Outcome, run_tests
from expectations import NOT_PASSING, chosen_for
from variants import PLAYED, VARIANTS

from test_support.full_run import FULL
from test_support.jobs import mpiexec_of_tests, skip_without_mpiexec

pytestmark = [pytest.mark.launch, pytest.mark.timeout(2000)]  # many tests in one job

RANKS = int(os.environ.get("SYNCLINE_TEST_RANKS", "2"))
PLAYS_GPUS = os.environ.get("SYNCLINE_TEST_PLAYED_GPUS") == "1"


def surprises(outcomes: dict[str, Outcome], expected: dict[str, str]) -> list[str]:
    """Tests with another outcome than the table says."""
    passed = [f"{test} passed, but was not to: {expected[test]}" for test in expected if outcomes[test].kind == "passed"]
    return passed + [
        f"{test} {outcome.kind}: {outcome.why}"
        for test, outcome in outcomes.items()
        if outcome.kind != "passed" and test not in expected
    ]


@pytest.mark.parametrize("variant", list(NOT_PASSING))
def test_as_the_table_says(variant: str, tmp_path: Path, preloaded: list[str]) -> None:
    if variant.endswith(PLAYED) and not PLAYS_GPUS:
        pytest.skip("takes minutes: dev.py torch-suite")
    mpiexec = mpiexec_of_tests()
    if VARIANTS[variant].needs_mpi:
        skip_without_mpiexec(mpiexec)
    tests = chosen_for(variant, everything=FULL)
    outcomes = run_tests(variant, tests, RANKS, tmp_path, mpiexec, python=preloaded)
    if RANKS != 2:  # with more ranks torch skips some
        outcomes = {test: outcome for test, outcome in outcomes.items() if outcome.kind != "skipped"}
    expected = {test: why for test, why in NOT_PASSING[variant].items() if test in outcomes}
    found = surprises(outcomes, expected)
    assert not found, "\n".join(found)


def test_a_table_that_is_not_true_is_noticed() -> None:
    outcomes = {"a": Outcome("passed"), "b": Outcome("hung", "in barrier"), "c": Outcome("failed", "known")}
    found = surprises(outcomes, {"a": "refused", "c": "refused"})
    assert found == ["a passed, but was not to: refused", "b hung: in barrier"]
