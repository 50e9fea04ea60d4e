"""The commands and expected outputs of the ReFrame checks in `packaging/reframe`. ReFrame itself is not needed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from test_support.full_run import cases

pytestmark = pytest.mark.launch

JOB = str(Path(__file__).parents[1] / "packaging" / "reframe" / "src" / "job.py")


@pytest.mark.parametrize(
    ("name", "said"),
    cases(
        [("replicas", r"^2 replicas of \d+ parameters are equal after ")], in_full=[("conformance", r"^\d+ checks passed in ")]
    ),
)
def test_a_healthy_job_says_so_once(run_job, name: str, said: str) -> None:
    job = run_job(2, "", JOB, name)
    assert job.status == 0, job.output
    assert len(re.findall(said, job.output, re.MULTILINE)) == 1


def test_a_killed_rank_ends_the_job(run_job) -> None:
    job = run_job(2, "", JOB, "killed", SYNCLINE_REPORT_DIR="")
    assert job.status != 0
    assert "nobody was killed" not in job.output
    assert re.search(r"EXIT CODE: 9|rank 1\b", job.output)


def test_the_bandwidths_have_their_place_in_the_line(run_job) -> None:
    sizes = ("--sizes", "25M", "25M", "--seconds", "0.1")
    job = run_job(2, "", "-m", "syncline.collectives", "bench", *sizes, "--backends", "mpi-in-window", "floor")
    assert job.status == 0, job.output
    for backend in ("mpi-in-window", "floor"):
        assert re.search(rf"^ *25M +{backend}(?: +[\d.]+){{5}} +([\d.]+)", job.output, re.MULTILINE), job.output
