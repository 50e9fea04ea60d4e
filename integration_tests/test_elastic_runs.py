"""Some runs of elastic training while ranks die; `dev.py elastic` plays any number."""

from __future__ import annotations

import pytest

from elastic_runs import WHILE_CONNECTING, Run, compare, play
from test_support.full_run import cases

PATIENCE_S = 20  # of `elastic_job.py`


@pytest.mark.launch
@pytest.mark.timeout(700)
@pytest.mark.parametrize(
    "run",
    # Ranks over Gloo that are killed are also those of `test_elastic_processes.py`.
    cases(
        [Run("ulfm", 4, epochs=2)],
        in_full=[
            Run("ulfm", 4),
            Run("ulfm", 5, given=((3, 5, "in the collective"), (2, 5, WHILE_CONNECTING))),
            Run("gloo", 1),
            Run("gloo", 0, stops=True),
        ],
    ),
    ids=lambda run: f"{run.way}-{'stop' if run.stops else 'kill'}-{run.seed}-{run.epochs} epochs",
)
def test_training_goes_on_without_the_lost_ranks(run: Run) -> None:
    outcome = play(run)
    assert not outcome.problems, "\n".join(outcome.problems)
    if not run.stops:
        assert all(each["applied"] < PATIENCE_S for each in outcome.recoveries), "nobody waits for a rank that has ended"
    compare([outcome])
    assert not outcome.problems, "\n".join(outcome.problems)
    assert abs(outcome.accuracy - outcome.undisturbed) < 5
