"""A few jobs of the chaos test; `dev.py chaos` plays as many as one likes."""

from __future__ import annotations

import pytest

from chaos import Run, play


@pytest.mark.launch
@pytest.mark.parametrize(
    "run",
    [
        Run("gloo", 3, "kill", 0),
        Run("openmpi", 3, "kill", 2),
        Run("ulfm", 3, "kill", 3),
        Run("mpich", 3, "stop", 1),
        Run("mpich", 3, "kill", 4),
    ],
    ids=lambda run: f"{run.way}-{run.ranks}-{run.what}",
)
def test_no_rank_waits_for_one_that_is_gone(run: Run) -> None:
    outcome = play(run)
    assert outcome.passed, outcome.words
