"""A few jobs of the chaos test, and a short soak; `dev.py chaos` and `dev.py soak` run any number, for any time."""

from __future__ import annotations

import os
import subprocess

import pytest

import mpi_runtimes
from chaos import Run, play
from commands import ROOT, TOOLS_ON_PATH
from test_support.full_run import cases


@pytest.mark.launch
@pytest.mark.parametrize(
    "run",
    cases(
        [
            Run("openmpi", 3, "kill", 2),
            Run("mpich", 3, "stop", 1),
        ],
        in_full=[
            Run("gloo", 3, "kill", 0),  # also killed in the unit tests of lost ranks over Gloo
            Run("ulfm", 3, "kill", 3),  # also killed in `test_elastic_runs.py`
            Run("mpich", 3, "kill", 4),
        ],
    ),
    ids=lambda run: f"{run.way}-{run.ranks}-{run.what}",
)
def test_no_rank_waits_for_one_that_is_gone(run: Run) -> None:
    outcome = play(run, limit_s=60.0)  # a busy machine needs up to a minute to notice the loss
    assert outcome.passed, outcome.words


@pytest.mark.launch
def test_a_soak_stays_within_its_bound(preloaded: list[str]) -> None:
    runtime = mpi_runtimes.find("mpich")
    words = (*runtime.command(4), *preloaded, ROOT / "tools" / "test_support" / "soak_job.py", "3", "0")
    environ = {**os.environ, **TOOLS_ON_PATH, **runtime.env, "OMP_NUM_THREADS": "1", "SYNCLINE_REPORT_DIR": ""}
    job = subprocess.run(words, capture_output=True, text=True, env=environ, timeout=200)
    assert job.returncode == 0, job.stderr
    *bounds, header = job.stdout.splitlines()[:3]
    *lines, verdict = job.stdout.splitlines()[3:]
    assert bounds[0].endswith("resident none, for the allocator states none")
    assert bounds[1].startswith("bound of the growth: in use 488 MiB (tensors 275, copies 183, plans 30)")
    assert verdict.endswith("within the bound")
    assert header.split()[:3] == ["s", "calls", "resident"]
    assert len(lines) == 12
    assert int(lines[-1].split()[1]) > 0
