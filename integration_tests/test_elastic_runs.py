"""Some runs of elastic training while ranks die; `dev.py elastic` plays as many as one likes."""

from __future__ import annotations

import pytest

from elastic_runs import Run, compare, play
from test_support.full_run import cases


@pytest.mark.launch
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "run",
    # Ranks over Gloo that are killed are also those of `test_elastic_processes.py`.
    cases([Run("ulfm", 4)], in_full=[Run("gloo", 1), Run("gloo", 0, stops=True)]),
    ids=lambda run: f"{run.way}-{'stop' if run.stops else 'kill'}-{run.seed}",
)
def test_training_goes_on_without_the_lost_ranks(run: Run) -> None:
    outcome = play(run)
    assert not outcome.problems, "\n".join(outcome.problems)
    compare([outcome])
    assert not outcome.problems, "\n".join(outcome.problems)
    assert abs(outcome.accuracy - outcome.undisturbed) < 5
